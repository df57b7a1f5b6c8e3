"""The mode axis: how a function is run, not which."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

MODES = (
    "eager",
    "compile",
    "max-autotune",
    "reduce-overhead",
    "cudagraph",
    "compile-cudagraph",
)
"""`compile` is torch.compile's default mode, `cudagraph` a graph captured by hand of the function
as it is, `compile-cudagraph` one of the compiled function."""

_NEED_CUDA = ("reduce-overhead", "cudagraph", "compile-cudagraph")


def left_out(mode: str, *, cuda: bool | None = None) -> str | None:
    """Why `mode` is not run on this machine; None where it can be."""
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; choose one of {', '.join(MODES)}")
    has_cuda = torch.cuda.is_available() if cuda is None else cuda
    if mode in _NEED_CUDA and not has_cuda:
        return f"mode {mode} needs CUDA graphs, this machine has no CUDA device"
    return None


def apply(mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as `mode` runs it. Sizes are compiled in: one call size, one graph."""
    if mode == "eager":
        return function
    if mode == "cudagraph":
        return CapturedGraph(function)
    if mode == "compile-cudagraph":
        return CapturedGraph(torch.compile(function, dynamic=False))
    compile_mode = None if mode == "compile" else mode
    return torch.compile(function, mode=compile_mode, dynamic=False)


def bind(function: Callable[..., Any], arguments: Sequence[Any]) -> Callable[[], Any]:
    """The call that is left when the arguments lie where the function reads them."""
    if isinstance(function, CapturedGraph):
        function.stage(*arguments)
        return function.replay
    return functools.partial(function, *arguments)


class CapturedGraph:
    """A function recorded once in a CUDA graph, replayed on copies of its tensor arguments."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[torch.Tensor] = []
        self._output: Any = None

    def __call__(self, *arguments: torch.Tensor) -> Any:
        self.stage(*arguments)
        return self.replay()

    def stage(self, *arguments: torch.Tensor) -> None:
        """Copies the arguments to where the graph reads them; the first ones are captured."""
        if self._graph is None:
            self._capture(*arguments)
        for held, given in zip(self._inputs, arguments, strict=True):
            held.copy_(given)

    def replay(self) -> Any:
        """The result for what was staged last; the next replay overwrites it."""
        assert self._graph is not None
        self._graph.replay()
        return self._output

    def _capture(self, *arguments: torch.Tensor) -> None:
        self._inputs = [argument.clone() for argument in arguments]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._output = self._function(*self._inputs)
        self._graph = graph
