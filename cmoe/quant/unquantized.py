"""Expert weights in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cmoe.config import MoEConfig
from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.fused_experts import Experts
from cmoe.quant.base import QuantMethod
from cmoe.routing import Routing


class Unquantized(QuantMethod):
    """w13_weight [E, N, H] (gate rows, up rows), w2_weight [E, H, I], biases [E, N], [E, H]."""

    def create_weights(
        self, config: MoEConfig, num_local_experts: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Two weights, with two biases where the config has them."""
        hidden, intermediate = config.padded_hidden_size(), config.padded_intermediate_size()
        rows = (2 if config.activation.is_gated() else 1) * intermediate
        shapes: dict[str, tuple[int, ...]] = {
            "w13_weight": (num_local_experts, rows, hidden),
            "w2_weight": (num_local_experts, hidden, intermediate),
        }
        if config.has_bias:
            shapes["w13_bias"] = (num_local_experts, rows)
            shapes["w2_bias"] = (num_local_experts, hidden)
        return {name: (shape, config.params_dtype) for name, shape in shapes.items()}

    def apply(
        self,
        config: MoEConfig,
        weights: Mapping[str, Tensor],
        expert_map: Tensor | None,
        kernels: Kernels,
        x: Tensor,
        routing: Routing,
    ) -> Tensor:
        """One call of fused_experts."""
        experts = self.experts(config, weights, expert_map)
        return kernels.fused_experts(*experts.arguments(x, routing.topk_weights, routing.topk_ids))

    def experts(
        self, config: MoEConfig, weights: Mapping[str, Tensor], expert_map: Tensor | None
    ) -> Experts:
        """The weights with the constants of the config, as `fused_experts` takes them."""
        return Experts(
            weights["w13_weight"],
            weights["w2_weight"],
            weights.get("w13_bias"),
            weights.get("w2_bias"),
            expert_map,
            config.activation.name,
            config.activation.alpha,
            config.activation.limit,
            False,
            config.router.apply_router_weight_on_input,
        )
