"""Which turns of competitors count."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest

from bench.arm import Started
from bench.turns import TRIES, Measurement, interleave
from tests.bench.fakes import FakeArm


def measurement(arm: FakeArm, runs: int) -> Measurement:
    return Measurement(arm=arm, started=Started(impl=arm.impl), runs=runs)


def answers(rates: Sequence[float]) -> Callable[[], float]:
    following = iter(rates)
    return lambda: next(following)


class Logged(FakeArm):
    """Notes when it is its turn."""

    def __init__(self, impl: str, order: list[str]) -> None:
        super().__init__(impl, [1.0, 2.0])
        self.order = order

    def time(self, first: int, calls: int) -> list[float]:
        self.order.append(self.impl)
        return super().time(first, calls)


def test_competitors_take_turns() -> None:
    order: list[str] = []
    both = [measurement(Logged(name, order), 7) for name in "ab"]
    assert interleave(both, 3) == []
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [len(m.samples) for m in both] == [7, 7]


def test_the_read_rate_is_taken_ahead_of_every_turn_and_at_the_end() -> None:
    order: list[str] = []

    def read() -> float:
        order.append("read")
        return 100.0 + len(order)

    rates = interleave([measurement(Logged("a", order), 3)], 3, read)
    assert order == ["read", "a", "read", "a", "read", "a", "read"]
    assert rates == [101.0, 103.0, 103.0, 105.0, 105.0, 107.0]


@pytest.mark.parametrize(
    ("rates", "samples"),
    [
        pytest.param([50, 51, 52], [1, 2], id="steady"),
        pytest.param([50, 80, 81, 82], [2, 3], id="moved_once"),
        pytest.param([50, 51, 80, 51, 52], [1, 4], id="came_back"),
        pytest.param([50, 51, 80, 81, 82], [3, 4], id="the_first_state_to_have_enough"),
        pytest.param([50, 51, 80, 50, 80, 50, 80, 50, 80], [1], id="too_few"),
        pytest.param([50, 80] * 4 + [50], [1, 2, 3, 4, 5, 6, 7, 8], id="none"),
    ],
)
def test_only_turns_of_one_read_rate_count(rates: list[float], samples: list[float]) -> None:
    arm = FakeArm("a", [float(ms) for ms in range(1, 9)])
    m = measurement(arm, 2)
    interleave([m], 2, answers(rates))
    assert m.samples == samples
    assert arm.asked == [(index, 1) for index in range(len(rates) - 1)]


def test_a_rate_that_never_holds_is_not_waited_for() -> None:
    both = itertools.cycle([50.0, 80.0])
    arm = FakeArm("a", [1.0])
    rates = interleave([measurement(arm, 3)], 3, lambda: next(both))
    assert len(arm.asked) == 3 * TRIES
    assert len(rates) == 6 * TRIES


def test_every_turn_has_a_call_of_a_slow_competitor() -> None:
    m = measurement(FakeArm("a", [1.0]), 3)
    interleave([m], 5)
    assert len(m.samples) == 5
