"""Competitors whose durations are written down."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from bench.arm import Started
from bench.inputs import Case
from bench.record import Cell
from bench.shapes import Shape


class FakeArm:
    """Takes the next durations of a list, round and round, whatever it is asked to do."""

    def __init__(self, impl: str, durations_ms: Iterable[float]) -> None:
        self.impl = impl
        self.mode = "eager"
        self.asked: list[tuple[int, int]] = []
        self._durations = itertools.cycle(durations_ms)

    def open(self, shape: Shape, dtype: str, seed: int) -> str | None:
        return None

    def begin(self, case: Case) -> Started:
        return Started(impl=self.impl, call_ms=1.0)

    def time(self, first: int, calls: int) -> list[float]:
        self.asked.append((first, calls))
        return [next(self._durations) for _ in range(calls)]

    def close(self) -> None:
        pass


def cell(impl: str = "cmoe:cpu", ms: float | None = 2.0, **changes: object) -> Cell:
    """A cell of a made-up measurement: floor 1 ms."""
    given: dict[str, object] = {
        "shape": "olmoe",
        "tokens": 4,
        "dtype": "bf16",
        "impl": impl,
        "mode": "eager",
    }
    if ms is not None:
        given |= {"ms_median": ms, "ms_min": ms, "ms_samples": (ms,) * 20, "runs": 20}
        given |= {"floor_ms": 1.0, "floor_fma_ms": 1.5, "active_experts": 26, "flops": 1}
    return Cell(**{**given, **changes})  # type: ignore[arg-type]
