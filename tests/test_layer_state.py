"""A compiled layer reads the tensors that its graph gives it, wherever these come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmoe
from cmoe.layer_state import tensors_of, with_tensors
from tests.layers import HIDDEN, config_of, layer_of, logits_of, x_of

BACKENDS = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """A call that needs gradients is traced through; these are about the op."""
    with torch.no_grad():
        yield


def layer_with_all() -> cmoe.MoERunner:
    config = config_of(
        has_bias=True,
        router=cmoe.RouterConfig(scoring_func="sigmoid", e_score_correction_bias=True),
    )
    return layer_of(config, shared_experts=nn.Linear(HIDDEN, HIDDEN))


WRITES = {
    "a weight": lambda layer: layer.routed_experts.w13_weight,
    "a bias": lambda layer: layer.routed_experts.w2_bias,
    "a buffer": lambda layer: layer.router.e_score_correction_bias,
    "the shared experts": lambda layer: layer.shared_experts.mlp.weight,
}


def write_before(layer: Any, written: Tensor, x: Tensor, logits: Tensor) -> Tensor:
    written.mul_(-2)
    return layer(x, logits)


def write_after(layer: Any, written: Tensor, x: Tensor, logits: Tensor) -> Tensor:
    y = layer(x, logits)
    written.mul_(-2)
    return y


def write_around(layer: Any, written: Tensor, x: Tensor, logits: Tensor) -> Tensor:
    written.mul_(-2)
    y = layer(x, logits)
    written.mul_(-0.5)
    return y + layer(x, logits)


@BACKENDS
@pytest.mark.parametrize("run", [write_before, write_after, write_around])
@pytest.mark.parametrize("what", WRITES)
def test_a_graph_that_writes_the_layers_tensors(
    run: Callable[..., Tensor], what: str, backend: str
) -> None:
    layer, x, logits = layer_with_all(), x_of(3), logits_of(3)
    written = WRITES[what](layer)
    start = written.clone()
    expected, end = run(layer, written, x, logits), written.clone()
    written.copy_(start)
    unwritten = layer(x, logits)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(layer, written, x, logits), expected)
    torch.testing.assert_close(written, end)
    if run is not write_after:
        assert not torch.allclose(expected, unwritten), "the write does not show in the output"


@BACKENDS
def test_functional_call_under_the_compiler(backend: str) -> None:
    layer, x, logits = layer_with_all(), x_of(3), logits_of(3)
    own = layer(x, logits)
    names = dict(layer.named_parameters())

    def run(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x, logits))

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for factor in (2.0, -0.5):
        given = {name: factor * parameter for name, parameter in names.items()}
        torch.testing.assert_close(compiled(given), run(given))
        assert not torch.allclose(compiled(given), own)
    torch.testing.assert_close(compiled(names), own)
    assert torch.equal(layer(x, logits), own)


def test_a_call_without_a_compiler_passes_no_state() -> None:
    identity = layer_with_all().op_identity()
    assert identity.state is None
    assert identity.call is None


def test_own_tensors_make_no_twin() -> None:
    layer = layer_with_all()
    own = tensors_of(layer)
    assert with_tensors(layer, own) is layer
    assert with_tensors(layer, [tensor.detach() for tensor in own]) is layer


def test_a_twin_has_the_given_tensors_and_leaves_the_layer_alone() -> None:
    layer = layer_with_all()
    own = tensors_of(layer)
    given = [tensor.clone() for tensor in own]
    twin = with_tensors(layer, given)
    assert twin is not layer
    assert type(twin) is type(layer)
    assert [id(tensor) for tensor in tensors_of(twin)] == [id(tensor) for tensor in given]
    assert [id(tensor) for tensor in tensors_of(layer)] == [id(tensor) for tensor in own]


def test_tied_tensors_stand_at_every_place() -> None:
    """A graph that writes one tied place writes all: the list keeps their number."""
    one = nn.Linear(3, 3, bias=False)
    tied = nn.Sequential(one, nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
    tied[1].weight = one.weight
    own = tensors_of(tied)
    assert len(own) == 2 + 5
    x = torch.randn(4, 3)
    twin = with_tensors(tied.eval(), [2 * tensor for tensor in own])
    expected = nn.functional.batch_norm(
        4 * x @ one.weight.t() @ one.weight.t(), 2 * own[4], 2 * own[5], 2 * own[2], 2 * own[3]
    )
    torch.testing.assert_close(twin(x), expected)


def test_another_number_of_tensors_is_an_error() -> None:
    layer = layer_with_all()
    with pytest.raises(RuntimeError, match="the graph was compiled for 1; compile it again"):
        with_tensors(layer, tensors_of(layer)[:1])
