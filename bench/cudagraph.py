"""What CUDA graphs cost, what they save: capture, replay, first calls, memory held.

T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.arm import TensorStore
from bench.inputs import Case
from bench.modes import CapturedGraph
from bench.peers import make_peer
from bench.shapes import Shape
from bench.tables import ms_text
from bench.timing import CudaCacheFlush, median, time_cuda_calls

_RUNS = 30


@dataclass(frozen=True, kw_only=True)
class GraphCost:
    """One implementation at one size. Milliseconds; `error` says why it cannot be captured."""

    impl: str
    tokens: int
    eager_ms: float | None = None
    compiled_ms: float | None = None
    replay_ms: float | None = None
    first_eager_ms: float | None = None
    first_compiled_ms: float | None = None
    capture_ms: float | None = None
    graph_bytes: int | None = None
    error: str | None = None

    def columns(self) -> list[str]:
        """The row of the table."""
        times = (
            self.eager_ms,
            self.compiled_ms,
            self.replay_ms,
            self.first_eager_ms,
            self.first_compiled_ms,
            self.capture_ms,
        )
        texts = ["-" if ms is None else ms_text(ms) for ms in times]
        held = "-" if self.graph_bytes is None else f"{self.graph_bytes / 2**20:.1f}"
        return [self.impl, str(self.tokens), *texts, held, self.error or "yes"]


HEADER = (
    "impl",
    "T",
    "eager ms",
    "compiled ms",
    "replay ms",
    "first eager",
    "first compiled",
    "capture",
    "graph MiB",
    "captured",
)


def measure(shape: Shape, dtype: str, impl: str, tokens: list[int]) -> list[GraphCost]:
    """Every size of one implementation on the current CUDA device."""
    peer = make_peer(impl)
    store = TensorStore()
    loaded = peer.load(shape, store.weights(shape, dtype, 0))
    flush = CudaCacheFlush(torch.cuda.get_device_properties(0).L2_cache_size)
    costs = []
    for count in tokens:
        case = Case(shape=shape, tokens=count, dtype=dtype)
        arguments = [loaded.arguments(draw) for draw in store.draws(case)]
        costs.append(_one(peer.impl, count, loaded.function, arguments, flush))
    return costs


def _one(
    impl: str,
    tokens: int,
    function: Callable[..., Tensor],
    arguments: list[tuple[Tensor, ...]],
    flush: Callable[[], object],
) -> GraphCost:
    first_eager_ms = _wall_ms(lambda: function(*arguments[0]))
    eager_ms = _median_ms(function, arguments, flush)
    compiled = torch.compile(function, dynamic=False)
    first_compiled_ms = _wall_ms(lambda: compiled(*arguments[0]))
    compiled_ms = _median_ms(compiled, arguments, flush)
    graph = CapturedGraph(function)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    capture_ms: float | None = None
    replay_ms: float | None = None
    held: int | None = None
    try:
        capture_ms = _wall_ms(lambda: graph(*arguments[0]))
        replay_ms = _median_ms(graph, arguments, flush)
        held = torch.cuda.memory_reserved() - before
        error = _difference(function, graph, arguments[1])
    except RuntimeError as failure:
        error = f"no: {str(failure).splitlines()[0]}"
    return GraphCost(
        impl=impl,
        tokens=tokens,
        eager_ms=eager_ms,
        compiled_ms=compiled_ms,
        replay_ms=replay_ms,
        first_eager_ms=first_eager_ms,
        first_compiled_ms=first_compiled_ms,
        capture_ms=capture_ms,
        graph_bytes=held,
        error=error,
    )


def _wall_ms(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def _median_ms(
    function: Callable[..., Tensor],
    arguments: list[tuple[Tensor, ...]],
    flush: Callable[[], object],
) -> float:
    rotated = [arguments[index % len(arguments)] for index in range(_RUNS)]
    return median(time_cuda_calls(function, rotated, flush=flush))


def _difference(
    function: Callable[..., Tensor], graph: CapturedGraph, arguments: tuple[Tensor, ...]
) -> str | None:
    """A replay on other ids must compute the other result, not that of the capture."""
    expected, got = function(*arguments), graph(*arguments)
    worst = float((expected.float() - got.float()).abs().max())
    allowed = float(expected.float().abs().max()) * torch.finfo(expected.dtype).eps * 4
    return None if worst <= allowed else f"no: a replay differs by {worst:.2g}"
