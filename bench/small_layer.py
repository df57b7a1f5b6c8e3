"""What a layer costs beyond its kernels: whole layers so small that the call around them shows.

L layers, T tokens, E experts, K experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.peers.cmoe import layer_spec
from bench.progress import Progress
from bench.record import Cell
from bench.shapes import DTYPES, SHAPES, Shape
from bench.stacks import LAYERS, Empty, layer_tensors, plain_layer, plain_stack, stack
from bench.tables import table
from bench.timing import NoFlush, median, time_calls
from bench.verify import relative_error

NUM_LAYERS = 16
CALLS_PER_TURN = 100
TURNS = 30


@dataclass(frozen=True, kw_only=True)
class Subject:
    """One thing to time: `layers` of them make one call."""

    impl: str
    part: str
    layers: int
    make: Callable[[], Callable[[Tensor], Tensor]]
    expected: Callable[[Tensor, torch.dtype], Tensor]  # of x, each step in a dtype
    mode: str = "compile"


def _compiled(make: Callable[[], nn.Module]) -> Callable[[], Callable[[Tensor], Tensor]]:
    return lambda: torch.compile(make())


def subjects(shape: Shape, dtype: str) -> list[Subject]:
    """A stack and a layer alone of each maker, cmoe's kernels without a layer, an empty module."""
    last = layer_tensors(shape, dtype, NUM_LAYERS - 1)
    found = [
        Subject(
            impl="torch:empty module",
            part="layer",
            layers=1,
            make=_compiled(Empty),
            expected=lambda x, compute: x.to(compute) + 1,
        ),
        Subject(
            impl="cmoe:bare kernels",
            part=f"stack of {NUM_LAYERS}",
            layers=NUM_LAYERS,
            make=lambda: bare_kernels(shape, dtype),
            expected=lambda x, compute: plain_layer(shape, last, x, compute),
            mode="eager",
        ),
    ]
    for impl in LAYERS:
        for part, layers in ((f"stack of {NUM_LAYERS}", NUM_LAYERS), ("layer", 1)):
            make = _compiled(functools.partial(stack, impl, shape, dtype, layers))
            expected = functools.partial(plain_stack, shape, dtype, layers)
            found.append(Subject(impl=impl, part=part, layers=layers, make=make, expected=expected))
    return found


def bare_kernels(shape: Shape, dtype: str) -> Callable[[Tensor], Tensor]:
    """Gate product, route, fused_experts of each layer, one after the other, nothing between them.

    This is the kernel time of a stack, with the few microseconds that each op costs to call. The
    output is that of the last layer.
    """
    from cmoe.custom_ops.backends import select_kernels

    kernels = select_kernels(layer_spec(shape, dtype))
    layers = [layer_tensors(shape, dtype, seed) for seed in range(NUM_LAYERS)]

    def run(x: Tensor) -> Tensor:
        out = x
        for gate, w2, w13 in layers:
            logits = F.linear(x, gate)
            scales, ids = kernels.route(
                logits, None, shape.top_k, "softmax", False, True, 1e-20, 1, 1, 1.0
            )
            none = (None, None, None)
            out = kernels.fused_experts(
                x, w13, w2, scales, ids, *none, "silu", 1.0, None, False, False
            )
        return out

    return run


def measure(
    shape: Shape | None = None,
    dtype: str = "bf16",
    *,
    progress: Progress | None = None,
    turns: int = TURNS,
    chosen: Sequence[Subject] | None = None,
) -> list[Cell]:
    """Times every subject in turn at T = 1, caches warm: one token's pass goes through such layers
    back to back. A turn's value is the mean of its calls, since one call is near the clock's step.
    """
    shape = shape or SHAPES["small"]
    todo = list(subjects(shape, dtype) if chosen is None else chosen)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, shape.hidden_size, generator=generator).to(DTYPES[dtype])
    ready: list[tuple[Subject, Callable[[Tensor], Tensor] | None, str | None]] = []
    for subject in todo:
        if progress is not None:
            progress.note(f"compiling {subject.impl} {subject.part}")
        ready.append((subject, *_warm(subject, x)))
    samples: list[list[float]] = [[] for _ in ready]
    for turn in range(turns):
        for index in range(len(ready)):
            place = (index + turn) % len(ready)
            function = ready[place][1]
            if function is not None:
                times = time_calls(_repeated(function, x), [()], flush=NoFlush())
                samples[place].append(times[0] / CALLS_PER_TURN)
    return [
        _cell(shape, dtype, subject, error, taken)
        for (subject, _, error), taken in zip(ready, samples, strict=True)
    ]


def _warm(subject: Subject, x: Tensor) -> tuple[Callable[[Tensor], Tensor] | None, str | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = subject.make()
            for _ in range(20):
                got = function(x)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
    exact = subject.expected(x, torch.float32)
    plain = relative_error(subject.expected(x, x.dtype), exact)
    error, allowed = relative_error(got, exact), 2 * plain + torch.finfo(x.dtype).eps
    if error > allowed:
        return None, f"wrong result: relative error {error:.2g}, allowed {allowed:.2g}"
    return function, None


def _repeated(function: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    def run() -> None:
        for _ in range(CALLS_PER_TURN):
            function(x)

    return run


def _cell(
    shape: Shape, dtype: str, subject: Subject, error: str | None, taken: list[float]
) -> Cell:
    empty = Cell(
        shape=shape.name,
        tokens=1,
        dtype=dtype,
        impl=subject.impl,
        mode=subject.mode,
        part=subject.part,
        error=error or "not timed",
    )
    if error is not None or not taken:
        return empty
    return dataclasses.replace(
        empty,
        error=None,
        ms_median=median(taken),
        ms_min=min(taken),
        ms_samples=tuple(taken),
        runs=len(taken) * CALLS_PER_TURN,
        extra={"us_per_layer": median(taken) * 1e3 / subject.layers},
    )


def text(cells: Sequence[Cell]) -> str:
    """Microseconds a layer."""
    rows = []
    for cell in cells:
        us = cell.extra.get("us_per_layer")
        least = None if cell.ms_min is None or not cell.ms_median else cell.ms_min / cell.ms_median
        rows.append(
            [
                cell.impl,
                cell.mode,
                cell.part,
                "-" if us is None else f"{us:.1f}",
                "-" if us is None or least is None else f"{us * least:.1f}",
                cell.error or "",
            ]
        )
    return table(["impl", "mode", "what", "us a layer", "least", ""], rows)
