"""The second projection of sorted rows, each result put where its routed row belongs.

R routed rows, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cmoe.custom_ops.triton.dot import multiply_add
from cmoe.custom_ops.triton.tile_order import tile_at
from cmoe.custom_ops.triton.weight_block import weight_block


# One binary serves every T, so that none is missing in a capture.
@triton.jit(do_not_specialize=("num_rows",))
def down(
    a_ptr, w2_ptr, bias_ptr, order_ptr, tiles_ptr, rows_ptr,
    num_rows, num_experts, hidden, intermediate,
    stride_we, stride_wn, stride_wk, stride_be, stride_bn,
    IS_EVEN: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PERSISTENT: tl.constexpr, TMA: tl.constexpr, OWN_WARPS: tl.constexpr,
):  # fmt: skip
    """rows[order[place]] = w2[e] @ a[place] + b2[e] for the places of one tile, BLOCK_N columns.

    a: [R, I], contiguous, in sorted order; w2: [E, H, I]; bias: [E, H] or None; rows: [R, H],
    contiguous, in the order of the routing: token by token. IS_EVEN: blocks divide both H and I.
    PERSISTENT: a program goes on until no tile is left for it. TMA: a, w2 go through the copy
    engine; rows of w2 are contiguous then. OWN_WARPS: warps of their own tell it what to copy.
    """
    num_tiles = tl.load(tiles_ptr)
    num_columns = tl.cdiv(hidden, BLOCK_N)
    left = num_tiles * num_columns - tl.program_id(0)
    if not PERSISTENT and left <= 0:
        return
    described = None
    if TMA:
        # Made here: in Triton 3.6 to 3.8 own warps split rows of a block that the host described
        # into halves, but not its description.
        described_a = tl.make_tensor_descriptor(
            a_ptr, [num_rows, intermediate], [intermediate, 1], [BLOCK_M, BLOCK_K]
        )
        described = tl.make_tensor_descriptor(
            w2_ptr,
            [num_experts, hidden, intermediate],
            [stride_we, stride_wn, 1],
            [1, BLOCK_N, BLOCK_K],
        )
    k = tl.arange(0, BLOCK_K)
    stride_wk = tl.cast(stride_wk, tl.int64)
    # A loop that has one step for certain costs no registers: the compiler unrolls it.
    for step in tl.range(0, tl.cdiv(left, tl.num_programs(0)) if PERSISTENT else 1):
        number = tl.program_id(0) + step * tl.num_programs(0)
        tile, block_n = tile_at(number, num_tiles, num_columns, GROUP_M)
        expert = tl.load(tiles_ptr + 3 * (1 + tile))
        first = tl.load(tiles_ptr + 3 * (1 + tile) + 1)
        end = tl.load(tiles_ptr + 3 * (1 + tile) + 2)
        places = first + tl.arange(0, BLOCK_M)
        # Rows past the end are computed but not stored. Threads repeat the last row for them, the
        # copy engine brings what follows: rows of other experts, or memory that nobody wrote.
        rows_here = tl.minimum(places, end - 1).to(tl.int64)
        columns = block_n * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = columns < hidden
        w_rows = columns.to(tl.int64)

        a_ptrs = a_ptr + rows_here[:, None] * intermediate + k[None, :]
        w_ptrs = (
            w2_ptr
            + expert.to(tl.int64) * stride_we
            + w_rows[None, :] * stride_wn
            + k[:, None] * stride_wk
        )
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, intermediate, BLOCK_K, warp_specialize=OWN_WARPS):
            here = k < intermediate - start
            if TMA:
                a = described_a.load([first, start])
            elif IS_EVEN:
                a = tl.load(a_ptrs)
            else:
                a = tl.load(a_ptrs, mask=here[None, :], other=0.0)
            w = weight_block(
                w_ptrs, described, expert, block_n * BLOCK_N, start,
                here[:, None] & exists[None, :], TMA, IS_EVEN, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            sums = multiply_add(a, w, sums)
            a_ptrs += BLOCK_K
            w_ptrs += BLOCK_K * stride_wk

        if bias_ptr is not None:
            b_ptrs = bias_ptr + expert.to(tl.int64) * stride_be + w_rows * stride_bn
            bias = tl.load(b_ptrs, mask=exists, other=0.0)
            sums += bias.to(tl.float32)[None, :]
        routed = tl.load(order_ptr + rows_here).to(tl.int64)
        row_ptrs = rows_ptr + routed[:, None] * hidden + columns[None, :]
        stored = (places < end)[:, None] & exists[None, :]
        tl.store(row_ptrs, sums.to(rows_ptr.dtype.element_ty), mask=stored)
