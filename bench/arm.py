"""One competitor in a measurement: an implementation under one mode in this process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bench import modes
from bench.inputs import Case, Draw, Weights, make_draws, make_weights
from bench.peers import make_peer
from bench.peers.base import Loaded, Peer
from bench.shapes import Shape
from bench.timing import time_calls, time_cuda_calls
from bench.verify import checked_rows


@dataclass(frozen=True, kw_only=True)
class Started:
    """What the first calls of a case showed."""

    impl: str  # with "auto" resolved
    version: str = ""
    rows: Tensor | None = None  # the checked rows of the output: [rows, H]
    first_call_ms: float = 0.0  # with compilation
    call_ms: float = 0.0
    error: str | None = None


class Arm(Protocol):
    """What the runner asks of a competitor, wherever it runs."""

    impl: str
    mode: str

    def open(self, shape: Shape, dtype: str, seed: int) -> str | None:
        """Takes in the weights of one shape; the reason where that does not work."""

    def begin(self, case: Case) -> Started:
        """Warms up on one case."""

    def time(self, first: int, calls: int) -> list[float]:
        """Milliseconds of `calls` calls on the case's draws, from draw number `first` on."""

    def close(self) -> None:
        """Lets the weights go."""


class TensorStore:
    """The weights of the current shape, the draws of the current case: made once a process."""

    def __init__(self) -> None:
        self._weights_key: tuple[Shape, str, int] | None = None
        self._weights: Weights | None = None
        self._case: Case | None = None
        self._draws: list[Draw] = []

    def weights(self, shape: Shape, dtype: str, seed: int) -> Weights:
        """The weights, kept until another shape is asked for."""
        if self._weights_key != (shape, dtype, seed):
            self._weights = None
            self._weights = to_device(make_weights(shape, dtype, seed=seed))
            self._weights_key = (shape, dtype, seed)
        assert self._weights is not None
        return self._weights

    def draws(self, case: Case) -> list[Draw]:
        """The draws; a new case also drops what torch.compile made for the last one."""
        if self._case != case:
            torch._dynamo.reset()
            self._draws = [to_device(draw) for draw in make_draws(case)]
            self._case = case
        return self._draws


def to_device(tensors):  # type: ignore[no-untyped-def]
    """A bundle of tensors on the GPU, where there is one."""
    if not torch.cuda.is_available():
        return tensors
    return type(tensors)(*(tensor if tensor is None else tensor.cuda() for tensor in tensors))


class LocalArm:
    """An arm in this process."""

    def __init__(
        self, impl: str, mode: str, *, store: TensorStore, flush: Callable[[], object]
    ) -> None:
        self.impl = impl
        self.mode = mode
        self._peer: Peer = make_peer(impl)
        self._store = store
        self._flush = flush
        self._loaded: Loaded | None = None
        self._function: Callable[..., Tensor] | None = None
        self._arguments: list[tuple[Tensor, ...]] = []

    def open(self, shape: Shape, dtype: str, seed: int) -> str | None:
        """Takes in the weights of one shape; the reason where that does not work."""
        reason = modes.left_out(self.mode)
        if reason is not None:
            return reason
        try:
            self._peer.version()
            reason = self._peer.unsupported(Case(shape=shape, tokens=1, dtype=dtype), self.mode)
            if reason is None:
                self._loaded = self._peer.load(shape, self._store.weights(shape, dtype, seed))
            return reason
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    def begin(self, case: Case) -> Started:
        """Warms up on one case."""
        reason = self._peer.unsupported(case, self.mode)
        if reason is not None or self._loaded is None:
            return Started(impl=self._peer.impl, error=reason or "not opened")
        draws = self._store.draws(case)
        try:
            self._function = modes.apply(self.mode, self._loaded.function)
            self._arguments = [self._loaded.arguments(draw) for draw in draws]
            with warnings.catch_warnings():
                # What torch.compile warns of in a peer's code is no news to who measures it.
                warnings.simplefilter("ignore")
                start = time.perf_counter()
                # Not on the draw that is checked: a graph that only repeats its capture must show.
                self._function(*self._arguments[-1])[:1].cpu()
                first_call_ms = (time.perf_counter() - start) * 1e3
                rows = self._function(*self._arguments[0])
                rows = rows[checked_rows(rows.shape[0]).to(rows.device)].float().cpu()
                call_ms = min(self.time(1, 1)[0] for _ in range(2))
        except Exception as error:
            first_line = str(error).strip().splitlines()[:1]
            message = f"{type(error).__name__}: {' '.join(first_line)}"
            return Started(impl=self._peer.impl, error=message)
        return Started(
            impl=self._peer.impl,
            version=self._peer.version(),
            rows=rows,
            first_call_ms=first_call_ms,
            call_ms=call_ms,
        )

    def time(self, first: int, calls: int) -> list[float]:
        """Milliseconds of `calls` calls on the case's draws, from draw number `first` on."""
        assert self._function is not None
        count = len(self._arguments)
        arguments = [self._arguments[(first + index) % count] for index in range(calls)]
        timer = time_cuda_calls if torch.cuda.is_available() else time_calls
        return timer(self._function, arguments, flush=self._flush)

    def close(self) -> None:
        """Lets the weights go."""
        self._loaded = self._function = None
        self._arguments = []
