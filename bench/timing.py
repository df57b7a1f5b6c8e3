"""How one call is timed: caches flushed before it, the clock read around it alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from bench.modes import bind


class Clock(Protocol):
    """Seconds on a monotonic scale; tests give a fake one."""

    def __call__(self) -> float: ...


class CacheFlush:
    """Reads a buffer of twice the last-level cache with all threads, so that no weights stay in it.

    All threads take part because each core's private cache must lose its share too.
    """

    def __init__(self, cache_bytes: int) -> None:
        self._buffer = torch.ones(2 * cache_bytes // 8, dtype=torch.int64)

    def __call__(self) -> None:
        self._buffer.sum()


class NoFlush:
    """Leaves the caches alone."""

    def __call__(self) -> None:
        return None


class CudaCacheFlush:
    """Reads a buffer of twice the GPU's level-2 cache.

    Written lines would have to go back to memory inside the timed call.
    """

    def __init__(self, cache_bytes: int) -> None:
        self._buffer = torch.ones(2 * cache_bytes // 8, dtype=torch.int64, device="cuda")

    def __call__(self) -> None:
        self._buffer.sum()


def time_calls(
    function: Callable[..., object],
    arguments: Sequence[tuple[object, ...]],
    *,
    flush: Callable[[], object],
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Milliseconds of one call for each tuple of arguments, in their order."""
    times = []
    for call_arguments in arguments:
        flush()
        start = clock()
        function(*call_arguments)
        times.append((clock() - start) * 1e3)
    return times


def time_cuda_calls(
    function: Callable[..., object],
    arguments: Sequence[tuple[object, ...]],
    *,
    flush: Callable[[], object],
) -> list[float]:
    """The same by CUDA events, so that the host's share of a replayed graph is not counted.

    Nor is the copy of the arguments to where the graph reads them.
    """
    pairs = []
    for call_arguments in arguments:
        call = bind(function, call_arguments)
        flush()
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in pairs]


def median(values: Sequence[float]) -> float:
    """The middle value, the mean of the two middle ones for an even count."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
