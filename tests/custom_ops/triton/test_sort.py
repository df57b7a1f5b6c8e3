"""Routed rows sorted by expert on the device, against a sort in plain Python."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from cmoe.custom_ops.triton.sort import sort_rows


def sort_and_check(
    device: torch.device,
    ids: Tensor,
    num_experts: int,
    block_m: int = 16,
    expert_map: Tensor | None = None,
) -> None:
    num_ids = num_experts if expert_map is None else len(expert_map)
    strides = (*ids.stride(), 0 if expert_map is None else expert_map.stride(0))
    moved_map = None if expert_map is None else expert_map.to(device)
    order, tiles, max_tiles = sort_rows(
        ids.to(device), moved_map, (num_ids, num_experts, *strides), block_m
    )
    rows_of = [[] for _ in range(num_experts)]
    for row, identity in enumerate(ids.flatten().tolist()):
        if 0 <= identity < num_ids:
            expert = identity if expert_map is None else int(expert_map[identity])
            if 0 <= expert < num_experts:
                rows_of[expert].append(row)
    expected = [row for rows in rows_of for row in rows]
    assert order[: len(expected)].tolist() == expected, "not sorted, or not in order"

    num_tiles = int(tiles[0, 0])
    assert num_tiles == sum(-(-len(rows) // block_m) for rows in rows_of) <= max_tiles
    first_of = [sum(map(len, rows_of[:expert])) for expert in range(num_experts)]
    expected_tiles = [
        [expert, first, min(first + block_m, first_of[expert] + len(rows_of[expert]))]
        for expert in range(num_experts)
        for first in range(first_of[expert], first_of[expert] + len(rows_of[expert]), block_m)
    ]
    assert tiles[1 : 1 + num_tiles].tolist() == expected_tiles


@pytest.mark.parametrize("seed", range(12))
def test_random_routings(kernel_device: torch.device, seed: int) -> None:
    choose = random.Random(seed)
    num_experts = choose.choice([1, 2, 7, 63, 64, 65, 128, 257])
    num_tokens, top_k = choose.choice([1, 2, 5, 127, 128, 129, 400]), choose.choice([1, 2, 8])
    ids = torch.randint(-1, num_experts, (num_tokens, top_k))
    dtype = choose.choice([torch.int32, torch.int64])
    sort_and_check(kernel_device, ids.to(dtype), num_experts, choose.choice([16, 32, 128]))


def test_more_rows_than_all_chunks_take_in_one_step(kernel_device: torch.device) -> None:
    ids = torch.randint(-1, 5, (4200, 2), dtype=torch.int32)
    sort_and_check(kernel_device, ids, 5)


def test_one_expert_gets_everything(kernel_device: torch.device) -> None:
    sort_and_check(kernel_device, torch.full((300, 2), 4, dtype=torch.int32), 7)


def test_nobody_gets_anything(kernel_device: torch.device) -> None:
    sort_and_check(kernel_device, torch.full((300, 2), -1, dtype=torch.int32), 7)


def test_every_expert_gets_one_row(kernel_device: torch.device) -> None:
    """The bound on the number of tiles is reached."""
    ids = torch.randperm(40, dtype=torch.int32)[:, None]
    sort_and_check(kernel_device, ids, 40)


def test_strided_ids(kernel_device: torch.device) -> None:
    ids = torch.randint(0, 7, (3, 50), dtype=torch.int32).T
    sort_and_check(kernel_device, ids, 7)


def test_ids_that_mean_nothing(kernel_device: torch.device) -> None:
    ids = torch.tensor([[7, 0], [-2, 6], [2**31 - 1, -(2**31)], [3, 3]], dtype=torch.int32)
    sort_and_check(kernel_device, ids, 7)
    expert_map = torch.tensor([2, -1, 3, 99, -5, 0, 1])
    sort_and_check(kernel_device, ids, 4, expert_map=expert_map)
