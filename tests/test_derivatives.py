"""Every kind of derivative of a layer, or an error: never a zero, never a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmoe
from tests.layers import HIDDEN, config_of, layer_of

F64 = torch.float64

# torch writes its own forward-mode formulas in the script language that it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


def layer_64(**parts: Any) -> cmoe.MoERunner:
    return layer_of(config_of(params_dtype=F64), **parts)


def inputs_64() -> tuple[Tensor, Tensor]:
    return torch.randn(4, HIDDEN, dtype=F64), torch.randn(4, 5, dtype=F64)


def by_differences(f: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    """The central difference along a direction; error of the order of step**2."""
    step = 1e-5
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


# The central difference is exact to about 1e-10 (step squared) and 1e-11 (rounding over step),
# times third derivatives of the order of 10 here.
DIFFERENCES = {"rtol": 1e-6, "atol": 1e-7}


@pytest.mark.parametrize("by", ["jvp", "jacfwd", "jacrev", "grad", "dual numbers"])
def test_first_derivatives_by_every_transform(by: str) -> None:
    layer, (x, logits), direction = layer_64(), inputs_64(), torch.randn(4, HIDDEN, dtype=F64)

    def f(x: Tensor) -> Tensor:
        return layer(x, logits).square().sum()

    expected = by_differences(f, x, direction)
    if by == "jvp":
        actual = torch.func.jvp(f, (x,), (direction,))[1]
    elif by == "dual numbers":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            actual = torch.autograd.forward_ad.unpack_dual(f(dual)).tangent
    else:
        actual = (getattr(torch.func, by)(f)(x) * direction).sum()
    torch.testing.assert_close(actual, expected, **DIFFERENCES)
    assert actual.abs() > 1e-3


def test_forward_mode_through_the_logits() -> None:
    layer, (x, logits), direction = layer_64(), inputs_64(), torch.randn(4, 5, dtype=F64)
    actual = torch.func.jvp(lambda logits: layer(x, logits), (logits,), (direction,))[1]
    expected = by_differences(lambda logits: layer(x, logits), logits, direction)
    torch.testing.assert_close(actual, expected, **DIFFERENCES)
    assert actual.abs().max() > 1e-3


def test_second_derivatives() -> None:
    layer, (x, logits) = layer_64().requires_grad_(), inputs_64()
    weight = layer.routed_experts.w13_weight

    def f(x: Tensor, weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"routed_experts.w13_weight": weight}, (x, logits))

    arguments = (x.requires_grad_(), weight.detach().clone().requires_grad_())
    assert torch.autograd.gradgradcheck(f, arguments)


@pytest.mark.parametrize("transform", ["jvp", "grad"])
def test_a_transform_inside_a_graph_raises_while_it_is_built(transform: str) -> None:
    layer, (x, logits) = layer_64(), inputs_64()

    def jvp(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: layer(x, logits), (x,), (torch.ones_like(x),))[1]

    def grad(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: layer(x, logits).sum())(x)

    compiled = torch.compile({"jvp": jvp, "grad": grad}[transform], fullgraph=True)
    with pytest.raises(Exception, match=r"forward-mode derivatives|functorch transforms"):
        compiled(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tensor_that_a_custom_function_closes_over_gets_its_gradient(compiled: bool) -> None:
    temperature = nn.Parameter(torch.tensor(0.7, dtype=F64))

    def function(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        return (logits / temperature).softmax(-1).topk(top_k)

    config = config_of(params_dtype=F64)
    layer = layer_of(config, router=cmoe.CustomRouter(config, function))
    x, logits = inputs_64()
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    run(x, logits).square().sum().backward()
    start = temperature.detach().clone()
    with torch.no_grad():
        losses = []
        for step in (1e-6, -1e-6):
            temperature.copy_(start + step)
            losses.append(layer(x, logits).square().sum())
    torch.testing.assert_close(temperature.grad, (losses[0] - losses[1]) / 2e-6, **DIFFERENCES)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("where", ["a hook", "shared experts"])
def test_a_tensor_that_only_foreign_code_knows_gets_its_gradient(
    where: str, compiled: bool
) -> None:
    """A low-rank adapter in a hook, say; another trainable term hides that the gradient is lost."""
    adapter = torch.randn(HIDDEN, HIDDEN, dtype=F64, requires_grad=True)

    class Closing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ adapter

    layer = layer_64(shared_experts=Closing() if where == "shared experts" else None)
    if where == "a hook":
        layer.routed_experts.register_forward_hook(lambda m, a, y: y + a[0] @ adapter)
    x, logits = inputs_64()
    other = torch.ones(3, dtype=F64, requires_grad=True)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    (run(x, logits).sum() + other.sum()).backward()
    expected = x.sum(0)[:, None].expand(HIDDEN, HIDDEN)
    torch.testing.assert_close(adapter.grad, expected)


class Dropping(nn.Module):
    """Shared experts that draw at each call."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("what", ["dropout", "simulated routing"])
def test_two_calls_of_a_layer_that_draws_are_two_draws(what: str, backend: str) -> None:
    """In a graph that trains something else, the partitioner looks for calls to merge."""
    config = config_of(num_experts=61)
    simulated = cmoe.SimulatedRouter(config)
    layer = (
        layer_of(shared_experts=Dropping())
        if what == "dropout"
        else layer_of(config, router=simulated)
    )
    scale = nn.Parameter(torch.ones(()))
    arguments = (torch.randn(7, HIDDEN),) + ((torch.randn(7, 5),) if what == "dropout" else ())

    def run() -> tuple[Tensor, Tensor]:
        return layer(*arguments) * scale, layer(*arguments) * scale

    first, second = torch.compile(run, fullgraph=True, backend=backend)()
    assert not torch.equal(first, second)
    assert first.requires_grad


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("of_input", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_weights", [torch.float32, torch.bfloat16])
def test_autocast_reaches_the_whole_block(
    of_weights: torch.dtype, of_input: torch.dtype, compiled: bool
) -> None:
    """Shared experts round as autocast says; routed ones compute in the dtype of their weights."""
    layer = layer_of(
        config_of(params_dtype=of_weights), shared_experts=nn.Linear(HIDDEN, HIDDEN, bias=False)
    )
    layer.shared_experts.to(of_weights)
    x, logits = torch.randn(6, HIDDEN).to(of_input), torch.randn(6, 5)
    run = torch.compile(layer, fullgraph=True) if compiled else layer
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = run(x, logits)
        shared = layer.shared_experts.mlp(x)
    assert shared.dtype == torch.bfloat16
    assert y.dtype == of_input
    layer.shared_experts = None
    with torch.no_grad():
        routed = layer(x.to(of_weights), logits)
    expected = (routed + shared.to(of_weights)).to(of_input)
    if compiled:
        # Inductor may leave out a rounding of either term of the sum.
        rounding = torch.finfo(torch.bfloat16).eps * float(shared.abs().max() + routed.abs().max())
        torch.testing.assert_close(y, expected, rtol=0, atol=rounding)
    else:
        assert torch.equal(y, expected)
