"""Routed rows sorted by expert, without a word from the host.

Two kernels. `count_rows` counts each expert's rows in every chunk of the routed rows; `place_rows`
sums the counts into where each expert begins and puts every row at its place, in order, so that the
sort is stable. It also lists the tiles of up to `block_m` rows of one expert that the products
work on. How many tiles there are is known on the device alone: the host counts with a bound.

R = T * K routed rows, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cmoe.custom_ops.triton.expert_id import expert_of

COUNTS = ("num_rows", "num_steps")
"""What changes with T: one binary serves every T, so that none is missing in a capture."""

_BLOCK = 128
"""Rows in a step: each is compared with each."""

_MAX_CHUNKS = 64
"""Every program of `place_rows` reads the counts of all chunks."""

_CHUNKS_AT_ONCE = 16


class SortedRows(NamedTuple):
    """Routed rows in the order of their experts.

    order: [R] int32, routed row t * K + k at each place; rows without an expert have none, so that
    the end stays unwritten. tiles: [1 + max_tiles, 3] int32; the first number is how many tiles
    there are, the rows after it are (expert, first place, place after the last).
    """

    order: Tensor
    tiles: Tensor
    max_tiles: int


@triton.jit
def _expert_bins(
    ids_ptr, expert_map, map_stride, rows, num_rows, num_ids, num_experts,
    stride_t, stride_k, TOP_K: tl.constexpr,
):  # fmt: skip
    """Each row's expert; rows without one, or past the end, share the bin behind the last."""
    here = rows < num_rows
    token = (rows // TOP_K).to(tl.int64)
    ids = tl.load(ids_ptr + token * stride_t + (rows % TOP_K) * stride_k, mask=here, other=-1)
    experts = expert_of(ids, expert_map, map_stride, num_ids, num_experts)
    return tl.where(experts < 0, num_experts, experts)


@triton.jit(do_not_specialize=COUNTS)
def count_rows(
    ids_ptr, expert_map, counts_ptr,
    num_rows, num_steps, num_ids, num_experts, stride_t, stride_k, map_stride,
    TOP_K: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """counts: [chunks, BINS] int32, the rows of each expert in each chunk of num_steps blocks."""
    chunk = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for step in range(num_steps):
        rows = (chunk * num_steps + step) * BLOCK + tl.arange(0, BLOCK)
        bins = _expert_bins(
            ids_ptr, expert_map, map_stride, rows, num_rows, num_ids, num_experts,
            stride_t, stride_k, TOP_K,
        )  # fmt: skip
        counts += tl.histogram(bins, BINS)
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=COUNTS)
def place_rows(
    ids_ptr, expert_map, counts_ptr, order_ptr, tiles_ptr,
    num_rows, num_steps, num_ids, num_experts, stride_t, stride_k, map_stride,
    TOP_K: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNKS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Writes `SortedRows.order` for one chunk, a share of `SortedRows.tiles`."""
    chunk = tl.program_id(0)
    num_chunks = tl.num_programs(0)
    bins = tl.arange(0, BINS)
    totals = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for first in range(0, num_chunks, CHUNKS_AT_ONCE):
        chunks = first + tl.arange(0, CHUNKS_AT_ONCE)[:, None]
        counts = tl.load(counts_ptr + chunks * BINS + bins, mask=chunks < num_chunks, other=0)
        totals += tl.sum(counts, 0)
        before += tl.sum(tl.where(chunks < chunk, counts, 0), 0)
    totals = tl.where(bins < num_experts, totals, 0)
    ends = tl.cumsum(totals, 0)

    # The tiles of all experts are shared out: this program writes the first one of each expert,
    # the one num_chunks later, and so on, each begun at its own number.
    num_tiles = tl.cdiv(totals, BLOCK_M)
    tile_ends = tl.cumsum(num_tiles, 0)
    if chunk == 0:
        tl.store(tiles_ptr, tl.sum(num_tiles, 0))
    for tile in range(chunk, tl.max(num_tiles, 0), num_chunks):
        record = tiles_ptr + 3 * (1 + tile_ends - num_tiles + tile)
        first_place = ends - totals + tile * BLOCK_M
        exists = tile < num_tiles
        tl.store(record, bins, mask=exists)
        tl.store(record + 1, first_place, mask=exists)
        tl.store(record + 2, tl.minimum(first_place + BLOCK_M, ends), mask=exists)

    next_place = ends - totals + before
    for step in range(num_steps):
        index = tl.arange(0, BLOCK)
        rows = (chunk * num_steps + step) * BLOCK + index
        experts = _expert_bins(
            ids_ptr, expert_map, map_stride, rows, num_rows, num_ids, num_experts,
            stride_t, stride_k, TOP_K,
        )  # fmt: skip
        earlier = (experts[:, None] == experts[None, :]) & (index[None, :] < index[:, None])
        place = tl.gather(next_place, experts, 0) + tl.sum(earlier.to(tl.int32), 1)
        tl.store(order_ptr + place, rows, mask=experts < num_experts)
        next_place += tl.histogram(experts, BINS)


def sort_rows(
    topk_ids: Tensor,
    expert_map: Tensor | None,
    ids: tuple[int, int, int, int, int],
    block_m: int,
) -> SortedRows:
    """Sorts the rows of topk_ids [T, K] by expert, into tiles of up to `block_m` rows.

    ids: P, E, the strides of topk_ids, the stride of expert_map.
    """
    num_experts = ids[1]
    num_tokens, top_k = topk_ids.shape
    num_rows = num_tokens * top_k
    num_steps = triton.cdiv(num_rows, _BLOCK * _MAX_CHUNKS)
    num_chunks = triton.cdiv(num_rows, _BLOCK * num_steps)
    bins = max(64, triton.next_power_of_2(num_experts + 1))  # a warp of AMD counts into 64 up
    busy = min(num_experts, num_rows)
    max_tiles = (num_rows + busy * (block_m - 1)) // block_m
    empty = topk_ids.new_empty
    counts = empty((num_chunks, bins), dtype=torch.int32)
    rows = SortedRows(
        order=empty((num_rows,), dtype=torch.int32),
        tiles=empty((1 + max_tiles, 3), dtype=torch.int32),
        max_tiles=max_tiles,
    )
    count_rows[(num_chunks,)](
        topk_ids, expert_map, counts, num_rows, num_steps, *ids,
        TOP_K=top_k, BINS=bins, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    place_rows[(num_chunks,)](
        topk_ids, expert_map, counts, rows.order, rows.tiles,
        num_rows, num_steps, *ids,
        TOP_K=top_k, BINS=bins, BLOCK=_BLOCK,
        BLOCK_M=block_m, CHUNKS_AT_ONCE=_CHUNKS_AT_ONCE, num_warps=8,
    )  # fmt: skip
    return rows
