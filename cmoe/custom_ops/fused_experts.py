"""The routed experts of one layer as a single function of tensors.

T tokens, H hidden, I intermediate, E local expert rows, P expert ids, K experts per token,
R = T * K routed rows, N = 2I for gated activations, I for non-gated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cmoe.activation import Activation, apply_activation
from cmoe.custom_ops.grouped_mm import grouped_mm
from cmoe.custom_ops.id_range import check_ids
from cmoe.custom_ops.packing import is_packed, unpack
from cmoe.custom_ops.registration import define_op, of_real_calls_too

SCHEMA = (
    "(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids,"
    " Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map,"
    " str activation, float alpha, float? limit, bool interleaved,"
    " bool apply_router_weight_on_input) -> Tensor"
)
"""The one signature that every backend's op has."""


class Experts(NamedTuple):
    """What `fused_experts` takes beside x with its routing, see `fused_experts_reference`."""

    w13: Tensor
    w2: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None
    activation: str
    alpha: float
    limit: float | None
    interleaved: bool
    apply_router_weight_on_input: bool

    def arguments(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> tuple[Any, ...]:
        """The arguments of `fused_experts`, in order."""
        return (x, self.w13, self.w2, topk_weights, topk_ids, *self[2:])


def fused_experts_reference(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    expert_map: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    interleaved: bool,
    apply_router_weight_on_input: bool,
) -> Tensor:
    """y[t] = sum over k of weight[t, k] * (w2[e] @ act(w13[e] @ x[t] + b13[e]) + b2[e]).

    e is topk_ids[t, k].

    x: [T, H]; w13: [E, N, H], gate rows then up rows, or alternating with `interleaved`;
    w2: [E, H, I]; any strides; or both packed, see `packing.py`. topk_weights: [T, K] float32;
    topk_ids: [T, K] int32 or int64, where -1 contributes exactly nothing. Biases: [E, N], [E, H].
    expert_map: [P] int32, id -> row of the weights or -1 when the expert is not here; None: ids are
    rows. With `apply_router_weight_on_input` (K = 1) the weight multiplies x before the experts
    instead.
    -> [T, H], contiguous, x's dtype; projections in x's dtype, everything else in float32 (float64
    for float64), one rounding at the end. Raises ValueError for shapes that do not fit, ids outside
    [-1, P). Plain traceable torch, differentiable in x, weights, biases, topk_weights.
    """
    w13, w2 = _unpacked(w13, w2)
    check_weights(x, w13, w2, w13_bias, w2_bias, activation)
    check_routing(x, topk_weights, topk_ids, expert_map, apply_router_weight_on_input)
    num_rows_of_ids = w13.shape[0] if expert_map is None else expert_map.shape[0]
    check_ids("topk_ids", topk_ids, -1, num_rows_of_ids)
    num_tokens, top_k = topk_ids.shape
    num_experts = w13.shape[0]
    wide = torch.promote_types(x.dtype, torch.float32)

    ids = topk_ids.reshape(-1).long()
    if expert_map is not None:
        ids = torch.where(ids < 0, -1, expert_map.long()[ids.clamp_min(0)])
    # Skipped rows get the id past the last expert, so that they sort behind every offset.
    sorted_ids, order = torch.where(ids < 0, num_experts, ids).sort(stable=True)
    experts = torch.arange(num_experts, device=x.device)
    offsets = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    used = (sorted_ids < num_experts)[:, None]
    bias_rows = sorted_ids.clamp_max(num_experts - 1)
    weights = torch.where(used, topk_weights.reshape(-1)[order][:, None].to(wide), 0)

    rows = x[order // top_k]
    if apply_router_weight_on_input:
        rows = (rows.to(wide) * weights).to(x.dtype)
    h = grouped_mm(rows, w13, offsets).to(wide)
    if w13_bias is not None:
        h = h + w13_bias[bias_rows].to(wide)
    a = apply_activation(h, activation, alpha, limit, interleaved=interleaved).to(x.dtype)
    y = grouped_mm(a, w2, offsets).to(wide)
    if w2_bias is not None:
        y = y + w2_bias[bias_rows].to(wide)
    if not apply_router_weight_on_input:
        y = y * weights
    y = torch.where(used, y, 0)
    slots = torch.empty_like(order).scatter(0, order, torch.arange(order.shape[0], device=x.device))
    return y[slots].view(num_tokens, top_k, x.shape[1]).sum(1).to(x.dtype)


def _unpacked(w13: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """The weights as checkpoints have them. ValueError where one alone is packed."""
    if is_packed(w13) != is_packed(w2):
        raise ValueError(
            "w13 and w2 must be both packed or both as checkpoints have them; got "
            f"{tuple(w13.shape)}, {tuple(w2.shape)}; cmoe.pack_weights or cmoe.unpack_weights "
            "makes a layer's weights alike"
        )
    return (unpack(w13), unpack(w2)) if is_packed(w13) else (w13, w2)


def check_weights(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    activation: str,
) -> None:
    """Raises ValueError unless weights, biases fit x and one another, none of them packed."""
    gated = Activation(name=activation).is_gated()
    if x.dim() != 2 or w13.dim() != 3 or w2.dim() != 3:
        packed = "; these kernels read no packed weights: call cmoe.unpack_weights"
        raise ValueError(
            "fused_experts needs x [T, H], w13 [E, N, H], w2 [E, H, I]; got "
            f"{tuple(x.shape)}, {tuple(w13.shape)}, {tuple(w2.shape)}"
            f"{packed if is_packed(w13) or is_packed(w2) else ''}"
        )
    num_experts, hidden, intermediate = w2.shape
    expected = (num_experts, (2 if gated else 1) * intermediate, hidden)
    if tuple(w13.shape) != expected:
        raise ValueError(
            f"w13 must be {expected} for w2 {tuple(w2.shape)} with activation {activation!r}; "
            f"got {tuple(w13.shape)}"
        )
    if x.shape[1] != hidden:
        raise ValueError(f"x must be [T, {hidden}] for w2 {tuple(w2.shape)}; got {tuple(x.shape)}")
    if not (x.dtype == w13.dtype == w2.dtype):
        raise ValueError(f"x, w13, w2 must share a dtype; got {x.dtype}, {w13.dtype}, {w2.dtype}")
    for name, bias, shape in (
        ("w13_bias", w13_bias, expected[:2]),
        ("w2_bias", w2_bias, (num_experts, hidden)),
    ):
        if bias is not None and tuple(bias.shape) != shape:
            raise ValueError(f"{name} must be {shape}; got {tuple(bias.shape)}")


def check_routing(
    x: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    expert_map: Tensor | None,
    apply_router_weight_on_input: bool,
) -> None:
    """Raises ValueError unless the routing has a row for each row of x; ids are not looked at."""
    if topk_ids.dim() != 2 or topk_ids.shape[0] != x.shape[0]:
        raise ValueError(
            f"topk_ids must be [T, K] with a row for each row of x {tuple(x.shape)}; "
            f"got {tuple(topk_ids.shape)}"
        )
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    if topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights {tuple(topk_weights.shape)} and topk_ids {tuple(topk_ids.shape)} "
            "must have the same shape"
        )
    if expert_map is not None and expert_map.dim() != 1:
        raise ValueError(f"expert_map must be [P], got {tuple(expert_map.shape)}")
    if apply_router_weight_on_input and topk_ids.shape[1] != 1:
        raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {topk_ids.shape[1]}")


@of_real_calls_too
def fused_experts_fake(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    expert_map: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    interleaved: bool,
    apply_router_weight_on_input: bool,
) -> Tensor:
    """Shape, stride, dtype of every backend's result."""
    return x.new_empty(x.shape)


fused_experts = define_op(
    "cmoe::fused_experts", SCHEMA, kernel=fused_experts_reference, fake=fused_experts_fake
)
"""The op of the reference backend."""
