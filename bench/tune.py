"""Which kernel parameters serve a number of tokens best, judged by measurement alone.

The default is what others must beat: every candidate is verified first, the fastest of a short race
meets the default in interleaved pairs, and only what those pairs show to be faster replaces it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.pairs import PairEffort, measure_pairs
from bench.timing import median
from bench.verdict import Outcome, Verdict

THRESHOLD = 0.02
"""A gain below two per cent is not worth a row: it is within what a fresh process may differ."""

COMPILING, TRYING = 0.4, 0.7
"""The shares of a bucket's time after which nothing more is compiled ahead, nothing more tried."""

NO_TIME = "not measured: the time was up"

RACE_ROUNDS = 3
RACE_TURN_MS = 10.0
FINALISTS = 2


class Trial(Protocol):
    """One problem, solved with whatever parameters it is given."""

    def prepare(self, candidates: Sequence[Any], go_on: Callable[[], bool]) -> None:
        """Compiles candidates side by side, starts none when `go_on()` is false."""

    def fault(self, parameters: Any) -> str | None:
        """Runs, verifies; says what is wrong, or None."""

    def time(self, parameters: Any, first: int, calls: int) -> list[float]:
        """Milliseconds of `calls` calls, from input number `first` on."""

    def forget(self, parameters: Any) -> None:
        """Lets go of what `fault` made."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came out for one bucket. `verdict` is the last duel's: its ratio is best over default.

    error: why the bucket has no answer. refused: candidates that did not run, or ran wrong, each
    with the reason.
    """

    bucket: int
    default: Any
    best: Any
    default_ms: float | None = None
    best_ms: float | None = None
    verdict: Verdict | None = None
    tried: int = 0
    candidates: int = 0
    refused: tuple[tuple[Any, str], ...] = ()
    error: str | None = None

    def is_better(self) -> bool:
        """Whether something beat the default."""
        return bool(self.best != self.default)

    def is_wrong(self) -> bool:
        """Whether the default itself does not run, or runs wrong."""
        return self.error is not None and self.error != NO_TIME


class _Arm:
    """A candidate as one side of a comparison."""

    def __init__(self, trial: Trial, parameters: Hashable) -> None:
        self.time = lambda first, calls: trial.time(parameters, first, calls)


def choose(
    bucket: int,
    candidates: Sequence[Any],
    trial: Trial,
    *,
    seconds: float,
    effort: PairEffort,
    clock: Callable[[], float] = time.monotonic,
) -> Finding:
    """The best of the candidates within about `seconds`. candidates[0] is the default."""
    start = clock()
    default, *others = candidates
    error = trial.fault(default)
    if error is not None:
        return Finding(
            bucket=bucket,
            default=default,
            best=default,
            tried=1,
            candidates=len(candidates),
            error=error,
        )
    call_ms = min(trial.time(default, 0, 3))
    trial.prepare(others, lambda: clock() - start < COMPILING * seconds)
    right, refused = [default], []
    for candidate in others:
        if clock() - start > TRYING * seconds:
            break
        fault = trial.fault(candidate)
        if fault is None:
            right.append(candidate)
        else:
            refused.append((candidate, fault))
    tried = len(right) + len(refused)
    raced = race(right, trial, call_ms)
    fastest = sorted(raced, key=lambda candidate: raced[candidate])
    finalists = [c for c in fastest if c != default and raced[c] < raced[default]][:FINALISTS]
    for candidate in right:
        if candidate != default and candidate not in finalists:
            trial.forget(candidate)
    best, best_ms, verdict = default, raced[default], None
    for candidate in finalists:
        if clock() - start > seconds:
            break
        paired = measure_pairs(
            _Arm(trial, default),  # type: ignore[arg-type]
            _Arm(trial, candidate),  # type: ignore[arg-type]
            call_ms=call_ms,
            effort=effort,
            threshold=THRESHOLD,
        )
        verdict = paired.verdict
        if verdict.outcome == Outcome.FASTER:
            best, best_ms = candidate, median(paired.b_ms)
            break
    return Finding(
        bucket=bucket,
        default=default,
        best=best,
        default_ms=raced[default],
        best_ms=best_ms,
        verdict=verdict,
        tried=tried,
        candidates=len(candidates),
        refused=tuple(refused),
    )


def race(candidates: Sequence[Any], trial: Trial, call_ms: float) -> dict[Any, float]:
    """Each candidate's median milliseconds over a few turns that all of them take."""
    calls = max(1, min(round(RACE_TURN_MS / max(call_ms, 1e-6)), 20))
    times: dict[Any, list[float]] = {candidate: [] for candidate in candidates}
    for turn in range(RACE_ROUNDS):
        for candidate in candidates:
            times[candidate] += trial.time(candidate, turn * calls, calls)
    return {candidate: median(measured) for candidate, measured in times.items()}


def tune(
    buckets: Sequence[int],
    candidates_of: Callable[[int], Sequence[Any]],
    trial_of: Callable[[int], Trial],
    *,
    seconds: float,
    effort: PairEffort,
    report: Callable[[Finding], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Finding]:
    """A finding for each bucket; what time one bucket leaves over goes to those behind it.

    A bucket that no time is left for keeps its default, with an error that says so.
    """
    deadline = clock() + seconds
    findings = []
    for index, bucket in enumerate(buckets):
        left = deadline - clock()
        candidates = candidates_of(bucket)
        if left <= 0:
            found = Finding(
                bucket=bucket,
                default=candidates[0],
                best=candidates[0],
                candidates=len(candidates),
                error=NO_TIME,
            )
        else:
            share = left / (len(buckets) - index)
            found = choose(
                bucket, candidates, trial_of(bucket), seconds=share, effort=effort, clock=clock
            )
        findings.append(found)
        report(found)
    return findings
