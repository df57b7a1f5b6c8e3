"""Competitors timed in turn, as often as it takes for the machine to be the same one throughout.

The read rate of a host with other guests moves by half and more from one minute to the next. A
median over such a change would be of two machines, of another mixture for each competitor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.arm import Arm, Started
from bench.peers.client import ServerError

STEADY = 1.2
"""Read rates of one machine differ by less: by a few percent while nothing moves."""

TRIES = 4
"""So many times the turns that are wanted are taken at most."""


@dataclass(kw_only=True)
class Measurement:
    """One competitor's state within a group."""

    arm: Arm
    started: Started
    runs: int = 0
    error: str | None = None
    relative_error: float | None = None
    samples: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What every competitor took, between two readings of the rate."""

    rates: tuple[float, float]
    samples: tuple[list[float], ...]


def interleave(
    measurements: Sequence[Measurement], turns: int, read: Callable[[], float] | None = None
) -> list[float]:
    """Times every competitor `turns` times over, starting with another one each time.

    read: takes the machine's read rate, ahead of each turn and at the end. Only turns of one rate
    count, all where there is none; their rates are returned, two for each.
    """
    taken: list[Turn] = []
    asked = [0] * len(measurements)
    rate = read or (lambda: 1.0)
    before = rate()
    while len(taken) < TRIES * turns and len(of_one_rate(taken, turns)) < turns:
        samples = _take(measurements, len(taken), turns, asked)
        after = rate()
        taken.append(Turn(rates=(before, after), samples=samples))
        before = after
    counted = of_one_rate(taken, turns) or taken
    for index, m in enumerate(measurements):
        m.samples = [ms for turn in counted for ms in turn.samples[index]]
    return [gbps for turn in counted for gbps in turn.rates] if read else []


def of_one_rate(taken: Sequence[Turn], turns: int) -> list[Turn]:
    """The most turns, up to `turns`, whose rates are of one machine."""
    groups = [
        [turn for turn in taken if max(turn.rates) < STEADY * low and min(turn.rates) >= low]
        for low in sorted({min(turn.rates) for turn in taken})
    ]
    return max(groups, key=len, default=[])[:turns]


def _take(
    measurements: Sequence[Measurement], turn: int, turns: int, asked: list[int]
) -> tuple[list[float], ...]:
    """One turn; `asked` counts the calls of each competitor, which says what inputs come next."""
    samples: tuple[list[float], ...] = tuple([] for _ in measurements)
    live = [index for index, m in enumerate(measurements) if m.error is None]
    shift = turn % max(len(live), 1)
    for index in live[shift:] + live[:shift]:
        m = measurements[index]
        calls = max(1, (turn + 1) * m.runs // turns - turn * m.runs // turns)
        try:
            samples[index].extend(m.arm.time(asked[index], calls))
        except ServerError as error:
            m.error = str(error)
        asked[index] += calls
    return samples
