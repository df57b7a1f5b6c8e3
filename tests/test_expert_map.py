"""The placement tables, number by number."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cmoe.config import MoEConfig, ParallelConfig
from cmoe.expert_map import ExpertMapManager

# (experts, ranks) -> how many experts each rank holds.
SHARES = {
    (8, 2): (4, 4),
    (9, 2): (5, 4),
    (16, 4): (4, 4, 4, 4),
    (17, 4): (5, 4, 4, 4),
    (18, 4): (5, 5, 4, 4),
    (33, 4): (9, 8, 8, 8),
    (33, 2): (17, 16),
    (3, 3): (1, 1, 1),
}

# (experts, ranks, rank, placement) -> expert_map.
TABLES = {
    (9, 2, 0, "linear"): [0, 1, 2, 3, 4, -1, -1, -1, -1],
    (9, 2, 1, "linear"): [-1, -1, -1, -1, -1, 0, 1, 2, 3],
    (9, 2, 0, "round_robin"): [0, -1, 1, -1, 2, -1, 3, -1, 4],
    (9, 2, 1, "round_robin"): [-1, 0, -1, 1, -1, 2, -1, 3, -1],
    (6, 4, 0, "linear"): [0, 1, -1, -1, -1, -1],
    (6, 4, 1, "linear"): [-1, -1, 0, 1, -1, -1],
    (6, 4, 2, "linear"): [-1, -1, -1, -1, 0, -1],
    (6, 4, 3, "linear"): [-1, -1, -1, -1, -1, 0],
    (6, 4, 1, "round_robin"): [-1, 0, -1, -1, -1, 1],
    (6, 4, 3, "round_robin"): [-1, -1, -1, 0, -1, -1],
}


def managers(experts: int, ranks: int, placement: str, logical: int | None = None):
    return [
        ExpertMapManager(
            num_logical_experts=logical or experts,
            num_physical_experts=experts,
            ep_size=ranks,
            ep_rank=rank,
            placement=placement,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("case", TABLES, ids=str)
def test_tables(case: tuple) -> None:
    experts, ranks, rank, placement = case
    table = managers(experts, ranks, placement)[rank].expert_map()
    assert table.dtype == torch.int32
    assert table.tolist() == TABLES[case]


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("case", SHARES, ids=str)
def test_every_expert_is_on_exactly_one_rank(case: tuple[int, int], placement: str) -> None:
    experts, ranks = case
    every = managers(experts, ranks, placement)
    assert tuple(m.num_local_experts() for m in every) == SHARES[case]
    tables = torch.stack([m.expert_map() for m in every])
    assert ((tables >= 0).sum(0) == 1).all()
    for rank, manager in enumerate(every):
        here = list(manager.physical_experts_of(rank))
        assert tables[rank, here].tolist() == list(range(len(here)))
        assert all(m.owner_of(p) == rank for m in every for p in here)
        assert [manager.local_rows_of(e) for e in here] == [[row] for row in range(len(here))]


def test_one_rank_needs_no_table() -> None:
    (manager,) = managers(7, 1, "linear")
    assert manager.expert_map() is None
    assert manager.num_local_experts() == 7
    assert [manager.local_rows_of(e) for e in range(7)] == [[e] for e in range(7)]


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
def test_replicas(placement: str) -> None:
    every = managers(7, 2, placement, logical=3)
    assert every[0].physical_to_logical().tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert every[0].physical_to_logical().dtype == torch.int32
    rows = {
        "linear": ([[0, 3], [1], [2]], [[2], [0], [1]]),
        "round_robin": ([[0, 3], [2], [1]], [[1], [0], [2]]),
    }[placement]
    for manager, expected in zip(every, rows, strict=True):
        assert [manager.local_rows_of(e) for e in range(3)] == expected


def test_tables_are_on_the_cpu_inside_a_meta_context() -> None:
    with torch.device("meta"):
        manager = managers(4, 2, "linear")[1]
        assert manager.expert_map().tolist() == [-1, -1, 0, 1]
        assert manager.physical_to_logical().tolist() == [0, 1, 2, 3]


def test_from_config() -> None:
    config = MoEConfig(
        num_experts=8,
        top_k=2,
        hidden_size=4,
        intermediate_size=4,
        parallel=ParallelConfig(
            ep_size=3, ep_rank=2, expert_placement="round_robin", num_redundant_experts=2
        ),
    )
    assert ExpertMapManager.from_config(config) == ExpertMapManager(
        num_logical_experts=8,
        num_physical_experts=10,
        ep_size=3,
        ep_rank=2,
        placement="round_robin",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(ep_size=2, ep_rank=2), r"ep_rank \(2\) must be in \[0, ep_size = 2\)"),
        (dict(ep_rank=-1), r"ep_rank \(-1\) must be in \[0, ep_size = 1\)"),
        (dict(ep_size=0), r"ep_rank \(0\) must be in \[0, ep_size = 0\)"),
        (dict(num_physical_experts=3), r"num_physical_experts \(3\) must be at least .* \(4\)"),
        (dict(num_logical_experts=0), r"num_logical_experts \(0\), which must be positive"),
        (dict(ep_size=5), r"ep_size \(5\) must not exceed the 4 physical experts"),
        (dict(placement="random"), "unknown placement 'random'; choose linear or round_robin"),
    ],
)
def test_bad_sizes(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertMapManager(**{"num_logical_experts": 4, "num_physical_experts": 4, **fields})


@pytest.mark.parametrize("expert", [-1, 4])
def test_owner_of_an_expert_that_does_not_exist(expert: int) -> None:
    with pytest.raises(ValueError, match=rf"physical expert {expert} is not in \[0, 4\)"):
        managers(4, 2, "linear")[0].owner_of(expert)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        managers(4, 2, "linear")[0].ep_size = 4
