"""The dispatcher: takes routed tokens to their experts' rank, brings the results back.

T tokens here, R tokens after dispatch, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from cmoe.routing import Routing


class Dispatched(NamedTuple):
    """The tokens that this rank's experts work on."""

    hidden_states: Tensor  # [R, H]
    routing: Routing  # of the R tokens


class Dispatcher(Protocol):
    """The contract; ids and weights travel with the tokens, logits never do."""

    def dispatch(self, hidden_states: Tensor, routing: Routing) -> Dispatched:
        """hidden_states: [T, H] of this rank's tokens."""

    def combine(self, y: Tensor) -> Tensor:
        """y: [R, H], the experts' sums -> [T, H] for this rank's tokens."""


class LocalDispatcher:
    """Every expert is here: nothing moves."""

    def dispatch(self, hidden_states: Tensor, routing: Routing) -> Dispatched:
        """The tokens as they are."""
        return Dispatched(hidden_states, routing)

    def combine(self, y: Tensor) -> Tensor:
        """The sums as they are."""
        return y
