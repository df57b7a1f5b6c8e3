"""Which experts the tokens of a benchmark go to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.routing import draw_ids, num_active
from bench.shapes import SHAPES, Shape, shape_from_text

OLMOE = SHAPES["olmoe"]


def _draws(
    routing: str, tokens: int = 16, shape: Shape = OLMOE, seed: int = 3
) -> list[torch.Tensor]:
    return draw_ids(shape, tokens, routing=routing, num_draws=8, seed=seed)


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_a_token_goes_to_distinct_experts(routing: str) -> None:
    for ids in _draws(routing):
        assert ids.shape == (16, 8)
        assert ids.dtype == torch.int32
        assert all(row.unique().numel() == 8 for row in ids)
        assert 0 <= int(ids.min()) <= int(ids.max()) < 64


def test_the_same_seed_gives_the_same_ids() -> None:
    first, second = _draws("skewed"), _draws("skewed")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], _draws("skewed", seed=4)[0])


def test_skewed_routing_touches_fewer_experts() -> None:
    assert max(map(num_active, _draws("skewed"))) < min(map(num_active, _draws("uniform")))


def test_draws_touch_about_the_same_number_of_experts() -> None:
    active = [num_active(ids) for ids in _draws("uniform", tokens=4)]
    assert max(active) - min(active) <= 2


def test_recorded_ids_are_used(tmp_path: Path) -> None:
    path = tmp_path / "ids.pt"
    torch.save(torch.tensor([[0, 1], [2, 3]]), path)
    shape = shape_from_text("E4K2H8I8")
    for ids in _draws(str(path), tokens=3, shape=shape):
        assert {tuple(row) for row in ids.tolist()} == {(0, 1), (2, 3)}


def test_recorded_ids_must_fit_the_shape(tmp_path: Path) -> None:
    path = tmp_path / "ids.pt"
    torch.save(torch.tensor([[0, 1], [2, 9]]), path)
    with pytest.raises(ValueError, match=r"ids \(2, 2\) up to 9; shape E4K2H8I8 needs"):
        _draws(str(path), shape=shape_from_text("E4K2H8I8"))


def test_an_unknown_distribution_is_refused() -> None:
    with pytest.raises(ValueError, match="'zipf' is neither uniform, skewed nor a file"):
        _draws("zipf")
