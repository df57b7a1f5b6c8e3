"""The contract of a router.   T tokens, E experts, K experts per token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from cmoe.custom_ops.backends import Kernels
from cmoe.pluggable import PluggableLayer
from cmoe.routing import RouterInputs, Routing


def _accept(tensor: Tensor) -> None:
    """The check of a buffer that may hold anything."""


class RouterSlot(NamedTuple):
    """A buffer of a router that a checkpoint fills."""

    names: tuple[str, ...]  # in checkpoints, below the gate; the router's own name among them
    tensor: Tensor
    check: Callable[[Tensor], None] = _accept  # ValueError for values that the router cannot use


class FusedMoERouter(PluggableLayer):
    """Inputs of T tokens -> a Routing: weights [T, K] float32, ids [T, K] in [-1, E).

    requires: the fields of RouterInputs, besides hidden_states, that a call must come with; the
        runner refuses a call without them.
    num_logits: width of router_logits that the router reads; None when it reads none.
    is_closed: whether `forward` reads no tensors but its inputs, its parameters, its buffers, and
        writes none of them. Compiled layers with another router are traced through their op, which
        names what it reads, and nothing that it writes.
    """

    requires: frozenset[str] = frozenset({"router_logits"})
    num_logits: int | None = None
    is_closed: bool = False

    def __init_subclass__(cls) -> None:
        """A new `forward` is not vouched for by the class that it overrides."""
        super().__init_subclass__()
        if "forward" in cls.__dict__ and "is_closed" not in cls.__dict__:
            cls.is_closed = False

    @abstractmethod
    def forward(self, inputs: RouterInputs) -> Routing:
        """The routing of one call."""

    def use_kernels(self, kernels: Kernels) -> None:
        """Called by the runner with the backend's kernels, whenever these are chosen."""

    def correction_bias(self) -> Tensor | None:
        """Where a checkpoint's `e_score_correction_bias` goes; None: the router has none."""
        return None

    def checkpoint_slots(self) -> tuple[RouterSlot, ...]:
        """Every buffer that a complete checkpoint fills."""
        bias = self.correction_bias()
        name = "e_score_correction_bias"
        return () if bias is None else (RouterSlot((name, f"topk.{name}"), bias),)
