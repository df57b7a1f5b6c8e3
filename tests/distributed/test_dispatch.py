"""Dispatch on one rank, how the runner asks its dispatcher."""

from __future__ import annotations

import torch
from torch import Tensor

from cmoe.distributed.dispatch import Dispatched, LocalDispatcher
from cmoe.routing import Routing
from tests.layers import layer_of, logits_of, x_of


def test_on_one_rank_nothing_moves() -> None:
    x, y = x_of(3), x_of(3)
    routing = Routing(torch.rand(3, 2), torch.zeros(3, 2, dtype=torch.int32))
    dispatched = LocalDispatcher().dispatch(x, routing)
    assert dispatched.hidden_states is x
    assert dispatched.routing is routing
    assert LocalDispatcher().combine(y) is y


class Reversing:
    """Tokens arrive in another order, and twice as many as were sent."""

    def dispatch(self, hidden_states: Tensor, routing: Routing) -> Dispatched:
        x = torch.cat([hidden_states, hidden_states]).flip(0)
        weights, ids = (torch.cat([t, t]).flip(0) for t in routing[:2])
        return Dispatched(x, Routing(weights, ids))

    def combine(self, y: Tensor) -> Tensor:
        return y.flip(0)[: y.shape[0] // 2]


def test_experts_work_on_what_was_dispatched() -> None:
    layer = layer_of()
    x, logits = x_of(7), logits_of(7)
    expected = layer(x, logits)
    layer.dispatcher = Reversing()
    torch.testing.assert_close(layer(x, logits), expected)
    layer.dispatcher.combine = lambda y: y[: y.shape[0] // 2]
    assert not torch.allclose(layer(x, logits), expected)
