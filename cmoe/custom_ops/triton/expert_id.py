"""An expert id as a row of the weights."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_of(ids, expert_map, map_stride, num_ids, num_experts):
    """The row of the weights, int32; -1 where the id has none: negative, too large, not here."""
    known = (ids >= 0) & (ids < num_ids)
    if expert_map is None:
        experts = ids
    else:
        experts = tl.load(expert_map + ids.to(tl.int64) * map_stride, mask=known, other=-1)
        known = known & (experts >= 0)
    return tl.where(known & (experts < num_experts), experts, -1).to(tl.int32)
