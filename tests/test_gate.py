"""The router's linear layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import cmoe
from tests.layers import HIDDEN, NUM_EXPERTS, x_of


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_logits_are_not_rounded_to_the_dtype_of_the_input(dtype: torch.dtype, bias: bool) -> None:
    gate = cmoe.GateLinear(64, 7, bias=bias, dtype=dtype)
    if bias:
        nn.init.normal_(gate.bias)
    x = x_of(5, width=64, dtype=dtype)
    logits = gate(x)
    assert logits.dtype == torch.promote_types(dtype, torch.float32)
    exact = x.double() @ gate.weight.double().T + (gate.bias.double() if bias else 0)
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


def test_choices_in_bfloat16_are_those_in_float64() -> None:
    """Rounded logits choose other experts for some percent of the tokens."""
    gate = cmoe.GateLinear(512, 128, dtype=torch.bfloat16)
    x = x_of(256, width=512, dtype=torch.bfloat16)
    exact = x.double() @ gate.weight.double().T
    expected = exact.topk(16).indices.sort().values
    assert torch.equal(gate(x).topk(16).indices.sort().values, expected)
    rounded = nn.functional.linear(x, gate.weight).topk(16).indices.sort().values
    assert not torch.equal(rounded, expected)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gate_takes_over_parameters_without_a_copy(has_bias: bool) -> None:
    linear = nn.Linear(16, 5, bias=has_bias)
    gate = cmoe.GateLinear.of(linear.weight, linear.bias)
    assert gate.weight is linear.weight
    assert gate.bias is linear.bias
    x = x_of(3)
    torch.testing.assert_close(gate(x), linear(x))


def test_fresh_logits_have_about_the_size_of_the_input() -> None:
    logits = cmoe.GateLinear(1024, 64)(x_of(64, width=1024))
    assert 0.9 < logits.std().item() < 1.1


@pytest.mark.parametrize("bias", [False, True])
def test_a_gate_without_bias_has_no_parameter_for_it(bias: bool) -> None:
    names = {"weight", "bias"} if bias else {"weight"}
    assert set(cmoe.GateLinear(16, 5, bias=bias).state_dict()) == names


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_does_not_round_the_logits(compiled: bool) -> None:
    gate = cmoe.GateLinear(64, 8)
    run = torch.compile(gate, fullgraph=True, backend="aot_eager") if compiled else gate
    x = torch.randn(7, 64)
    expected = gate(x)
    with torch.autocast("cpu", torch.bfloat16):
        logits = run(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected)


def test_a_gate_runs_on_the_meta_device() -> None:
    """Autocast knows no meta device and says so with an error."""
    gate = cmoe.GateLinear(HIDDEN, NUM_EXPERTS).to("meta")
    assert gate(torch.empty(3, HIDDEN, device="meta")).shape == (3, NUM_EXPERTS)


def test_a_printed_model_shows_the_sizes() -> None:
    assert repr(cmoe.GateLinear(16, 5)) == "GateLinear(hidden_size=16, num_experts=5, bias=False)"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(1,), (3,), (1, 1), (1, 3), (0,)])
def test_compiled_logits_are_not_rounded_either(lead: tuple[int, ...], bias: bool) -> None:
    gate = cmoe.GateLinear(HIDDEN, NUM_EXPERTS, bias=bias, dtype=torch.bfloat16)
    x = x_of(*lead, dtype=torch.bfloat16)
    logits = torch.compile(gate, fullgraph=True)(x)
    expected = x.double() @ gate.weight.double().t()
    if bias:
        expected = expected + gate.bias.double()
    assert logits.dtype == torch.float32
    # The products of bfloat16 are exact in float32: a few roundings of their sum.
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)


def test_one_token_takes_no_second_graph_class(count_compiles: Callable[[], int]) -> None:
    """The form for one token goes with the graph that one token has in any case."""
    gate = cmoe.GateLinear(HIDDEN, NUM_EXPERTS)
    compiled = torch.compile(gate, fullgraph=True, dynamic=True)
    for num_tokens in (3, 1, 5, 1, 7):
        compiled(x_of(num_tokens))
    assert count_compiles() == 2


def test_a_gate_trains_when_it_is_asked_to() -> None:
    """A gate that asked by itself would send every call outside of no_grad to the slow kernels."""
    gate = cmoe.GateLinear(HIDDEN, NUM_EXPERTS, bias=True)
    assert not any(parameter.requires_grad for parameter in gate.parameters())
    gate.requires_grad_()(x_of(3)).sum().backward()
    assert gate.weight.grad is not None
    assert gate.bias.grad is not None
