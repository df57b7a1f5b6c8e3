"""The experts that every token goes through."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cmoe
from tests.layers import HIDDEN, layer_of, logits_of, x_of


def test_without_a_gate_it_is_the_mlp() -> None:
    mlp = nn.Linear(HIDDEN, HIDDEN)
    x = x_of(3)
    assert torch.equal(cmoe.SharedExperts(mlp)(x), mlp(x))


def test_a_scalar_gate_weighs_each_token() -> None:
    mlp, gate = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
    x = x_of(3)
    y = cmoe.SharedExperts(mlp, gate)(x)
    for token in range(3):
        weight = 1 / (1 + (-gate(x[token])).exp())
        torch.testing.assert_close(y[token], weight * mlp(x[token]))


@pytest.mark.parametrize("transparent", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gate_in_float32_leaves_the_dtype_of_the_layer(transparent: bool, compiled: bool) -> None:
    """The fake promises the dtype of the input; another one would be read as garbage."""
    layer = layer_of(
        shared_experts=nn.Linear(HIDDEN, HIDDEN),
        shared_expert_gate=cmoe.GateLinear(HIDDEN, 1),
        transparent=transparent,
    )
    layer = layer.to(torch.bfloat16).requires_grad_(False)
    x, logits = x_of(3, dtype=torch.bfloat16), logits_of(3)
    expected = layer(x, logits)
    assert expected.dtype == torch.bfloat16
    assert layer.shared_experts(x).dtype == torch.bfloat16
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    assert torch.equal(run(x, logits), expected)


@pytest.mark.parametrize("transparent", [False, True])
@pytest.mark.parametrize("width", [1, 15])
def test_another_width_is_an_error(width: int, transparent: bool) -> None:
    """A width of 1 would be broadcast without a word."""
    layer = layer_of(shared_experts=nn.Linear(HIDDEN, width), transparent=transparent)
    layer.requires_grad_(False)
    with pytest.raises(ValueError, match=rf"keep the shape \(3, 16\) .* got \(3, {width}\)"):
        layer(x_of(3), logits_of(3))
