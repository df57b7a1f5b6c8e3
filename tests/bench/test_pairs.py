"""Two arms in alternation."""

from __future__ import annotations

from bench.pairs import PairEffort, measure_pairs
from bench.verdict import Outcome
from tests.bench.fakes import FakeArm

EFFORT = PairEffort(rounds=10, max_rounds=30, turn_ms=4.0)


def test_a_slowdown_of_ten_per_cent_is_caught() -> None:
    a, b = FakeArm("a", [1.0, 1.01, 0.99]), FakeArm("b", [1.1, 1.11, 1.09])
    paired = measure_pairs(a, b, call_ms=1.0, effort=EFFORT, threshold=0.05)
    assert paired.verdict.outcome == Outcome.SLOWER
    assert 1.08 < paired.verdict.ratio < 1.12


def test_both_get_the_same_inputs_in_every_round() -> None:
    a, b = FakeArm("a", [1.0]), FakeArm("b", [1.0])
    measure_pairs(a, b, call_ms=1.0, effort=EFFORT, threshold=0.05)
    assert a.asked == b.asked == [(4 * turn, 4) for turn in range(10)]


def test_unclear_pairs_are_measured_longer() -> None:
    a, b = FakeArm("a", [1.0]), FakeArm("b", [0.5] * 4 + [2.0] * 4)
    paired = measure_pairs(a, b, call_ms=1.0, effort=EFFORT, threshold=0.05)
    assert paired.verdict.outcome == Outcome.NOISY
    assert len(paired.a_ms) == 30


def test_a_machine_that_slows_down_favours_nobody() -> None:
    times = iter(1.0 + 0.02 * step for step in range(10_000))

    class OnSlowingMachine(FakeArm):
        def time(self, first: int, calls: int) -> list[float]:
            return [next(times)] * calls

    a, b = OnSlowingMachine("a", [1.0]), OnSlowingMachine("b", [1.0])
    paired = measure_pairs(a, b, call_ms=4.0, effort=EFFORT, threshold=0.05)
    assert paired.verdict.outcome == Outcome.SAME


def test_a_turn_has_at_least_one_call_at_most_fifty() -> None:
    assert EFFORT.calls(1000.0) == 1
    assert EFFORT.calls(0.0) == 50
