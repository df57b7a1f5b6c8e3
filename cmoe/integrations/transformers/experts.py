"""`experts_implementation="cmoe"`: the experts interface of transformers on cmoe's kernels.

T tokens, H hidden, I intermediate, E experts of the module, K experts per token, R = T * K rows,
N = 2I for gated experts, I for others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from cmoe.custom_ops.backends import Backend, LayerSpec, list_backends, select_kernels
from cmoe.custom_ops.fused_experts import SCHEMA, fused_experts_fake, fused_experts_reference
from cmoe.custom_ops.grouped_mm import grouped_mm
from cmoe.custom_ops.registration import define_op, differentiable
from cmoe.errors import UnsupportedError
from cmoe.integrations.transformers.fused_form import FusedForm, fused_form

logger = logging.getLogger("cmoe")


class ExpertWeights(NamedTuple):
    """The module's weights where they lie, each seen as [E, out, in]."""

    w13: Tensor  # [E, N, H]
    w2: Tensor  # [E, H, I]
    w13_bias: Tensor | None  # [E, N]
    w2_bias: Tensor | None  # [E, H]

    def mixed_dtypes(self) -> bool:
        """Whether the tensors have several dtypes."""
        return any(t is not None and t.dtype != self.w13.dtype for t in self)


def register() -> None:
    """Makes "cmoe" known to transformers, for all its models; calling it again changes nothing.

    From then on `from_pretrained(..., experts_implementation="cmoe")` or
    `model.set_experts_implementation("cmoe")` run a model's experts on cmoe's kernels.
    """
    ALL_EXPERTS_FUNCTIONS.register("cmoe", cmoe_experts_forward)


def cmoe_experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The forward of an experts module, the sum over each token's experts [T, H].

    self: a module of a class under `use_experts_implementation`. hidden_states: [T, H];
    top_k_index: [T, K], an expert-parallel module skips ids past its last expert; top_k_weights:
    [T, K]. Like transformers' `grouped_mm`, it computes in the dtype of the weights, under autocast
    too, and returns that of hidden_states. UnsupportedError for quantised weights.
    """
    weights = _weights(self)
    if self._is_expert_parallel:
        top_k_index = torch.where(top_k_index >= self.num_experts, -1, top_k_index)
    wide = torch.promote_types(weights.w13.dtype, torch.float32)
    x, scores = hidden_states.to(weights.w13.dtype), top_k_weights.to(wide)
    form = "its tensors have several dtypes" if weights.mixed_dtypes() else fused_form(self)
    if isinstance(form, str):
        _say_staged(type(self).__name__, form)
        y = _staged(self, weights, x, top_k_index, scores)
    else:
        y = _fused(form, weights, x, top_k_index, scores)
    return y.to(hidden_states.dtype)


def _weights(experts: Any) -> ExpertWeights:
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    w13, w2 = getattr(experts, name), experts.down_proj
    if not (w13.dtype.is_floating_point and w2.dtype.is_floating_point) or w13.element_size() == 1:
        raise UnsupportedError(
            f"{type(experts).__name__} has weights of {w13.dtype}, {w2.dtype}; cmoe takes weights "
            "in a float format of 16 bits or more here, so dequantise the model, or leave its "
            "experts_implementation as it was"
        )
    if experts.is_transposed:
        w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
    if not experts.has_bias:
        return ExpertWeights(w13, w2, None, None)
    return ExpertWeights(w13, w2, getattr(experts, f"{name}_bias"), experts.down_proj_bias)


def _fused(
    form: FusedForm, weights: ExpertWeights, x: Tensor, ids: Tensor, scores: Tensor
) -> Tensor:
    w13, w2, w13_bias, w2_bias = weights
    run = _compiled if torch.compiler.is_compiling() else _run
    return run(x, w13, w2, scores, ids, w13_bias, w2_bias, None, *form, False)


def _run(x: Tensor, w13: Tensor, w2: Tensor, scores: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    """`fused_experts` by the backend that is chosen for such experts; same arguments."""
    num_experts, hidden, intermediate = w2.shape
    spec = LayerSpec(
        device=x.device,
        dtype=x.dtype,
        num_experts=num_experts,
        top_k=ids.shape[1],
        hidden_size=hidden,
        intermediate_size=intermediate,
        activation=rest[_SCHEMA_ACTIVATION],
    )
    return _choose(spec, list_backends())(x, w13, w2, scores, ids, *rest)


_SCHEMA_ACTIVATION = 3
"""Where the activation stands among the arguments after the ids."""


@functools.lru_cache(maxsize=256)
def _choose(spec: LayerSpec, backends: tuple[Backend, ...]) -> Callable[..., Tensor]:
    """One choice for each spec; `backends` is there to make a new one when they change."""
    return select_kernels(spec).fused_experts


# An experts module may meet its first call under the compiler, which cannot trace the choice of a
# backend, so a graph holds an op that looks the choice up.
_compiled = differentiable(
    define_op("cmoe::chosen_fused_experts", SCHEMA, kernel=_run, fake=fused_experts_fake),
    fused_experts_reference,
)


def _staged(experts: Any, weights: ExpertWeights, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """As `fused_experts`, stage by stage, with the module's own activation, norm."""
    num_experts, (num_tokens, top_k) = weights.w2.shape[0], ids.shape
    flat = ids.reshape(-1)
    # Skipped rows get the id past the last expert, so that they sort behind every offset.
    sorted_ids, order = torch.where(flat < 0, num_experts, flat).sort(stable=True)
    every = torch.arange(num_experts, device=x.device)
    offsets = torch.searchsorted(sorted_ids, every, right=True).to(torch.int32)
    rows_of_bias = sorted_ids.clamp_max(num_experts - 1)

    h = grouped_mm(x[order // top_k], weights.w13, offsets)
    if weights.w13_bias is not None:
        h = h + weights.w13_bias[rows_of_bias].to(h.dtype)
    h = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    y = grouped_mm(h.to(weights.w2.dtype), weights.w2, offsets)
    if weights.w2_bias is not None:
        y = y + weights.w2_bias[rows_of_bias].to(y.dtype)
    if experts.has_post_expert_norm:
        y = experts.post_expert_norm(y)
    y = y.to(scores.dtype) * scores.reshape(-1)[order][:, None]
    y = torch.where((sorted_ids < num_experts)[:, None], y, 0)
    slots = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
    return y[slots].view(num_tokens, top_k, -1).sum(1)


@torch.compiler.assume_constant_result  # Runs while a graph is traced, is no part of it.
def _say_staged(experts_class: str, reason: str) -> None:
    """Says once for each class why its experts do not run in one kernel."""
    _say_once(experts_class, reason)


@functools.cache
def _say_once(experts_class: str, reason: str) -> None:
    logger.warning("%s runs stage by stage, not in one kernel: %s", experts_class, reason)
