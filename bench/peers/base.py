"""What the harness asks of an implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from bench.inputs import Case, Draw, Weights
from bench.shapes import Shape


class Loaded(NamedTuple):
    """An implementation that holds one layer's weights."""

    function: Callable[..., Tensor]
    arguments: Callable[[Draw], tuple[Tensor, ...]]  # conversions that are not timed


class Peer(ABC):
    """One implementation of the routed experts, as a small adapter."""

    impl: str
    """`library:implementation`, as in the records."""

    @abstractmethod
    def version(self) -> str:
        """The version of the library behind it. Raises ImportError where it is not installed."""

    @abstractmethod
    def unsupported(self, case: Case, mode: str) -> str | None:
        """Why it does not run `case` in `mode`; None where it does."""

    def num_own_layouts(self, shape: Shape) -> int:
        """Copies of the weights that it makes for itself."""
        return 0

    @abstractmethod
    def load(self, shape: Shape, weights: Weights) -> Loaded:
        """Takes the weights in, in the layout that it likes best."""


def plain_arguments(draw: Draw) -> tuple[Tensor, ...]:
    """x, topk_weights, topk_ids as they are."""
    return draw.x, draw.topk_weights, draw.topk_ids
