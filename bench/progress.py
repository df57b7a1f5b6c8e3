"""How far a run is, how long it will still take."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """One line a step on stderr: `[3/30] olmoe T=64  1 min 10 s, about 9 min left`.

    Steps differ in cost, so each has a weight; what is left is estimated from the seconds that a
    unit of weight took so far.
    """

    def __init__(
        self,
        weights: list[float],
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._weights = weights
        self._done = 0
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._start = clock()

    def step(self, what: str) -> None:
        """Announces the next step."""
        elapsed = self._clock() - self._start
        left = self.seconds_left()
        estimate = "" if left is None else f", about {readable(left)} left"
        count = f"[{self._done + 1}/{len(self._weights)}]"
        print(f"{count} {what}  {readable(elapsed)}{estimate}", file=self._stream, flush=True)

    def note(self, line: str) -> None:
        """A line between steps."""
        print(f"  {line}", file=self._stream, flush=True)

    def done(self) -> None:
        """The announced step is over."""
        self._done += 1

    def seconds_left(self) -> float | None:
        """The estimate; None before anything was done."""
        finished = sum(self._weights[: self._done])
        if not finished:
            return None
        elapsed = self._clock() - self._start
        return elapsed / finished * sum(self._weights[self._done :])


def readable(seconds: float) -> str:
    """Seconds as `12 s` or `3 min 05 s`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60:02d} s"
