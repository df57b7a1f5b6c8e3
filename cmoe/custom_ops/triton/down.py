"""The second projection of sorted rows, each result put where its routed row belongs.

R routed rows, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cmoe.custom_ops.triton.dot import multiply_add
from cmoe.custom_ops.triton.tile_order import tile_at


@triton.jit
def down(
    a_ptr, w2_ptr, bias_ptr, order_ptr, tiles_ptr, rows_ptr,
    hidden, intermediate, stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    IS_EVEN: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rows[order[place]] = w2[e] @ a[place] + b2[e] for the places of one tile, BLOCK_N columns.

    a: [R, I], contiguous, in sorted order; w2: [E, H, I]; bias: [E, H] or None; rows: [R, H],
    contiguous, in the order of the routing: token by token. IS_EVEN: blocks divide both H and I.
    """
    tile, block_n = tile_at(tl.program_id(0), tl.load(tiles_ptr), tl.cdiv(hidden, BLOCK_N), GROUP_M)
    if tile < 0:
        return
    expert = tl.load(tiles_ptr + 3 * (1 + tile)).to(tl.int64)
    first = tl.load(tiles_ptr + 3 * (1 + tile) + 1)
    end = tl.load(tiles_ptr + 3 * (1 + tile) + 2)
    places = first + tl.arange(0, BLOCK_M)
    # Rows past the end repeat the last one: they are computed but not stored.
    rows_here = tl.minimum(places, end - 1).to(tl.int64)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = columns < hidden
    w_rows = columns.to(tl.int64)

    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows_here[:, None] * intermediate + k[None, :]
    w_ptrs = w2_ptr + expert * stride_we + w_rows[None, :] * stride_wn + k[:, None] * stride_wk
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, intermediate, BLOCK_K):
        if IS_EVEN:
            a = tl.load(a_ptrs)
            w = tl.load(w_ptrs)
        else:
            here = k < intermediate - start
            a = tl.load(a_ptrs, mask=here[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=here[:, None] & exists[None, :], other=0.0)
        sums = multiply_add(a, w, sums)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk

    if bias_ptr is not None:
        b_ptrs = bias_ptr + expert * stride_be + w_rows * stride_bn
        bias = tl.load(b_ptrs, mask=exists, other=0.0)
        sums += bias.to(tl.float32)[None, :]
    routed = tl.load(order_ptr + rows_here).to(tl.int64)
    row_ptrs = rows_ptr + routed[:, None] * hidden + columns[None, :]
    stored = (places < end)[:, None] & exists[None, :]
    tl.store(row_ptrs, sums.to(rows_ptr.dtype.element_ty), mask=stored)
