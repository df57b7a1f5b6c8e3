"""A compiled layer reads the tensors that its graph gives it, wherever these come from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

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


class Counting(nn.Module):
    """Shared experts that write a buffer at each call, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return x * self.count


def write_between(layer: Any, written: Tensor, x: Tensor, logits: Tensor) -> Tensor:
    before, first = written * 1, layer(x, logits)
    written.mul_(2)
    return first + layer(x, logits) + before


@BACKENDS
def test_shared_experts_that_write_a_buffer(backend: str) -> None:
    results = []
    x, logits = x_of(3), logits_of(3)
    layer = layer_of(shared_experts=Counting())
    compiled = torch.compile(write_between, fullgraph=True, backend=backend)
    for run in (write_between, compiled):
        count = layer.shared_experts.mlp.count.zero_()
        outputs = [run(layer, count, x, logits) for _ in range(3)]
        results.append((*outputs, count.clone()))
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected)


@BACKENDS
def test_batch_norm_in_training(backend: str) -> None:
    x, logits = x_of(6), logits_of(6)
    states = []
    for compiled in (False, True):
        layer = layer_of(
            prefix=f"norm{compiled}", shared_experts=nn.BatchNorm1d(HIDDEN, affine=False)
        )
        mean = layer.shared_experts.mlp.running_mean

        def run(x: Tensor, layer: Any = layer, mean: Tensor = mean) -> Tensor:
            mean.add_(1)
            return layer(x, logits)

        call = torch.compile(run, fullgraph=True, backend=backend) if compiled else run
        for _ in range(3):
            call(x)
        states.append(mean.clone())
    torch.testing.assert_close(states[1], states[0])


@BACKENDS
def test_a_table_that_a_custom_function_reads(backend: str) -> None:
    table, config = torch.randn(5), config_of()

    def function(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
        return (logits + table).softmax(-1).topk(top_k)

    layer = layer_of(config, router=cmoe.CustomRouter(config, function))
    x, logits, start = x_of(3), logits_of(3), table.clone()
    expected = write_between(layer, table[:1], x, logits)
    table.copy_(start)
    compiled = torch.compile(write_between, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(layer, table[:1], x, logits), expected)


def test_a_router_is_closed_only_where_its_own_forward_says_so() -> None:
    class Derived(cmoe.TopKRouter):
        pass

    class Overriding(cmoe.TopKRouter):
        def forward(self, inputs: Any) -> Any:
            return super().forward(inputs)

    class Vouching(Overriding):
        is_closed = True

    closed = [router.is_closed for router in (cmoe.TopKRouter, Derived, Overriding, Vouching)]
    assert closed == [True, True, False, True]
    assert not cmoe.CustomRouter.is_closed
    assert not cmoe.FusedMoERouter.is_closed


def test_a_module_with_a_forward_of_its_own_is_right_or_refused() -> None:
    """Offloading wraps the bound forward, which would go on with the module's own tensors."""
    layer, x, logits = layer_of(), x_of(3), logits_of(3)
    weight = layer.routed_experts.w13_weight
    start = weight.clone()
    expected = write_around(layer, weight, x, logits)
    weight.copy_(start)
    wrapped = layer.routed_experts.forward
    layer.routed_experts.forward = lambda *arguments: wrapped(*arguments)
    compiled = torch.compile(write_around, fullgraph=True, backend="aot_eager")
    try:
        y = compiled(layer, weight, x, logits)
    except RuntimeError as error:
        if "RoutedExperts has a forward of its own" not in str(error):
            raise
    else:
        torch.testing.assert_close(y, expected)


def test_a_twin_of_a_module_with_a_forward_of_its_own_is_refused() -> None:
    module = nn.Linear(3, 3)
    module.forward = lambda x: x
    assert with_tensors(module, tensors_of(module)) is module
    with pytest.raises(RuntimeError, match="a Linear has a forward of its own"):
        with_tensors(module, [tensor.clone() for tensor in tensors_of(module)])


def test_a_graph_traced_by_make_fx_takes_the_given_tensors() -> None:
    layer, x, logits = layer_with_all(), x_of(3), logits_of(3)
    names = {name: tensor.detach() for name, tensor in layer.named_parameters()}

    def run(parameters: dict[str, Tensor], x: Tensor, logits: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x, logits))

    graph = make_fx(run)(names, x, logits)
    doubled = {name: 2 * tensor for name, tensor in names.items()}
    torch.testing.assert_close(graph(doubled, x, logits), run(doubled, x, logits))


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
