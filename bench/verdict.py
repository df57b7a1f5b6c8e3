"""Whether B is slower than A, given ratios of runs that were taken in pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

RESAMPLES = 4000
CONFIDENCE = 0.95


class Outcome(str, Enum):
    """What can be said of B against A."""

    SLOWER = "slower"
    FASTER = "faster"
    SAME = "same"
    NOISY = "too noisy to tell"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Time of B over time of A: median of the pairs, its confidence interval, the outcome."""

    ratio: float
    low: float
    high: float
    outcome: Outcome


def interval(ratios: Sequence[float], *, seed: int = 0) -> tuple[float, float]:
    """The bootstrap confidence interval of the median: percentiles of resampled medians.

    Efron, Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
    """
    values = torch.tensor(ratios, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    medians = values[picks].quantile(0.5, dim=1)
    tail = (1 - CONFIDENCE) / 2
    return float(medians.quantile(tail)), float(medians.quantile(1 - tail))


def judge(ratios: Sequence[float], *, threshold: float) -> Verdict:
    """The verdict of one cell.

    slower   the interval lies above 1, the median above 1 + threshold
    faster   the same the other way round
    same     the median is within the threshold, the interval excludes twice the threshold
    else the pairs differ too much for a statement.
    """
    if not ratios:
        raise ValueError("a verdict needs at least one pair of runs")
    ratio = float(torch.tensor(ratios, dtype=torch.float64).quantile(0.5))
    low, high = interval(ratios)
    if low > 1 and ratio > 1 + threshold:
        outcome = Outcome.SLOWER
    elif high < 1 and ratio < 1 / (1 + threshold):
        outcome = Outcome.FASTER
    elif (
        1 / (1 + threshold) <= ratio <= 1 + threshold
        and low > 1 / (1 + 2 * threshold)
        and high < 1 + 2 * threshold
    ):
        outcome = Outcome.SAME
    else:
        outcome = Outcome.NOISY
    return Verdict(ratio=ratio, low=low, high=high, outcome=outcome)


def confirm(earlier: Sequence[Verdict], latest: Verdict) -> Verdict:
    """One verdict of measurements in processes of their own.

    A process can be unlucky with where its memory lies, a session with what else the machine does:
    a difference counts when two sessions show it, "same" when the latest shows it.
    """
    seen = {verdict.outcome for verdict in earlier}
    if latest.outcome == Outcome.SAME or latest.outcome in seen:
        return latest
    return Verdict(ratio=latest.ratio, low=latest.low, high=latest.high, outcome=Outcome.NOISY)


def with_control(cell: Verdict, control: Verdict | None, *, threshold: float) -> Verdict:
    """The cell's verdict, withdrawn where the control, which did not change, explains it.

    It does when it differs the same way and no more than the threshold is left between the two.
    """
    changed = (Outcome.SLOWER, Outcome.FASTER)
    if control is None or cell.outcome not in changed or control.outcome != cell.outcome:
        return cell
    left = cell.ratio / control.ratio
    if (left if cell.outcome == Outcome.SLOWER else 1 / left) > 1 + threshold:
        return cell
    return Verdict(ratio=cell.ratio, low=cell.low, high=cell.high, outcome=Outcome.NOISY)
