"""Two arms timed in alternation: A B, B A, A B, ..."""

from __future__ import annotations

from dataclasses import dataclass

from bench.arm import Arm
from bench.timing import median
from bench.verdict import Outcome, Verdict, judge


@dataclass(frozen=True, kw_only=True)
class PairEffort:
    """How long two arms are compared."""

    rounds: int = 15  # pairs of turns before the first verdict
    max_rounds: int = 45  # where the pairs differ much
    turn_ms: float = 60.0  # length of a turn
    max_calls: int = 50

    def calls(self, call_ms: float) -> int:
        """Calls in one turn."""
        return max(1, min(round(self.turn_ms / max(call_ms, 1e-6)), self.max_calls))


@dataclass(frozen=True, kw_only=True)
class Paired:
    """What the turns of both showed."""

    a_ms: tuple[float, ...]  # the median of each turn
    b_ms: tuple[float, ...]
    verdict: Verdict


def measure_pairs(
    a: Arm, b: Arm, *, call_ms: float, effort: PairEffort, threshold: float
) -> Paired:
    """Times both, more often where the verdict needs it."""
    calls = effort.calls(call_ms)
    a_ms: list[float] = []
    b_ms: list[float] = []
    while True:
        for _ in range(effort.rounds):
            # Both get the same inputs in one round; the order alternates, so that a machine which
            # gets steadily slower does not favour one of them.
            first = len(a_ms) * calls
            order = ((a, a_ms), (b, b_ms)) if len(a_ms) % 2 == 0 else ((b, b_ms), (a, a_ms))
            for arm, times in order:
                times.append(median(arm.time(first, calls)))
        ratios = [after / before for before, after in zip(a_ms, b_ms, strict=True)]
        verdict = judge(ratios, threshold=threshold)
        if verdict.outcome != Outcome.NOISY or len(ratios) >= effort.max_rounds:
            return Paired(a_ms=tuple(a_ms), b_ms=tuple(b_ms), verdict=verdict)
