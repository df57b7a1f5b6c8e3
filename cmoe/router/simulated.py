"""Routers for benchmarks: the load is chosen, the logits do not matter.

T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Literal

import torch

from cmoe.config import MoEConfig
from cmoe.router.base import FusedMoERouter
from cmoe.routing import RouterInputs, Routing


class SimulatedRouter(FusedMoERouter):
    """K distinct experts for each token, drawn at random; weights 1 / K.

    uniform: every expert as likely as any other. skewed: expert e with weight 1 / (e + 1)**exponent
    (Zipf), drawn without replacement (Gumbel top-k, Kool et al. 2019, arXiv 1903.06059).
    Fresh draws at each call from torch's generator: seed it with `torch.manual_seed`.
    """

    requires: frozenset[str] = frozenset()
    is_closed = True

    def __init__(
        self,
        config: MoEConfig,
        load: Literal["uniform", "skewed"] = "uniform",
        *,
        exponent: float = 1.0,
    ) -> None:
        super().__init__()
        if load not in ("uniform", "skewed"):
            raise ValueError(f"unknown load {load!r}; choose uniform or skewed")
        self.top_k = config.top_k
        self.num_experts = config.num_experts
        self.exponent = 0.0 if load == "uniform" else exponent

    def forward(self, inputs: RouterInputs) -> Routing:
        """Reads only how many tokens there are, where they are."""
        num_tokens, device = inputs.hidden_states.shape[0], inputs.hidden_states.device
        f32 = torch.float32
        ranks = torch.arange(1, self.num_experts + 1, dtype=f32, device=device)
        uniform = torch.rand(num_tokens, self.num_experts, dtype=f32, device=device)
        gumbel = -(-uniform.clamp_min(torch.finfo(f32).tiny).log()).log()
        keys = gumbel - self.exponent * ranks.log()
        ids = keys.topk(self.top_k, dim=-1).indices.to(torch.int32)
        return Routing(torch.full(ids.shape, 1 / self.top_k, dtype=f32, device=device), ids)
