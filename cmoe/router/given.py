"""The router for callers that have routed already.   T tokens, K experts per token."""

from __future__ import annotations

import torch

from cmoe.router.base import FusedMoERouter
from cmoe.routing import RouterInputs, Routing


class GivenTopKRouter(FusedMoERouter):
    """The caller's topk_weights [T, K] with topk_ids [T, K], as they are; K may differ by call."""

    requires = frozenset({"topk_weights", "topk_ids"})
    is_closed = True

    def forward(self, inputs: RouterInputs) -> Routing:
        """Weights in float32 (float64 stays)."""
        weights, ids = inputs.topk_weights, inputs.topk_ids
        assert weights is not None
        assert ids is not None
        wide = torch.promote_types(weights.dtype, torch.float32)
        return Routing(weights.to(wide), ids)
