"""Layers inside CUDA graphs: captured by hand, by torch.compile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.cudagraph_trees import get_manager

import cmoe
from cmoe.overlap import on_second_stream
from tests.layers import HIDDEN, NUM_EXPERTS, config_of, fill, layer_of, logits_of, x_of

pytestmark = pytest.mark.gpu

NAN = float("nan")


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """A call that needs gradients is traced through; these are about the op."""
    with torch.no_grad():
        yield


def layer_on_gpu(number: int = 0) -> cmoe.MoERunner:
    config = config_of(params_dtype=torch.bfloat16)
    return layer_of(config, prefix=f"model.layers.{number}.mlp").cuda()


def layer_with_everything(number: int = 0) -> cmoe.MoERunner:
    config = config_of(
        params_dtype=torch.bfloat16,
        has_bias=True,
        router=cmoe.RouterConfig(scoring_func="sigmoid", e_score_correction_bias=True),
    )
    shared = cmoe.SharedExperts(nn.Linear(HIDDEN, HIDDEN), overlap=on_second_stream)
    layer = layer_of(config, prefix=f"model.layers.{number}.mlp", shared_experts=shared)
    layer.shared_experts.to(torch.bfloat16)
    return layer.cuda()


LAYERS = pytest.mark.parametrize("make", [layer_on_gpu, layer_with_everything])


def inputs(num_tokens: int) -> tuple[Tensor, Tensor]:
    return x_of(num_tokens, dtype=torch.bfloat16).cuda(), logits_of(num_tokens).cuda()


def warm_up(layer: nn.Module, num_tokens: int) -> None:
    """One call on a stream of its own, as capture asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        layer(*inputs(num_tokens))
    torch.cuda.current_stream().wait_stream(stream)


class Captured:
    """One call of a layer in a graph."""

    def __init__(self, layer: nn.Module, num_tokens: int) -> None:
        self.inputs = inputs(num_tokens)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = layer(*self.inputs)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        for held, given in zip(self.inputs, (x, logits), strict=True):
            held.copy_(given)
        self.graph.replay()
        return self.y.clone()


# --- by hand --------------------------------------------------------------------------------------


@LAYERS
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 8, 64, 300])
def test_a_replay_follows_other_routings(make, num_tokens: int) -> None:
    layer = make()
    warm_up(layer, num_tokens)
    captured = Captured(layer, num_tokens)
    for _ in range(5):
        given = inputs(num_tokens)
        assert torch.equal(captured(*given), layer(*given))


@LAYERS
@pytest.mark.parametrize("num_tokens", [8, 64])
def test_dead_rows_of_nan_leave_the_others_alone(make, num_tokens: int) -> None:
    """An engine pads a batch to the captured size; what lies there is anything."""
    layer = make()
    warm_up(layer, num_tokens)
    captured = Captured(layer, num_tokens)
    for num_live in (0, 1, 5, num_tokens - 1):
        x, logits = inputs(num_tokens)
        expected = layer(x, logits)[:num_live]
        for value in (NAN, float("inf"), -float("inf")):
            x[num_live:], logits[num_live:] = value, value
            assert torch.equal(captured(x, logits)[:num_live], expected)


@LAYERS
def test_a_number_of_tokens_never_seen_can_be_captured(make) -> None:
    """Kernels that another size did not need are compiled, loaded while the graph is captured."""
    layer = make()
    warm_up(layer, 8)
    for num_tokens in (5, 1, 16, 33, 100, 2):
        captured = Captured(layer, num_tokens)
        given = inputs(num_tokens)
        assert torch.equal(captured(*given), layer(*given))


def test_graphs_of_two_layers_are_replayed_in_any_order() -> None:
    layers = [layer_on_gpu(number) for number in range(2)]
    for layer in layers:
        warm_up(layer, 7)
    captured = [Captured(layer, 7) for layer in layers]
    for number in (0, 1, 1, 0, 0, 1):
        given = inputs(7)
        assert torch.equal(captured[number](*given), layers[number](*given))


def test_weights_loaded_later_are_those_of_the_next_replay() -> None:
    layer = layer_on_gpu()
    warm_up(layer, 7)
    captured, given = Captured(layer, 7), inputs(7)
    before = captured(*given)
    fill(layer)
    assert torch.equal(captured(*given), layer(*given))
    assert not torch.equal(captured(*given), before)


# --- by torch.compile -----------------------------------------------------------------------------


def recorded() -> int:
    """Graphs that Inductor recorded so far in this process."""
    manager = get_manager(torch.cuda.current_device())
    return manager.new_graph_id().id


def compiled(layer: nn.Module) -> nn.Module:
    return torch.compile(layer, fullgraph=True, mode="reduce-overhead")


@LAYERS
def test_reduce_overhead_skips_no_graph(make) -> None:
    layer, before = make(), recorded()
    run = compiled(layer)
    for num_tokens in (8, 3, 64, 8, 3, 1):
        for _ in range(3):
            given = inputs(num_tokens)
            torch.testing.assert_close(run(*given), layer(*given))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert recorded() - before > 3


def test_layers_that_share_a_graph_never_share_pointers() -> None:
    """One compiled graph serves all layers: a recording of one must not be replayed for another."""
    layers = [layer_on_gpu(number) for number in range(4)]
    runs = [compiled(layer) for layer in layers]
    order = [number for number in range(4) for _ in range(5)]
    for seed in range(3):
        for number in order:
            given = inputs(7)
            assert torch.equal(runs[number](*given), layers[number](*given)), number
        random.Random(seed).shuffle(order)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0


class Model(nn.Module):
    """Residual layers, each with a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        config = config_of(params_dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            layer_of(
                config, f"model.layers.{number}.mlp", gate=cmoe.GateLinear(HIDDEN, NUM_EXPERTS)
            )
            for number in range(4)
        )
        self.to("cuda", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(nn.functional.rms_norm(x, (HIDDEN,)))
        return x


def test_a_whole_model_is_one_recording() -> None:
    model = Model()
    run, before = compiled(model), recorded()
    for _ in range(5):
        x, _ = inputs(7)
        # Inductor fuses the norms with what is around them, so a few roundings of bfloat16 differ;
        # an expert that a rounding swaps for another would differ by as much as the output.
        close = torch.isclose(run(x), model(x), rtol=0.05, atol=0.05)
        assert close.float().mean() > 0.95
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert 0 < recorded() - before <= 3
