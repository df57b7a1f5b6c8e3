"""The router that calls a function of the user's.   T tokens, E experts, K experts per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cmoe.config import MoEConfig
from cmoe.router.base import FusedMoERouter
from cmoe.routing import RouterInputs, Routing

RoutingFunction = Callable[[Tensor, Tensor, int, bool], tuple[Tensor, Tensor]]


class CustomRouter(FusedMoERouter):
    """weights, ids = function(hidden_states, router_logits, top_k, renormalize).

    The signature of vLLM's `custom_routing_function`. hidden_states: [T, H]; router_logits: [T, E]
    -> weights [T, K], ids [T, K] in [-1, E). Weights are multiplied by the routed scaling factor.
    The function may close over tensors, also such that train or that a graph writes: compiled
    layers trace it, so torch.compile must be able to.
    """

    def __init__(self, config: MoEConfig, function: RoutingFunction) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.renormalize = config.router.renormalize
        self.num_logits = config.num_experts
        self.function = function
        self.scaling = config.router.scale_on_weights()

    def forward(self, inputs: RouterInputs) -> Routing:
        """The function's answer, its shapes checked."""
        x, logits = inputs.hidden_states, inputs.router_logits
        assert logits is not None
        weights, ids = self.function(x, logits, self.top_k, self.renormalize)
        expected = (x.shape[0], self.top_k)
        if tuple(weights.shape) != expected or tuple(ids.shape) != expected:
            raise ValueError(
                f"the custom routing function must return weights, ids of shape {expected}; "
                f"got {tuple(weights.shape)}, {tuple(ids.shape)}"
            )
        wide = torch.promote_types(weights.dtype, torch.float32)
        return Routing(weights.to(wide) * self.scaling, ids)
