"""The order in which programs take the tiles of a product."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(program, num_tiles, num_columns, GROUP_M: tl.constexpr):
    """(tile of rows, block of columns) of a program; tile -1 for a program too many.

    GROUP_M tiles of rows go together through the columns: what runs at one time shares rows of the
    weights (tiles of one expert), rows of x (columns of one tile) in the L2 cache.
    """
    group = program // (GROUP_M * num_columns)
    first = group * GROUP_M
    size = tl.maximum(tl.minimum(num_tiles - first, GROUP_M), 1)
    within = program % (GROUP_M * num_columns)
    tile = tl.where(program < num_tiles * num_columns, first + within % size, -1)
    return tile, within // size
