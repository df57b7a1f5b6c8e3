"""Adapters that a test gives to the harness with --peers-from."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from bench.inputs import Case, Draw, Weights
from bench.peers.base import Loaded, Peer, plain_arguments
from bench.peers.dense import DenseControl
from bench.shapes import Shape
from bench.verify import naive


class Right(Peer):
    """Plain arithmetic in the case's dtype."""

    impl = "test:right"

    def version(self) -> str:
        return "1.2.3"

    def unsupported(self, case: Case, mode: str) -> str | None:
        return "it cannot count to nine" if case.tokens == 9 else None

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        def experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            draw = Draw(x, topk_weights, topk_ids)
            return self.result(naive(shape, weights, draw, torch.arange(len(x)), x.dtype))

        return Loaded(experts, plain_arguments)

    def result(self, y: Tensor) -> Tensor:
        return y


class Wrong(Right):
    """A tenth too much."""

    impl = "test:wrong"

    def result(self, y: Tensor) -> Tensor:
        return y * 1.1


class Repeating(Right):
    """Gives its first result again and again, like a graph that does not see its inputs."""

    impl = "test:repeating"
    first: Tensor | None = None

    def result(self, y: Tensor) -> Tensor:
        self.first = y if self.first is None else self.first
        return self.first


class Absent(Right):
    """A library that is not there."""

    impl = "test:absent"

    def version(self) -> str:
        raise ImportError("test is not installed")


class Stopped(Right):
    """Someone presses Ctrl-C when the second size is measured."""

    impl = "test:stopped"

    def result(self, y: Tensor) -> Tensor:
        if len(y) == 2:
            raise KeyboardInterrupt
        return y


class Sleeper(Right):
    """Takes as long as the revision of `cmoe` on the path says."""

    impl = "test:sleeper"

    def result(self, y: Tensor) -> Tensor:
        import cmoe

        time.sleep(cmoe.SECONDS)  # type: ignore[attr-defined]
        return y


class Steady(DenseControl):
    """A control that no other work on the machine makes slower."""

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        def sleep(x: Tensor) -> Tensor:
            time.sleep(0.01)
            return x

        return Loaded(sleep, lambda draw: (draw.x,))


PEERS = {peer.impl: peer for peer in (Right, Wrong, Repeating, Absent, Stopped, Sleeper, Steady)}
