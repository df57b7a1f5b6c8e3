"""How the shared experts run beside the routed ones.   T tokens, S width of the shared experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

SharedFunction = Callable[[Tensor], Tensor]
RoutedFunction = Callable[[], Tensor]


def in_order(shared: SharedFunction, x: Tensor, routed: RoutedFunction) -> tuple[Tensor, Tensor]:
    """(shared(x), routed()), one after the other. x: [T, S]."""
    return shared(x), routed()


def on_second_stream(
    shared: SharedFunction, x: Tensor, routed: RoutedFunction
) -> tuple[Tensor, Tensor]:
    """As in_order, but shared(x) runs on a stream of its own while the routed experts run.

    The streams are ordered by events, so a CUDA graph captures both. It pays where neither fills
    the GPU, which is at few tokens. A device without streams, or a graph that traces through the
    layer, takes them in order.
    """
    if x.device.type != "cuda" or torch.compiler.is_compiling():
        return in_order(shared, x, routed)
    current = torch.cuda.current_stream(x.device)
    second = _second_stream(current)
    return fork_and_join(shared, x, routed, current, second, torch.cuda.stream)


def fork_and_join(
    shared: SharedFunction,
    x: Tensor,
    routed: RoutedFunction,
    current: Any,
    second: Any,
    use: Callable[[Any], AbstractContextManager[Any]],
) -> tuple[Tensor, Tensor]:
    """shared(x) on the stream `second`, routed() on `current`; `use` makes a stream current.

    The second stream starts behind all that `current` was given, and `current` goes on behind it,
    also when routed() fails. So memory needs no record_stream, whose deferred frees a captured
    graph would hold: x cannot be reused before the join, nor can what the second stream allocates
    be reused before the next fork, which waits for its readers.
    """
    second.wait_stream(current)
    with use(second):
        y = shared(x)
    try:
        return y, routed()
    finally:
        current.wait_stream(second)


@functools.cache
def _second_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """One for each stream that layers run on; all its layers share it, hence its memory."""
    return torch.cuda.Stream(current.device)
