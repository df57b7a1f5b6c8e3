"""The router with zero experts: choices that give a token back to itself.

T tokens, E experts, Z zero experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cmoe.config import MoEConfig
from cmoe.custom_ops.backends import Kernels
from cmoe.router.base import FusedMoERouter
from cmoe.router.topk import TopKRouter
from cmoe.routing import RouterInputs, Routing


class ZeroExpertRouter(FusedMoERouter):
    """Routes over E + Z columns; a choice of column E or above is the identity (LongCat-Flash).

    y = sum over real choices of w * expert(x) + x * (sum of w over zero choices). Zero choices get
    the id -1, so that no expert works for them. logits: [T, E + Z].
    Source: LongCat-Flash (arXiv 2509.01322), section on zero-computation experts.
    """

    is_closed = True

    def __init__(self, config: MoEConfig, num_zero_experts: int) -> None:
        super().__init__()
        if num_zero_experts < 1:
            raise ValueError(f"num_zero_experts must be at least 1, got {num_zero_experts}")
        if config.router.num_expert_group > 1:
            raise ValueError(
                "zero experts belong to no group: num_expert_group must be 1, got "
                f"{config.router.num_expert_group}"
            )
        self.num_experts = config.num_experts
        self.num_logits = config.num_experts + num_zero_experts
        self.topk = TopKRouter(config, num_logits=self.num_logits)

    def use_kernels(self, kernels: Kernels) -> None:
        """Takes the backend's `route`."""
        self.topk.use_kernels(kernels)

    def forward(self, inputs: RouterInputs) -> Routing:
        """router_logits: [T, E + Z]."""
        weights, ids, _ = self.topk(inputs)
        is_zero = ids >= self.num_experts
        identity = torch.where(is_zero, weights, 0).sum(-1)
        return Routing(torch.where(is_zero, 0, weights), torch.where(is_zero, -1, ids), identity)

    def correction_bias(self) -> Tensor | None:
        """The bias over all E + Z columns."""
        return self.topk.correction_bias()
