"""The router of the closed formulas: score, group, choose, weigh.

T tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cmoe.config import MoEConfig
from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.route import Formula, route
from cmoe.router.base import FusedMoERouter
from cmoe.routing import RouterInputs, Routing


class TopKRouter(FusedMoERouter):
    """`custom_ops.route` with the constants of `config.router`; its docstring has the formula.

    Covers softmax top-k in either order (Mixtral, Qwen3-MoE, OLMoE, gpt-oss), sigmoid,
    sqrt-softplus, ungrouped bias, grouped top-k with a bias or without (DeepSeek-V2, -V3, GLM-4.5).
    e_score_correction_bias: buffer [E] float32, under `.to(dtype)` too.
    """

    is_closed = True
    e_score_correction_bias: Tensor | None

    def __init__(self, config: MoEConfig, *, num_logits: int | None = None) -> None:
        """num_logits: columns to route over; default: the experts of the config."""
        super().__init__()
        self.top_k = config.top_k
        self.config = config.router
        self.num_logits = config.num_experts if num_logits is None else num_logits
        bias = None
        if config.router.e_score_correction_bias:
            bias = torch.zeros(self.num_logits, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.use_kernels(Kernels(fused_experts=route, route=route))

    def use_kernels(self, kernels: Kernels) -> None:
        """Takes the backend's `route`."""
        self._route: Callable[..., tuple[Tensor, Tensor]] = kernels.route

    def runs(self, kernel: Callable[..., tuple[Tensor, Tensor]]) -> bool:
        """Whether that is the `route` it was given."""
        return self._route is kernel

    def forward(self, inputs: RouterInputs) -> Routing:
        """router_logits: [T, E], any float dtype."""
        return Routing(*self._route(inputs.router_logits, *self.formula()))

    def formula(self) -> Formula:
        """The constants of the config with the bias, as `route` takes them."""
        config = self.config
        return Formula(
            self.e_score_correction_bias,
            self.top_k,
            config.scoring_func,
            config.softmax_after_topk,
            config.renormalize,
            config.renormalize_epsilon,
            config.num_expert_group,
            config.topk_group,
            config.scale_on_weights(),
        )

    def extra_repr(self) -> str:
        """K, the formula."""
        config = self.config
        groups = f", best {config.topk_group} of {config.num_expert_group} groups"
        return (
            f"top_k={self.top_k}, {config.scoring_func}"
            f"{' after top-k' if config.softmax_after_topk else ''}"
            f"{', renormalized' if config.renormalize else ''}"
            f"{groups if config.num_expert_group > 1 else ''}"
        )

    def correction_bias(self) -> Tensor | None:
        """e_score_correction_bias."""
        return self.e_score_correction_bias

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TopKRouter:
        # A bfloat16 bias has steps of 1/32 near 7 where DeepSeek-V3's values lie, so it must not
        # follow the weights to another dtype.
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.dtype != torch.float32:
            self.e_score_correction_bias = before.to(after.device, torch.float32)
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_route"]  # The runner hands in the kernels of the place where the copy lives.
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.use_kernels(Kernels(fused_experts=route, route=route))
