"""One layer call by the Triton kernels, under whatever parameters `tune` tries.

T tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from bench import cpu, modes
from bench.arm import to_device
from bench.inputs import Case, Draw, Weights, make_draws
from bench.peers.cmoe import activation_arguments, layer_spec
from bench.shapes import SHAPES, Shape
from bench.timing import time_calls, time_cuda_calls
from bench.verify import Reference, checked_rows

NUM_DRAWS = 4
MAX_THREADS = 8


class TritonTrial:
    """A Trial on the device that is there; on a GPU each candidate runs as a captured graph."""

    def __init__(
        self, shape: Shape, weights: Weights, case: Case, *, flush: Callable[[], object]
    ) -> None:
        self._shape = shape
        self._weights = weights
        self._draws = [to_device(draw) for draw in make_draws(case, num_draws=NUM_DRAWS)]
        # The second one tells a replay that follows its inputs from one that repeats its capture.
        self._references = [Reference(shape, weights, draw) for draw in self._draws[:2]]
        self._flush = flush
        self._cuda = torch.cuda.is_available()
        self._functions: dict[Any, Callable[..., Tensor]] = {}

    def prepare(self, candidates: Sequence[Any], go_on: Callable[[], bool]) -> None:
        """Compiles in threads, as Triton allows; its interpreter has nothing to compile."""
        if not self._cuda:
            return

        def compile_one(parameters: Any) -> None:
            # What cannot be compiled is told by `fault`.
            with contextlib.suppress(Exception):
                if go_on():
                    self._run(parameters, *self._draws[0])

        with ThreadPoolExecutor(min(cpu.num_cpus(), MAX_THREADS)) as pool:
            list(pool.map(compile_one, candidates))
        torch.cuda.synchronize()

    def _run(self, parameters: Any, *draw: Tensor) -> Tensor:
        from cmoe.custom_ops.triton.fused_experts import fused_experts_with

        call = call_of(self._shape, self._weights, Draw(*draw))
        return fused_experts_with(parameters, call)

    def fault(self, parameters: Any) -> str | None:
        """Captures, runs on two inputs; what is wrong, or None."""
        run = functools.partial(self._run, parameters)
        function = modes.apply("cudagraph" if self._cuda else "eager", run)
        for draw, reference in zip(self._draws, self._references, strict=False):
            try:
                y = function(*draw)
                rows = y[checked_rows(y.shape[0]).to(y.device)].float().cpu()
            except Exception as error:  # what a compiler cannot do comes in many classes
                return f"{type(error).__name__}: {' '.join(str(error).strip().splitlines()[:1])}"
            fault = reference.fault(rows)[1]
            if fault is not None:
                return fault
        self._functions[parameters] = function
        return None

    def time(self, parameters: Any, first: int, calls: int) -> list[float]:
        """Milliseconds of `calls` calls, from draw number `first` on."""
        draws = [self._draws[(first + index) % NUM_DRAWS] for index in range(calls)]
        timer = time_cuda_calls if self._cuda else time_calls
        return timer(self._functions[parameters], draws, flush=self._flush)

    def forget(self, parameters: Any) -> None:
        """Lets the graph go."""
        del self._functions[parameters]


def call_of(shape: Shape, weights: Weights, draw: Draw) -> Any:
    """The op's arguments, as the Triton backend bundles them."""
    from cmoe.custom_ops.triton.fused_experts import Call

    return Call(
        draw.x,
        weights.w13,
        weights.w2,
        draw.topk_weights,
        draw.topk_ids,
        weights.w13_bias,
        weights.w2_bias,
        None,
        *activation_arguments(shape),
        False,
        False,
    )


def kernel_shape(shape: Shape, weights: Weights, dtype: str) -> Any:
    """The shape as the choice of parameters knows it: that of a call."""
    (draw,) = make_draws(Case(shape=shape, tokens=1, dtype=dtype), num_draws=1)
    return call_of(shape, weights, to_device(draw)).shape()


def unavailable() -> str | None:
    """Why there is nothing to tune here; None where the Triton kernels run."""
    from cmoe.custom_ops.backends import explain_backends

    reasons = explain_backends(layer_spec(SHAPES["small"], "bf16"))["triton"]
    return "; ".join(reasons) or None
