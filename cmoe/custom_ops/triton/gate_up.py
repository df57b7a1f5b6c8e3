"""The first projection of sorted rows, with its gather before it, its activation behind it.

R routed rows, T tokens, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cmoe.custom_ops.triton.activation import activated
from cmoe.custom_ops.triton.dot import multiply_add
from cmoe.custom_ops.triton.tile_order import tile_at
from cmoe.custom_ops.triton.weight_block import weight_block


@triton.jit
def gate_up(
    x_ptr, w13_ptr, bias_ptr, topk_weights_ptr, order_ptr, tiles_ptr, a_ptr,
    alpha, limit, num_experts, hidden, intermediate,
    stride_xt, stride_xh, stride_we, stride_wn, stride_wk, up_offset,
    stride_be, stride_bn, bias_up_offset, stride_weight,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr, IS_EVEN: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PERSISTENT: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """a[place] = act(w13[e] @ x[t] + b13[e]) for the places of one tile, BLOCK_N columns.

    x: [T, H]; w13: [E, N, H]; bias: [E, N] or None; a: [R, I], contiguous, in sorted order.
    PARTS: w13 has rows of the "gate" alone, of gate then up in "halves", up_offset apart, or
    alternating in "pairs". IS_EVEN: blocks divide both H and I. PERSISTENT: a program goes on until
    no tile is left for it. TMA: w13 goes through the copy engine; its rows are contiguous then.
    """
    num_tiles = tl.load(tiles_ptr)
    num_columns = tl.cdiv(intermediate, BLOCK_N)
    left = num_tiles * num_columns - tl.program_id(0)
    if not PERSISTENT and left <= 0:
        return
    # Pairs are multiplied side by side, since they lie side by side.
    WIDTH: tl.constexpr = 2 * BLOCK_N if PARTS == "pairs" else BLOCK_N
    first_rows = 2 * intermediate if PARTS == "pairs" else intermediate
    described = None
    if TMA:
        described = tl.make_tensor_descriptor(
            w13_ptr,
            [num_experts, intermediate if PARTS == "gate" else 2 * intermediate, hidden],
            [stride_we, stride_wn, 1],
            [1, WIDTH, BLOCK_K],
        )
    k = tl.arange(0, BLOCK_K)
    stride_xh = tl.cast(stride_xh, tl.int64)
    stride_wk = tl.cast(stride_wk, tl.int64)
    # A loop that has one step for certain costs no registers: the compiler unrolls it.
    for step in tl.range(0, tl.cdiv(left, tl.num_programs(0)) if PERSISTENT else 1):
        number = tl.program_id(0) + step * tl.num_programs(0)
        tile, block_n = tile_at(number, num_tiles, num_columns, GROUP_M)
        expert = tl.load(tiles_ptr + 3 * (1 + tile))
        first = tl.load(tiles_ptr + 3 * (1 + tile) + 1)
        end = tl.load(tiles_ptr + 3 * (1 + tile) + 2)
        places = first + tl.arange(0, BLOCK_M)
        # Rows past the end repeat the last one: they are computed but not stored.
        rows = tl.load(order_ptr + tl.minimum(places, end - 1))
        tokens = (rows // TOP_K).to(tl.int64)
        w_row = block_n * WIDTH
        w_rows = w_row + tl.arange(0, WIDTH)
        exists = w_rows < first_rows
        w_rows = w_rows.to(tl.int64)

        x_ptrs = x_ptr + tokens[:, None] * stride_xt + k[None, :] * stride_xh
        w_ptrs = (
            w13_ptr
            + expert.to(tl.int64) * stride_we
            + w_rows[None, :] * stride_wn
            + k[:, None] * stride_wk
        )
        gate = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        up = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        if WEIGHT_ON_INPUT:
            scale = tl.load(topk_weights_ptr + tokens * stride_weight)[:, None]
        for start in range(0, hidden, BLOCK_K):
            here = k < hidden - start
            loaded = here[:, None] & exists[None, :]
            if IS_EVEN:
                x = tl.load(x_ptrs)
            else:
                x = tl.load(x_ptrs, mask=here[None, :], other=0.0)
            if WEIGHT_ON_INPUT:
                x = (x.to(tl.float32) * scale).to(x_ptr.dtype.element_ty)
                if not IS_EVEN:  # an infinite weight times the zeros past the end
                    x = tl.where(here[None, :], x, 0.0)
            w = weight_block(
                w_ptrs, described, expert, w_row, start, loaded, TMA, IS_EVEN, WIDTH, BLOCK_K
            )
            gate = multiply_add(x, w, gate)
            if PARTS == "halves":
                w = weight_block(
                    w_ptrs + up_offset, described, expert, intermediate + w_row, start, loaded,
                    TMA, IS_EVEN, WIDTH, BLOCK_K,
                )  # fmt: skip
                up = multiply_add(x, w, up)
            x_ptrs += BLOCK_K * stride_xh
            w_ptrs += BLOCK_K * stride_wk

        if bias_ptr is not None:
            b_ptrs = bias_ptr + expert.to(tl.int64) * stride_be + w_rows * stride_bn
            gate += tl.load(b_ptrs, mask=exists, other=0.0).to(tl.float32)[None, :]
            if PARTS == "halves":
                bias = tl.load(b_ptrs + bias_up_offset, mask=exists, other=0.0)
                up += bias.to(tl.float32)[None, :]
        if PARTS == "pairs":
            gate, up = tl.split(tl.reshape(gate, [BLOCK_M, BLOCK_N, 2]))
        if PARTS == "gate":
            a = activated(gate, None, alpha, limit, ACTIVATION)
        else:
            a = activated(gate, up, alpha, limit, ACTIVATION)
        columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        a_ptrs = a_ptr + places.to(tl.int64)[:, None] * intermediate + columns[None, :]
        stored = (places < end)[:, None] & (columns < intermediate)[None, :]
        tl.store(a_ptrs, a.to(a_ptr.dtype.element_ty), mask=stored)
