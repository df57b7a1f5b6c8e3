"""The Triton kernel behind `route`: one program routes one token.

T tokens, E experts, G groups of S experts, K experts per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cmoe.custom_ops.registration import define_op
from cmoe.custom_ops.route import SCHEMA, check_route, route_fake
from cmoe.custom_ops.triton.launch import launching

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_HIGHEST = tl.constexpr((2 - 2**-23) * 2.0**127)  # of float32
_ABSENT = tl.constexpr(-(2**63))  # below the key of every number, -inf too
_LOW_BITS = tl.constexpr(2**31 - 1)

MAX_ELEMENTS_OF_A_WARP = 512
"""A lane then holds 16 keys of 64 bits, a quarter of its registers."""


@triton.jit
def _cleaned(x: tl.tensor) -> tl.tensor:
    """float32; NaN becomes the lowest finite number, infinities the outermost finite ones."""
    x = x.to(tl.float32)
    x = tl.where(x != x, -_HIGHEST, x)
    return tl.minimum(tl.maximum(x, -_HIGHEST), _HIGHEST)


@triton.jit
def _keys(values: tl.tensor, index: tl.tensor) -> tl.tensor:
    """int64 that order as the values do, in ties the lower index first; both zeros tie."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = tl.where(bits >= 0, bits, bits ^ _LOW_BITS)
    return (ordered.to(tl.int64) << 32) | (_LOW_BITS - index)


@triton.jit
def _value_of(key: tl.tensor) -> tl.tensor:
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered >= 0, ordered, ordered ^ _LOW_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(key: tl.tensor) -> tl.tensor:
    return _LOW_BITS - (key & _LOW_BITS).to(tl.int32)


@triton.jit
def _softplus_root(x: tl.tensor) -> tl.tensor:
    """sqrt(log(1 + exp(x))).

    u / (w - 1), w = 1 + u, is what the rounding of w took from u; the logarithm of w is exact to a
    rounding step. Source: W. Kahan's log1p, HP-15C Advanced Functions Handbook, 1982.
    """
    u = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + u
    log1p = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.sqrt(tl.where(x > 20.0, x, log1p))


@triton.jit
def _score(x: tl.tensor, top: tl.tensor, total: tl.tensor, SCORING: tl.constexpr) -> tl.tensor:
    """softmax(x), given the row's largest logit with its sum of exponentials; or sigmoid, ..."""
    if SCORING == "softmax":
        return tl.exp(x - top) / total
    elif SCORING == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    else:
        return _softplus_root(x)


@triton.jit
def _without_other_groups(
    keys: tl.tensor,
    slot: tl.tensor,
    NUM_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    MARK_BY_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """The keys [G, S], absent outside the groups with the highest marks."""
    best = tl.max(keys, axis=1)
    marks = _value_of(best)
    if MARK_BY_TWO:
        marks += _value_of(tl.max(tl.where(keys == best[:, None], _ABSENT, keys), axis=1))
    group = tl.arange(0, BLOCK_G)
    open_groups = tl.where(group < NUM_GROUP, _keys(marks, group), _ABSENT)
    for _ in range(TOPK_GROUP):
        open_groups = tl.where(open_groups == tl.max(open_groups, axis=0), _ABSENT, open_groups)
    return tl.where((open_groups == _ABSENT)[:, None], keys, _ABSENT)


@triton.jit
def _route_kernel(
    logits_ptr: tl.tensor,  # [T, E]
    bias_ptr: tl.tensor,  # [E] or None
    weights_ptr: tl.tensor,  # [T, K] float32, contiguous
    ids_ptr: tl.tensor,  # [T, K] int32, contiguous
    stride_token: tl.tensor,
    stride_expert: tl.tensor,
    stride_bias: tl.tensor,
    epsilon: tl.tensor,
    scaling: tl.tensor,
    TOP_K: tl.constexpr,
    NUM_GROUP: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    SCORING: tl.constexpr,
    SOFTMAX_AFTER_TOPK: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK_G)[:, None]
    slot = tl.arange(0, BLOCK_S)[None, :]
    expert = group * GROUP_SIZE + slot
    present = (group < NUM_GROUP) & (slot < GROUP_SIZE)
    row_ptr = logits_ptr + token * stride_token
    x = _cleaned(tl.load(row_ptr + expert.to(tl.int64) * stride_expert, mask=present, other=0.0))

    top = tl.max(tl.where(present, x, -_HIGHEST))
    total = tl.sum(tl.where(present, tl.exp(x - top), 0.0))
    choice = x
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * stride_bias, mask=present, other=0.0).to(tl.float32)
        choice = _cleaned(_score(x, top, total, SCORING) + bias)
    keys = tl.where(present, _keys(choice, expert), _ABSENT)
    if NUM_GROUP > 1:
        by_two: tl.constexpr = bias_ptr is not None and GROUP_SIZE > 1
        keys = _without_other_groups(keys, slot, NUM_GROUP, TOPK_GROUP, by_two, BLOCK_G)

    place = tl.arange(0, BLOCK_K)
    ids = tl.zeros([BLOCK_K], tl.int32)
    for k in range(TOP_K):
        best = tl.max(keys)
        keys = tl.where(keys == best, _ABSENT, keys)
        ids = tl.where(place == k, _index_of(best), ids)

    taken = place < TOP_K
    # A second read of a few logits, from the cache: they cannot be indexed in registers.
    chosen = _cleaned(tl.load(row_ptr + ids.to(tl.int64) * stride_expert, mask=taken, other=0.0))
    if SOFTMAX_AFTER_TOPK:
        weights = tl.where(taken, tl.exp(chosen - tl.max(tl.where(taken, chosen, -_HIGHEST))), 0.0)
        weights = weights / tl.sum(weights)
    else:
        weights = _score(chosen, top, total, SCORING)
        if RENORMALIZE:
            weights = weights / (tl.sum(tl.where(taken, weights, 0.0)) + epsilon)
    out = token * TOP_K + place
    tl.store(weights_ptr + out, weights * scaling, mask=taken)
    tl.store(ids_ptr + out, ids, mask=taken)


def launch_options(num_experts: int, top_k: int, num_expert_group: int) -> dict[str, int]:
    """Block sizes, warps of a program; they follow from the sizes of the router alone."""
    block_g = triton.next_power_of_2(num_expert_group)
    block_s = triton.next_power_of_2(num_experts // num_expert_group)
    return {
        "BLOCK_G": block_g,
        "BLOCK_S": block_s,
        "BLOCK_K": triton.next_power_of_2(top_k),
        "num_warps": min(max(block_g * block_s // MAX_ELEMENTS_OF_A_WARP, 1), 8),
    }


def _route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring_func: str,
    softmax_after_topk: bool,
    renormalize: bool,
    renormalize_epsilon: float,
    num_expert_group: int,
    topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """See `route_reference`; bfloat16, float16, float32 logits."""
    check_route(logits, bias, top_k, scoring_func, softmax_after_topk, num_expert_group, topk_group)
    if logits.dtype not in DTYPES:
        raise ValueError(
            f"the triton kernel routes bfloat16, float16, float32 logits; got {logits.dtype}"
        )
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty((num_tokens, top_k), dtype=torch.float32)
    ids = logits.new_empty((num_tokens, top_k), dtype=torch.int32)
    if num_tokens == 0:
        return weights, ids
    with launching(logits.device):
        _route_kernel[(num_tokens,)](
            logits,
            bias,
            weights,
            ids,
            logits.stride(0),
            logits.stride(1),
            0 if bias is None else bias.stride(0),
            renormalize_epsilon,
            scaling,
            TOP_K=top_k,
            NUM_GROUP=num_expert_group,
            GROUP_SIZE=num_experts // num_expert_group,
            TOPK_GROUP=topk_group,
            SCORING=scoring_func,
            SOFTMAX_AFTER_TOPK=softmax_after_topk,
            RENORMALIZE=renormalize,
            **launch_options(num_experts, top_k, num_expert_group),
        )
    return weights, ids


route = define_op("cmoe_triton::route", SCHEMA, kernel=_route, fake=route_fake)
"""The op of the triton backend."""
