"""One graph for all layers, right results from it, in every mode."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import cmoe
from tests.layers import HIDDEN, NUM_EXPERTS, config_of, fill, layer_of, logits_of, x_of

NUM_LAYERS = 12


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    """A call that needs gradients is traced through; these are about the op."""
    with torch.no_grad():
        yield


def plain(number: int) -> cmoe.MoERunner:
    return layer_of(prefix=f"model.layers.{number}.mlp", router=cmoe.GivenTopKRouter())


def with_logits(number: int) -> cmoe.MoERunner:
    return layer_of(prefix=f"model.layers.{number}.mlp")


def with_everything(number: int) -> cmoe.MoERunner:
    return layer_of(
        config_of(
            has_bias=True,
            quant=cmoe.QuantConfig(size_multiple=12),
            router=cmoe.RouterConfig(
                scoring_func="sigmoid",
                e_score_correction_bias=True,
                routed_scaling_factor=2.5,
                apply_routed_scale_to_output=True,
            ),
        ),
        prefix=f"model.layers.{number}.mlp",
        gate=cmoe.GateLinear(HIDDEN, NUM_EXPERTS),
        shared_experts=nn.Linear(HIDDEN, HIDDEN),
        shared_expert_gate=nn.Linear(HIDDEN, 1),
        input_transform=nn.Linear(HIDDEN, HIDDEN),
        output_transform=nn.Linear(HIDDEN, HIDDEN),
    )


MAKERS = pytest.mark.parametrize("make", [plain, with_logits, with_everything])


def inputs_of(layer: cmoe.MoERunner, *lead: int) -> dict[str, Tensor]:
    inputs = {"hidden_states": x_of(*lead)}
    if isinstance(layer.router, cmoe.GivenTopKRouter):
        inputs["topk_weights"] = torch.rand(*lead, 2)
        inputs["topk_ids"] = torch.rand(*lead, NUM_EXPERTS).topk(2).indices
    elif layer.gate is None:
        inputs["router_logits"] = logits_of(*lead)
    return inputs


def assert_same(actual: Tensor, expected: Tensor, layer: cmoe.MoERunner) -> None:
    """To the bit where nothing but the op computes; else Inductor may fuse, so a few roundings."""
    if layer.gate is None:
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected)


def inductor_compilations() -> int:
    """Graphs that Inductor compiled, or found compiled in its cache on disk."""
    seen = counters["inductor"]
    return seen["fxgraph_cache_miss"] + seen["fxgraph_cache_hit"] + seen["fxgraph_cache_bypass"]


@MAKERS
def test_twelve_blocks_share_one_graph(
    make: Callable[[int], cmoe.MoERunner], count_compiles: Callable[[], int]
) -> None:
    layers = [make(number) for number in range(NUM_LAYERS)]
    blocks = [torch.compile(layer, fullgraph=True) for layer in layers]
    order = list(range(NUM_LAYERS))
    for num_tokens, graphs in ((3, 1), (5, 2), (17, 2), (64, 2), (3, 2)):
        for number in order:
            inputs = inputs_of(layers[number], num_tokens)
            actual = blocks[number](**inputs)
            assert_same(actual, layers[number](**inputs), layers[number])
        assert (count_compiles(), inductor_compilations()) == (graphs, graphs)
        random.Random(num_tokens).shuffle(order)


class Model(nn.Module):
    """Residual layers that share their logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(with_logits(number) for number in range(NUM_LAYERS))

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(nn.functional.rms_norm(x, (HIDDEN,)), logits)
        return x


def test_a_whole_model_is_one_graph(count_compiles: Callable[[], int]) -> None:
    model = Model()
    compiled = torch.compile(model, fullgraph=True)
    x, logits = x_of(3), logits_of(3)
    torch.testing.assert_close(compiled(x, logits), model(x, logits))
    assert (count_compiles(), inductor_compilations()) == (1, 1)


@pytest.mark.parametrize(
    ("dynamic", "sizes"),
    [
        (None, (1, 2, 17, 64, 0)),
        (True, (1, 2, 17, 64, 0)),
        (True, (64, 17, 0, 2, 1)),
    ],
)
def test_every_number_of_tokens_takes_three_compilations(
    dynamic: bool | None, sizes: tuple[int, ...], count_compiles: Callable[[], int]
) -> None:
    layer = with_logits(0)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for _ in range(2):
        for num_tokens in sizes:
            inputs = inputs_of(layer, num_tokens)
            assert torch.equal(compiled(**inputs), layer(**inputs))
    assert count_compiles() <= 3


def test_two_models_at_once_do_not_collide(count_compiles: Callable[[], int]) -> None:
    models = []
    for _ in range(2):
        with cmoe.static_context():
            models.append(Model())
    x, logits = x_of(3), logits_of(3)
    compiled = [torch.compile(model, fullgraph=True) for model in models]
    for number in (0, 1, 1, 0):
        torch.testing.assert_close(compiled[number](x, logits), models[number](x, logits))
    assert count_compiles() == 1


def test_a_copy_runs_in_the_same_graph_with_its_own_weights(
    count_compiles: Callable[[], int],
) -> None:
    layer = with_logits(0)
    inputs = inputs_of(layer, 3)
    before = torch.compile(layer, fullgraph=True)(**inputs)
    twin = copy.deepcopy(layer)
    assert torch.equal(torch.compile(twin, fullgraph=True)(**inputs), before)
    fill(twin)
    after = torch.compile(twin, fullgraph=True)(**inputs)
    assert torch.equal(after, twin(**inputs))
    assert not torch.equal(after, before)
    assert torch.equal(torch.compile(layer, fullgraph=True)(**inputs), before)
    assert count_compiles() == 1


def test_new_weights_need_no_new_graph(count_compiles: Callable[[], int]) -> None:
    layer = with_logits(0)
    compiled = torch.compile(layer, fullgraph=True)
    inputs = inputs_of(layer, 3)
    for _ in range(3):
        fill(layer)
        assert torch.equal(compiled(**inputs), layer(**inputs))
    layer.load_state_dict({name: 2 * t for name, t in layer.state_dict().items()}, assign=True)
    assert torch.equal(compiled(**inputs), layer(**inputs))
    assert count_compiles() == 1


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode: str) -> None:
    layer = with_everything(0)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for _ in range(3):
        inputs = inputs_of(layer, 7)
        torch.testing.assert_close(compiled(**inputs), layer(**inputs))


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    program = """
import torch, cmoe
config = cmoe.MoEConfig(num_experts=5, top_k=2, hidden_size=16, intermediate_size=8)
layer = cmoe.FusedMoE(config, prefix="mlp")
x, logits = torch.randn(3, 16), torch.randn(3, 5)
y = torch.compile(layer, fullgraph=True)(x, logits)
print(torch.equal(y, layer(x, logits)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def twice(layer: cmoe.MoERunner, x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    return layer(x, logits), layer(x, logits), layer(x * 2, logits), x


def with_a_view(layer: cmoe.MoERunner, x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    stacked = torch.stack([x, x + 1])
    return layer(stacked[1], logits), stacked, layer(stacked.transpose(0, 1)[:, 0], logits)


def after_a_mutation(layer: cmoe.MoERunner, x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    own = x.clone()
    first = layer(own, logits)
    own.mul_(2)
    second = layer(own, logits)
    first.add_(1)
    return first, second, own


@torch.compiler.nested_compile_region
def region(layer: cmoe.MoERunner, x: Tensor, logits: Tensor) -> Tensor:
    return layer(x, logits)


def in_a_nested_region(layer: cmoe.MoERunner, x: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
    return region(layer, x, logits), region(layer, x * 2, logits)


@pytest.mark.parametrize("run", [twice, with_a_view, after_a_mutation, in_a_nested_region])
@pytest.mark.parametrize("shared", [False, True])
def test_outputs_of_one_graph_are_apart(run: Callable[..., Any], shared: bool) -> None:
    layer = layer_of(
        shared_experts=nn.Identity() if shared else None, output_transform=nn.Identity()
    )
    x, logits = x_of(3), logits_of(3)
    expected = run(layer, x.clone(), logits)
    actual = torch.compile(run, fullgraph=True)(layer, x, logits)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)
    storages = {tensor.untyped_storage().data_ptr() for tensor in actual if tensor is not x}
    assert len(storages) == len([tensor for tensor in actual if tensor is not x])


def test_frozen_graphs_are_right_or_refuse() -> None:
    """Freezing may copy the token into the graph as a constant; torch 2.11 leaves it an input."""
    layer = with_logits(0).eval()
    inputs = inputs_of(layer, 3)
    with torch._inductor.config.patch(freezing=True):
        compiled = torch.compile(layer)
        for _ in range(2):
            fill(layer)
            try:
                y = compiled(**inputs)
            except RuntimeError as error:
                if "graph freezing" not in str(error):
                    raise
            else:
                assert torch.equal(y, layer(**inputs))


def test_layers_that_need_gradients_share_one_graph_too(count_compiles: Callable[[], int]) -> None:
    layers = [with_everything(number).requires_grad_() for number in range(4)]
    with torch.enable_grad():
        for layer in layers:
            inputs = inputs_of(layer, 3)
            compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(**inputs), layer(**inputs))
    assert count_compiles() == 1
