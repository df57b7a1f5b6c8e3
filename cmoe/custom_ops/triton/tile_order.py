"""The order in which programs take the tiles of a product."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(number, num_tiles, num_columns, GROUP_M: tl.constexpr):
    """(tile of rows, block of columns) of a number below num_tiles * num_columns.

    GROUP_M tiles of rows go together through the columns: what runs at one time shares rows of the
    weights (tiles of one expert), rows of x (columns of one tile) in the L2 cache.
    """
    group = number // (GROUP_M * num_columns)
    first = group * GROUP_M
    size = tl.minimum(num_tiles - first, GROUP_M)
    within = number % (GROUP_M * num_columns)
    return first + within % size, within // size
