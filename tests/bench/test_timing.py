"""How one call is timed."""

from __future__ import annotations

import pytest

from bench.timing import CacheFlush, median, time_calls


class FakeClock:
    """Stands still until something moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_the_call_is_timed() -> None:
    clock = FakeClock()
    events = []

    def flush() -> None:
        events.append("flush")
        clock.now += 100.0

    def work(seconds: float) -> None:
        events.append("call")
        clock.now += seconds

    times = time_calls(work, [(0.25,), (0.5,)], flush=flush, clock=clock)
    assert times == [250.0, 500.0]
    assert events == ["flush", "call", "flush", "call"]


@pytest.mark.parametrize(
    ("values", "middle"), [([3.0, 1.0, 2.0], 2.0), ([4.0, 1.0, 2.0, 3.0], 2.5)]
)
def test_median(values: list[float], middle: float) -> None:
    assert median(values) == middle


def test_the_flush_reads_more_than_the_cache() -> None:
    assert CacheFlush(1 << 20)._buffer.nbytes == 2 << 20
