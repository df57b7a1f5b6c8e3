"""A block of an expert's weights on its way to the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weight_block(
    ptrs, described, expert, row, start, exists,
    TMA: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_K, BLOCK_N] of w[expert, row:, start:]; zero past the ends of w.

    TMA: the copy engine takes it by the descriptor of w; else the threads do, by ptrs, where it
    exists; IS_EVEN: everywhere.
    """
    if TMA:
        block = described.load([expert, row, start])
        return tl.trans(tl.reshape(block, [BLOCK_N, BLOCK_K]))
    elif IS_EVEN:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=exists, other=0.0)
