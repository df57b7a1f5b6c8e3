"""Both projections of a few routed rows, each row alone.

With a few tokens almost every routed row has an expert to itself, so that there is nothing to sort
and no tile to fill: a layer is the stream of its weights. A program owns a few output columns,
multiplies the weights in float32 as they come, adds up across its threads once at the end. Programs
of the same columns are neighbours, so that rows which share an expert read it from the L2 cache.

R = T * K routed rows, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cmoe.custom_ops.triton.activation import activated
from cmoe.custom_ops.triton.expert_id import expert_of


# One binary serves every T, so that none is missing in a capture.
@triton.jit(do_not_specialize=("num_rows",))
def gate_up_alone(
    x_ptr, w13_ptr, bias_ptr, topk_weights_ptr, ids_ptr, expert_map, a_ptr,
    alpha, limit, hidden, intermediate, num_rows,
    stride_xt, stride_xh, stride_we, stride_wn, stride_wk, up_offset,
    stride_be, stride_bn, bias_up_offset,
    num_ids, num_experts, stride_it, stride_ik, map_stride, stride_weight,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, IS_EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """a[r] = act(w13[e] @ x[t] + b13[e]) for one routed row r = t * K + k, BLOCK_N columns.

    As `gate_up`, but a: [R, I] is in the order of the routing, unwritten where a row has no expert.
    """
    row = tl.program_id(0) % num_rows
    token = (row // TOP_K).to(tl.int64)
    expert_id = tl.load(ids_ptr + token * stride_it + (row % TOP_K) * stride_ik)
    expert = expert_of(expert_id, expert_map, map_stride, num_ids, num_experts).to(tl.int64)
    if expert < 0:
        return
    block_n = tl.program_id(0) // num_rows
    WIDTH: tl.constexpr = 2 * BLOCK_N if PARTS == "pairs" else BLOCK_N
    w_rows = block_n * WIDTH + tl.arange(0, WIDTH)
    exists = w_rows < (2 * intermediate if PARTS == "pairs" else intermediate)
    w_rows = w_rows.to(tl.int64)

    k = tl.arange(0, BLOCK_K)
    stride_xh = tl.cast(stride_xh, tl.int64)
    stride_wk = tl.cast(stride_wk, tl.int64)
    x_ptrs = x_ptr + token * stride_xt + k * stride_xh
    w_ptrs = w13_ptr + expert * stride_we + w_rows[:, None] * stride_wn + k[None, :] * stride_wk
    gates = tl.zeros([WIDTH, BLOCK_K], tl.float32)
    ups = tl.zeros([WIDTH, BLOCK_K], tl.float32)
    if WEIGHT_ON_INPUT:
        scale = tl.load(topk_weights_ptr + token * stride_weight)
    for start in tl.range(0, hidden, BLOCK_K, num_stages=NUM_STAGES):
        here = k < hidden - start
        loaded = exists[:, None] & here[None, :]
        if IS_EVEN:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=here, other=0.0)
            w = tl.load(w_ptrs, mask=loaded, other=0.0)
        x = x.to(tl.float32)
        if WEIGHT_ON_INPUT:
            x = (x * scale).to(x_ptr.dtype.element_ty).to(tl.float32)
            if not IS_EVEN:  # an infinite weight times the zeros past the end
                x = tl.where(here, x, 0.0)
        gates += w.to(tl.float32) * x[None, :]
        if PARTS == "halves":
            if IS_EVEN:
                w = tl.load(w_ptrs + up_offset)
            else:
                w = tl.load(w_ptrs + up_offset, mask=loaded, other=0.0)
            ups += w.to(tl.float32) * x[None, :]
        x_ptrs += BLOCK_K * stride_xh
        w_ptrs += BLOCK_K * stride_wk

    gate = tl.sum(gates, 1)
    up = tl.sum(ups, 1)
    if bias_ptr is not None:
        b_ptrs = bias_ptr + expert * stride_be + w_rows * stride_bn
        gate += tl.load(b_ptrs, mask=exists, other=0.0).to(tl.float32)
        if PARTS == "halves":
            up += tl.load(b_ptrs + bias_up_offset, mask=exists, other=0.0).to(tl.float32)
    if PARTS == "pairs":
        gate, up = tl.split(tl.reshape(gate, [BLOCK_N, 2]))
    if PARTS == "gate":
        a = activated(gate, None, alpha, limit, ACTIVATION)
    else:
        a = activated(gate, up, alpha, limit, ACTIVATION)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a_ptrs = a_ptr + row.to(tl.int64) * intermediate + columns
    tl.store(a_ptrs, a.to(a_ptr.dtype.element_ty), mask=columns < intermediate)


@triton.jit(do_not_specialize=("num_tokens",))
def down_alone(
    a_ptr, w2_ptr, bias_ptr, topk_weights_ptr, ids_ptr, expert_map, y_ptr,
    hidden, intermediate, num_tokens,
    stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    num_ids, num_experts, stride_it, stride_ik, map_stride, stride_wt, stride_ws,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over k of weight[t, k] * (w2[e] @ a[t * K + k] + b2[e]), BLOCK_N columns.

    SLOTS of the K experts are streamed at a time, so that enough loads are in flight. a: [R, I] as
    `gate_up_alone` leaves it; y: [T, H], contiguous.
    """
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    columns = tl.program_id(0) // num_tokens * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = columns < hidden
    w_rows = columns.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    stride_wk = tl.cast(stride_wk, tl.int64)
    y = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.static_range(0, TOP_K, SLOTS):
        slots = first + tl.arange(0, SLOTS)
        id_ptrs = ids_ptr + token * stride_it + slots * stride_ik
        ids = tl.load(id_ptrs, mask=slots < TOP_K, other=-1)
        experts = expert_of(ids, expert_map, map_stride, num_ids, num_experts).to(tl.int64)
        used = experts >= 0
        a_ptrs = a_ptr + (token * TOP_K + slots)[:, None] * intermediate + k[None, :]
        w_ptrs = (
            w2_ptr
            + experts[:, None, None] * stride_we
            + w_rows[None, :, None] * stride_wn
            + k[None, None, :] * stride_wk
        )
        sums = tl.zeros([SLOTS, BLOCK_N, BLOCK_K], tl.float32)
        for start in tl.range(0, intermediate, BLOCK_K, num_stages=NUM_STAGES):
            here = used[:, None] & (k < intermediate - start)[None, :]
            a = tl.load(a_ptrs, mask=here, other=0.0).to(tl.float32)
            loaded = here[:, None, :] & exists[None, :, None]
            w = tl.load(w_ptrs, mask=loaded, other=0.0)
            sums += w.to(tl.float32) * a[:, None, :]
            a_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * stride_wk
        rows = tl.sum(sums, 2)
        if bias_ptr is not None:
            b_ptrs = bias_ptr + experts[:, None] * stride_be + w_rows[None, :] * stride_bn
            rows += tl.load(b_ptrs, mask=used[:, None] & exists[None, :], other=0.0).to(tl.float32)
        if not WEIGHT_ON_INPUT:
            weight_ptrs = topk_weights_ptr + token * stride_wt + slots * stride_ws
            rows *= tl.load(weight_ptrs, mask=used, other=0.0)[:, None]
        y += tl.sum(rows, 0)
    y_ptrs = y_ptr + token * hidden + columns
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=exists)
