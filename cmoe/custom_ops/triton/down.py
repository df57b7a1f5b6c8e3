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
    EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """rows[order[place]] = w2[e] @ a[place] + b2[e] for the places of one tile, BLOCK_N columns.

    a: [R, I], contiguous, in sorted order; w2: [E, H, I]; bias: [E, H] or None; rows: [R, H],
    contiguous, in the order of the routing: token by token.
    """
    tile, block_n = tile_at(tl.program_id(0), tl.load(tiles_ptr), tl.cdiv(hidden, BLOCK_N), GROUP_M)
    if tile < 0:
        return
    expert = tl.load(tiles_ptr + 3 * (1 + tile)).to(tl.int64)
    first = tl.load(tiles_ptr + 3 * (1 + tile) + 1)
    end = tl.load(tiles_ptr + 3 * (1 + tile) + 2)
    places = first + tl.arange(0, BLOCK_M)
    # Rows and columns outside of the tile repeat one inside: they are computed but not stored.
    inside_rows = tl.minimum(places, end - 1).to(tl.int64)
    columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tl.minimum(columns, hidden - 1).to(tl.int64)

    k = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + inside_rows[:, None] * intermediate + k[None, :]
    w_ptrs = w2_ptr + expert * stride_we + inside[None, :] * stride_wn + k[:, None] * stride_wk
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, intermediate, BLOCK_K):
        if EVEN_K:
            a = tl.load(a_ptrs)
            w = tl.load(w_ptrs)
        else:
            here = k < intermediate - start
            a = tl.load(a_ptrs, mask=here[None, :], other=0.0)
            w = tl.load(w_ptrs, mask=here[:, None], other=0.0)
        sums = multiply_add(a, w, sums)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk

    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert * stride_be + inside * stride_bn)
        sums += bias.to(tl.float32)[None, :]
    routed = tl.load(order_ptr + inside_rows).to(tl.int64)
    row_ptrs = rows_ptr + routed[:, None] * hidden + columns[None, :]
    stored = (places < end)[:, None] & (columns < hidden)[None, :]
    tl.store(row_ptrs, sums.to(rows_ptr.dtype.element_ty), mask=stored)
