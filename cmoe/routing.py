"""The bundles of tensors that pass from stage to stage of a layer.

T tokens, H hidden, E experts, K experts per token.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RouterInputs(NamedTuple):
    """What a router may look at; a router names the fields that it needs in `requires`."""

    hidden_states: Tensor  # [T, H]
    router_logits: Tensor | None = None  # [T, E], any float dtype
    topk_weights: Tensor | None = None  # [T, K] float32, when the caller has routed already
    topk_ids: Tensor | None = None  # [T, K] int32 or int64, likewise
    input_ids: Tensor | None = None  # [T] int64, ids of the tokens in the vocabulary


class Routing(NamedTuple):
    """Which experts each token goes to."""

    topk_weights: Tensor  # [T, K] float32
    topk_ids: Tensor  # [T, K] int32 or int64; -1: the slot contributes nothing
    identity_weights: Tensor | None = None  # [T] float32: the token's own weight (zero experts)

    def scaled(self, factor: float) -> Routing:
        """The same experts, every weight multiplied."""
        identity = None if self.identity_weights is None else self.identity_weights * factor
        return Routing(self.topk_weights * factor, self.topk_ids, identity)
