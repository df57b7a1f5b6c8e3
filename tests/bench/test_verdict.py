"""What is said of two versions, given the ratios of their runs."""

from __future__ import annotations

import random

import pytest

from bench.verdict import Outcome, Verdict, confirm, interval, judge, with_control


def _ratios(true_ratio: float, noise: float, seed: int, count: int = 15) -> list[float]:
    """Pairs of runs, each a few per cent slow or, now and then, interrupted."""
    random.seed(seed)

    def run(ms: float) -> float:
        interrupted = 1.5 if random.random() < 0.05 else 1.0
        return ms * random.lognormvariate(0, noise) * interrupted

    return [run(true_ratio) / run(1.0) for _ in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_a_version_against_itself_is_the_same(seed: int) -> None:
    assert judge(_ratios(1.0, 0.02, seed), threshold=0.05).outcome == Outcome.SAME


@pytest.mark.parametrize("seed", range(10))
def test_ten_per_cent_are_caught_in_both_directions(seed: int) -> None:
    assert judge(_ratios(1.1, 0.02, seed), threshold=0.05).outcome == Outcome.SLOWER
    assert judge(_ratios(1 / 1.1, 0.02, seed), threshold=0.05).outcome == Outcome.FASTER


def test_two_per_cent_are_below_the_threshold() -> None:
    verdict = judge([1.019, 1.02, 1.021] * 5, threshold=0.05)
    assert verdict.low > 1
    assert verdict.outcome == Outcome.SAME


def test_wild_pairs_give_no_verdict() -> None:
    assert judge([0.5, 0.7, 1.0, 1.4, 2.0], threshold=0.05).outcome == Outcome.NOISY


def test_a_slower_median_within_the_noise_is_no_slowdown() -> None:
    assert judge([0.9, 0.95, 1.06, 1.07, 1.08], threshold=0.05).outcome == Outcome.NOISY


def test_the_interval_is_narrow_around_equal_pairs() -> None:
    assert interval([1.1] * 15) == (1.1, 1.1)
    low, high = interval([1.0 + step / 100 for step in range(-7, 8)])
    assert 0.93 <= low < 1.0 < high <= 1.07


def test_no_pairs_no_verdict() -> None:
    with pytest.raises(ValueError, match="needs at least one pair"):
        judge([], threshold=0.05)


def _verdict(outcome: Outcome) -> Verdict:
    return Verdict(ratio=1.0, low=0.9, high=1.1, outcome=outcome)


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [
        (Outcome.SLOWER, Outcome.SLOWER, Outcome.SLOWER),
        (Outcome.SLOWER, Outcome.SAME, Outcome.SAME),
        (Outcome.SLOWER, Outcome.FASTER, Outcome.NOISY),
        (Outcome.NOISY, Outcome.SLOWER, Outcome.NOISY),
        (Outcome.NOISY, Outcome.SAME, Outcome.SAME),
    ],
)
def test_a_difference_counts_when_two_measurements_show_it(
    first: Outcome, second: Outcome, both: Outcome
) -> None:
    assert confirm([_verdict(first)], _verdict(second)).outcome == both


def test_a_disturbed_session_does_not_hide_a_difference() -> None:
    earlier = [_verdict(Outcome.NOISY), _verdict(Outcome.SLOWER)]
    assert confirm(earlier, _verdict(Outcome.SLOWER)).outcome == Outcome.SLOWER
    assert confirm(earlier, _verdict(Outcome.FASTER)).outcome == Outcome.NOISY


@pytest.mark.parametrize(
    ("cell", "control", "said"),
    [
        (1.10, 1.08, Outcome.NOISY),
        (1.10, 1.20, Outcome.NOISY),
        (1.20, 1.08, Outcome.SLOWER),
        (1.10, 1.00, Outcome.SLOWER),
        (1.10, 0.90, Outcome.SLOWER),
        (1.00, 1.10, Outcome.SAME),
        (0.90, 0.92, Outcome.NOISY),
        (0.70, 0.92, Outcome.FASTER),
    ],
)
def test_a_slower_machine_is_not_a_slower_version(
    cell: float, control: float, said: Outcome
) -> None:
    alone, beside = (judge([ratio] * 9, threshold=0.05) for ratio in (cell, control))
    assert with_control(alone, beside, threshold=0.05).outcome == said
    assert with_control(alone, None, threshold=0.05) == alone
