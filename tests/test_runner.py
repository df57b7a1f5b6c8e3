"""The whole block: what it computes, in every way to call it, what it refuses."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cmoe
from cmoe.distributed.dispatch import LocalDispatcher
from cmoe.quant.unquantized import Unquantized
from tests.layers import (
    HIDDEN,
    INTERMEDIATE,
    NUM_EXPERTS,
    assert_exact,
    config_of,
    fill,
    layer_of,
    logical_weights,
    logits_of,
    through_torch_save,
    x_of,
)

SIGMOID = cmoe.RouterConfig(scoring_func="sigmoid", e_score_correction_bias=True)
ON_WEIGHTS = cmoe.RouterConfig(routed_scaling_factor=2.5)
ON_OUTPUT = cmoe.RouterConfig(routed_scaling_factor=2.5, apply_routed_scale_to_output=True)
ON_INPUT = cmoe.RouterConfig(apply_router_weight_on_input=True)
PADDED = cmoe.QuantConfig(size_multiple=12)


def shared() -> nn.Module:
    """No module of the layer asks for gradients here, so that a call goes through the op."""
    mlp = nn.Sequential(nn.Linear(HIDDEN, 6), nn.SiLU(), nn.Linear(6, HIDDEN))
    return mlp.requires_grad_(False)


def linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs).requires_grad_(False)


# Each: the config's fields, the parts of the layer.
LAYERS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "plain": lambda: ({}, {}),
    "biases": lambda: ({"has_bias": True}, {}),
    "swigluoai": lambda: ({"has_bias": True, "activation": "swigluoai"}, {}),
    "not gated": lambda: ({"activation": "relu2_no_mul", "has_bias": True}, {}),
    "sigmoid": lambda: ({"router": SIGMOID}, {}),
    "scale on weights": lambda: ({"router": ON_WEIGHTS}, {}),
    "scale on output": lambda: ({"router": ON_OUTPUT}, {}),
    "scale on output, shared": lambda: ({"router": ON_OUTPUT}, {"shared_experts": shared()}),
    "scale on weights, shared": lambda: ({"router": ON_WEIGHTS}, {"shared_experts": shared()}),
    "weight on input": lambda: ({"router": ON_INPUT, "top_k": 1}, {"shared_experts": shared()}),
    "shared": lambda: ({}, {"shared_experts": shared()}),
    "shared, gated": lambda: (
        {},
        {"shared_experts": shared(), "shared_expert_gate": linear(HIDDEN, 1)},
    ),
    "latent": lambda: (
        {"hidden_size": 12, "router": ON_OUTPUT},
        {
            "input_transform": linear(HIDDEN, 12),
            "output_transform": nn.Sequential(nn.RMSNorm(12), nn.Linear(12, HIDDEN)).requires_grad_(
                False
            ),
            "shared_experts": shared(),
        },
    ),
    "latent, padded": lambda: (
        {"hidden_size": 10, "quant": PADDED, "has_bias": True},
        {
            "input_transform": linear(HIDDEN, 10),
            "output_transform": linear(10, HIDDEN),
            "shared_experts": shared(),
        },
    ),
    "padded": lambda: ({"quant": PADDED, "has_bias": True}, {}),
    "padded, not gated": lambda: ({"quant": PADDED, "activation": "silu_no_mul"}, {}),
}


def layer_named(
    name: str, prefix: str = "mlp", *, backend: str = "auto", **parts: Any
) -> cmoe.MoERunner:
    changes, own_parts = LAYERS[name]()
    return layer_of(config_of(backend=backend, **changes), prefix, **own_parts, **parts)


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("name", LAYERS)
def test_the_block_is_the_block(name: str, num_tokens: int) -> None:
    layer = layer_named(name)
    x, logits = x_of(num_tokens), logits_of(num_tokens)
    assert_exact(layer, layer(x, logits), x, logits)


@pytest.mark.parametrize("name", ["plain", "shared, gated", "scale on output, shared"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_block_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    layer = layer_named(name).to(dtype)
    x, logits = x_of(7, dtype=dtype), logits_of(7).to(dtype)
    assert_exact(layer, layer(x, logits), x, logits)


@pytest.mark.parametrize("name", LAYERS)
def test_transparent_is_the_op_to_the_bit(name: str) -> None:
    layer = layer_named(name)
    for num_tokens in (0, 1, 7):
        x, logits = x_of(num_tokens), logits_of(num_tokens)
        layer.transparent = False
        through_op = layer(x, logits)
        layer.transparent = True
        assert torch.equal(layer(x, logits), through_op)


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the ops of this library that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace.startswith("cmoe"):
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "backend", "op"),
    [
        ("plain", "auto", "cmoe_cpu.fused_moe"),
        ("plain", "reference", "cmoe.moe_forward"),
        ("shared", "auto", "cmoe.moe_forward_shared"),
    ],
)
def test_a_call_is_one_op(name: str, backend: str, op: str) -> None:
    layer = layer_named(name, backend=backend)
    with Seen() as seen:
        layer(x_of(3), logits_of(3))
    assert seen.names == [f"{op}.default"]
    layer.transparent = True
    with Seen() as seen:
        layer(x_of(3), logits_of(3))
    kernels = [name for name in seen.names if "fused_experts" in name or "fused_moe" in name]
    assert len(kernels) == 1
    assert "moe_forward" not in "".join(seen.names)


@pytest.mark.parametrize("name", ["plain", "biases", "sigmoid", "padded", "weight on input"])
def test_one_kernel_is_the_layer_op_to_the_bit(name: str) -> None:
    changes, _ = LAYERS[name]()
    layer = layer_of(config_of(**changes))
    x, logits = x_of(7, width=layer.config.padded_hidden_size()), logits_of(7)
    x[:, HIDDEN:] = 0
    routed = torch.ops.cmoe.moe_forward(x, logits, None, None, None, layer.layer_token)
    with Seen() as seen:
        y = layer(x[:, :HIDDEN], logits)
    assert seen.names == ["cmoe_cpu.fused_moe.default"]
    assert torch.equal(y, routed[:, :HIDDEN])


def double(*arguments: Any) -> Any:
    return 2 * arguments[-1]


class DoublingRouter(cmoe.TopKRouter):
    """Its weights are twice those of the formula."""

    def forward(self, inputs: Any) -> Any:
        return super().forward(inputs).scaled(2.0)


class DoublingExperts(cmoe.RoutedExperts):
    """Their sum is twice that of the kernels."""

    def forward(self, x: Tensor, routing: Any) -> Tensor:
        return 2 * super().forward(x, routing)


class DoublingFormat(Unquantized):
    """Its products are twice those of the weights."""

    def apply(self, *arguments: Any) -> Tensor:
        return 2 * super().apply(*arguments)


class DoublingDispatcher(LocalDispatcher):
    """It brings twice the sum back."""

    def combine(self, y: Tensor) -> Tensor:
        return 2 * y


def with_own_forward(layer: cmoe.MoERunner) -> None:
    forward = layer.routed_experts.forward
    layer.routed_experts.forward = lambda *arguments: 2 * forward(*arguments)


def with_router(layer: cmoe.MoERunner) -> None:
    layer.router = DoublingRouter(layer.config)
    layer.router.use_kernels(layer.routed_experts.kernels)


def with_experts(layer: cmoe.MoERunner) -> None:
    experts = DoublingExperts(layer.config)
    experts.load_state_dict(layer.routed_experts.state_dict())
    layer.routed_experts = experts


DOUBLED: dict[str, Callable[[cmoe.MoERunner], object]] = {
    "a hook of the experts": lambda layer: layer.routed_experts.register_forward_hook(double),
    "a hook of the router": lambda layer: layer.router.register_forward_hook(
        lambda module, inputs, routing: routing.scaled(2.0)
    ),
    "a forward of the module's own": with_own_forward,
    "a router of another class": with_router,
    "experts of another class": with_experts,
    "another format": lambda layer: setattr(layer.routed_experts, "quant_method", DoublingFormat()),
    "another dispatcher": lambda layer: setattr(layer, "dispatcher", DoublingDispatcher()),
}


# `torch.compile` takes the hooks of any module as they are at the compile.
CHANGES = [
    (what, compiled)
    for what in DOUBLED
    for compiled in ("never", "after", "before")
    if not ("a hook" in what and compiled == "before")
]


@pytest.mark.parametrize(("what", "compiled"), CHANGES)
def test_what_is_changed_from_outside_takes_part(what: str, compiled: str) -> None:
    """One kernel computes a layer of the library's own parts alone, as these are at the call."""
    layer = layer_named("plain")
    x, logits = x_of(3), logits_of(3)
    run = layer if compiled == "never" else torch.compile(layer, backend="aot_eager")
    with torch.no_grad():
        plain = layer(x, logits)
        if compiled == "before":
            assert torch.equal(run(x, logits), plain)
        DOUBLED[what](layer)
        assert torch.equal(run(x, logits), 2 * plain)


@pytest.mark.parametrize("name", ["plain", "latent, padded"])
def test_compiled_transparent_layers_are_the_op_to_the_bit(name: str) -> None:
    """`aot_eager` runs the traced operators as they are; Inductor's fusions round differently."""
    layer = layer_named(name)
    x, logits = x_of(7), logits_of(7)
    expected = layer(x, logits)
    layer.transparent = True
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, logits), expected)


@pytest.mark.parametrize("transparent", [False, True])
def test_a_layer_can_be_exported(transparent: bool) -> None:
    gate = cmoe.GateLinear(HIDDEN, NUM_EXPERTS).requires_grad_(False)
    layer = layer_named("latent, padded", gate=gate, transparent=transparent)
    num_tokens = torch.export.Dim("num_tokens", min=2, max=64)
    program = torch.export.export(layer, (x_of(3),), dynamic_shapes=({0: num_tokens},))
    targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert any("fused_experts" in target for target in targets)
    assert not any("moe_forward" in target for target in targets)
    with torch.no_grad():
        for number in (2, 3, 17):
            x = x_of(number)
            assert torch.equal(program.module()(x), layer(x))


def dense(layer: cmoe.MoERunner, x: Tensor, logits: Tensor) -> Tensor:
    """The block of a softmax router with biases, each expert over every token."""
    weights, ids = logits.softmax(-1).topk(layer.config.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    experts, y = layer.routed_experts, torch.zeros_like(x)
    for expert in range(layer.config.num_experts):
        weight = torch.where(ids == expert, weights, 0).sum(-1, keepdim=True)
        h = F.linear(x, experts.w13_weight[expert], experts.w13_bias[expert])
        gate, up = h.chunk(2, -1)
        out = F.linear(F.silu(gate) * up, experts.w2_weight[expert], experts.w2_bias[expert])
        y = y + weight * out
    return y + layer.shared_experts(x)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("of_weights", [False, True])
def test_gradients_are_those_of_a_dense_loop(of_weights: bool, compiled: bool) -> None:
    layer = layer_of(config_of(has_bias=True), shared_experts=nn.Linear(HIDDEN, HIDDEN)).double()
    layer.requires_grad_(of_weights)
    x = x_of(7).double().requires_grad_()
    # The last expert gets nothing: its gradient must be zero.
    logits = (logits_of(7).double() - torch.tensor([0, 0, 0, 0, 50.0])).requires_grad_()
    wanted = [x, logits, *(layer.parameters() if of_weights else ())]
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    seed = x_of(7).double()
    expected = torch.autograd.grad((dense(layer, x, logits) * seed).sum(), wanted)
    actual = torch.autograd.grad((run(x, logits) * seed).sum(), wanted)
    torch.testing.assert_close(actual, expected)


def test_no_gradient_is_recorded_where_none_is_asked_for() -> None:
    layer = layer_named("shared")
    assert not layer(x_of(3), logits_of(3)).requires_grad
    layer.requires_grad_()
    assert layer(x_of(3), logits_of(3)).requires_grad
    with torch.no_grad(), Seen() as seen:
        assert not layer(x_of(3), logits_of(3)).requires_grad
    assert seen.names == ["cmoe.moe_forward_shared.default"]


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lead", [(2, 3), (2, 0), (0, 3), (2, 3, 4), (1, 1), (2, 3, 4, 5)])
@pytest.mark.parametrize("name", ["plain", "latent, padded"])
def test_any_leading_dimensions(name: str, lead: tuple[int, ...]) -> None:
    layer = layer_named(name)
    x, logits = x_of(*lead), logits_of(*lead)
    y = layer(x, logits)
    assert y.shape == x.shape
    assert y.is_contiguous()
    flat = layer(x.view(-1, HIDDEN), logits.view(-1, NUM_EXPERTS))
    assert torch.equal(y.view(-1, HIDDEN), flat)


STRIDED = {
    "transposed tokens": lambda: x_of(4, 3).transpose(0, 1),
    "transposed hidden": lambda: x_of(3, HIDDEN, width=4).transpose(1, 2),
    "sliced": lambda: x_of(3, 8, width=HIDDEN + 4)[:, ::2, 1 : HIDDEN + 1],
    "expanded": lambda: x_of(1, 1).expand(3, 4, HIDDEN),
}


@pytest.mark.parametrize("name", ["plain", "shared", "latent, padded"])
@pytest.mark.parametrize("strided", STRIDED)
def test_non_contiguous_inputs(name: str, strided: str) -> None:
    layer = layer_named(name)
    x = STRIDED[strided]()
    assert not x.is_contiguous()
    logits = logits_of(4, 3).transpose(0, 1)
    y = layer(x, logits)
    assert y.is_contiguous()
    torch.testing.assert_close(y, layer(x.contiguous(), logits.contiguous()))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("transparent", [False, True])
def test_inputs_stay_as_they_are(name: str, transparent: bool) -> None:
    layer = layer_named(name, transparent=transparent)
    x, logits = x_of(3), logits_of(3)
    before = x.clone(), logits.clone()
    y = layer(x, logits)
    assert torch.equal(x, before[0])
    assert torch.equal(logits, before[1])
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("compiled", [False, True])
def test_shared_experts_read_the_original_input(compiled: bool) -> None:
    """Not the transformed one, and not what the routed experts left of it: R(x) + S(x)."""
    layer = layer_of(
        shared_experts=nn.Identity(), input_transform=linear(HIDDEN, HIDDEN), prefix="both"
    )
    routed = layer_of(input_transform=layer.input_transform, prefix="routed")
    routed.load_state_dict(layer.state_dict(), strict=False)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    x, logits = x_of(7), logits_of(7)
    assert torch.equal(run(x, logits), routed(x, logits) + x)


def test_padded_sizes_are_the_unpadded_layer() -> None:
    plain = layer_of(config_of(has_bias=True), "plain")
    padded = layer_of(config_of(has_bias=True, quant=PADDED), "padded")
    assert padded.routed_experts.w13_weight.shape == (NUM_EXPERTS, 24, 24)
    assert padded.routed_experts.w2_weight.shape == (NUM_EXPERTS, 24, 12)
    experts = plain.routed_experts
    padded.load_weights(
        {
            f"experts.{e}.{name}": tensor
            for e in range(NUM_EXPERTS)
            for name, tensor in {
                "gate_up_proj.weight": experts.w13_weight[e],
                "gate_up_proj.bias": experts.w13_bias[e],
                "down_proj.weight": experts.w2_weight[e],
                "down_proj.bias": experts.w2_bias[e],
            }.items()
        }
    )
    x, logits = x_of(7), logits_of(7)
    torch.testing.assert_close(padded(x, logits), plain(x, logits))


def test_a_gate_of_its_own_reads_the_original_input() -> None:
    gate = cmoe.GateLinear(HIDDEN, NUM_EXPERTS).requires_grad_(False)
    parts = {"input_transform": linear(HIDDEN, HIDDEN)}
    layer = layer_of(config_of(quant=PADDED), gate=gate, **parts)
    x = x_of(7)
    given = layer_of(config_of(quant=PADDED), "given", **parts)
    given.load_state_dict(layer.state_dict(), strict=False)
    assert torch.equal(layer(x), given(x, gate(x)))


# --- the range of float16 -------------------------------------------------------------------------


def constant_layer(scale: float, value: float, **parts: Any) -> cmoe.MoERunner:
    """A float16 layer whose experts all give `value` everywhere, scaled on the output."""
    router = cmoe.RouterConfig(routed_scaling_factor=scale, apply_routed_scale_to_output=True)
    config = config_of(has_bias=True, router=router, params_dtype=torch.float16)
    layer = layer_of(config, **parts)
    with torch.no_grad():
        layer.routed_experts.w2_weight.zero_()
        layer.routed_experts.w2_bias.fill_(value)
    return layer


class Constant(nn.Module):
    """Shared experts that give one number."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, self.value)


LARGEST = torch.finfo(torch.float16).max


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("scale", "value", "shared_value", "expected"),
    [
        (16.0, 8000.0, None, LARGEST),
        (16.0, -8000.0, None, -LARGEST),
        (16.0, 8000.0, 0.0, LARGEST),
        (16.0, 5000.0, -30000.0, 50000.0),  # 80000 alone would not fit
        (2.0, 3.0, 0.5, 6.5),
        (1.0, 60000.0, 60000.0, LARGEST),
    ],
)
def test_float16_saturates_only_at_the_end(
    scale: float, value: float, shared_value: float | None, expected: float, compiled: bool
) -> None:
    shared_experts = None if shared_value is None else Constant(shared_value)
    layer = constant_layer(scale, value, shared_experts=shared_experts)
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    y = run(x_of(3, dtype=torch.float16), logits_of(3))
    assert y.dtype == torch.float16
    assert (y == expected).all()


def test_float16_saturates_ahead_of_an_output_transform() -> None:
    layer = constant_layer(16.0, 8000.0, output_transform=nn.Identity())
    assert (layer(x_of(3, dtype=torch.float16), logits_of(3)) == LARGEST).all()


# --- errors ---------------------------------------------------------------------------------------


class Untouched(nn.Module):
    """Fails the test when any work is done."""

    def forward(self, x: Tensor) -> Tensor:
        pytest.fail("the layer worked before it judged its input")


def idle_layer(**parts: Any) -> cmoe.MoERunner:
    return layer_of(shared_experts=Untouched(), **parts)


INT = torch.ones(3, HIDDEN, dtype=torch.int64)

FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"x": x_of(3, width=15)}, r"\(3, 15\) must end in hidden_size \(16\)"),
    "dtype": ({"x": x_of(3).bfloat16()}, "dtype torch.bfloat16, the weights torch.float32"),
    "integers": ({"x": INT}, "dtype torch.int64, the weights torch.float32"),
    "one dimension": ({"x": x_of()}, r"must be \[\.\.\., hidden\], got \(16,\)"),
    "no logits": ({"logits": None}, "TopKRouter needs router_logits"),
    "columns": ({"logits": logits_of(3, width=4)}, r"router_logits \(3, 4\) must end in 5 columns"),
    "rows": ({"logits": logits_of(2)}, r"router_logits \(2, 5\) must have .* \(3,\)"),
    "no dimension": ({"logits": torch.tensor(1.0)}, r"router_logits \(\) must have"),
    "3-D logits": ({"logits": logits_of(3, 1)}, r"router_logits \(3, 1, 5\) must have"),
    "int logits": ({"logits": INT[:, :5]}, "router_logits has dtype torch.int64"),
    "ids": ({"topk_ids": INT[:, :2]}, "TopKRouter does not take topk_ids"),
    "weights": ({"topk_weights": x_of(3)}, "TopKRouter does not take topk_weights"),
    "tokens": ({"input_ids": INT[:, 0]}, "TopKRouter does not take input_ids"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_input_is_refused_before_any_work(fault: str) -> None:
    given, message = FAULTS[fault]
    arguments = {"x": x_of(3), "logits": logits_of(3), **given}
    with pytest.raises(ValueError, match=message):
        idle_layer()(arguments.pop("x"), arguments.pop("logits"), **arguments)


IDS = torch.tensor([[0, 1], [1, 2], [3, 4]])

GIVEN_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "no ids": ({"topk_ids": None}, "GivenTopKRouter needs topk_ids"),
    "no weights": ({"topk_weights": None}, "GivenTopKRouter needs topk_weights"),
    "logits": ({"router_logits": logits_of(3)}, "GivenTopKRouter does not take router_logits"),
    "float ids": ({"topk_ids": torch.rand(3, 2)}, "topk_ids has dtype torch.float32; .* int32"),
    "bool ids": ({"topk_ids": IDS > 1}, "topk_ids has dtype torch.bool"),
    "int weights": ({"topk_weights": IDS}, "topk_weights has dtype torch.int64"),
    "widths": (
        {"topk_ids": IDS[:, :1]},
        r"topk_weights \(3, 2\) and topk_ids \(3, 1\) must have the same shape",
    ),
    "rows": ({"topk_ids": IDS[:2]}, r"topk_ids \(2, 2\) must have the leading dimensions \(3,\)"),
}


@pytest.mark.parametrize("fault", GIVEN_FAULTS)
def test_a_bad_given_routing_is_refused_before_any_work(fault: str) -> None:
    given, message = GIVEN_FAULTS[fault]
    layer = idle_layer(router=cmoe.GivenTopKRouter())
    arguments = {"topk_weights": torch.rand(3, 2), "topk_ids": IDS, **given}
    with pytest.raises(ValueError, match=message):
        layer(x_of(3), **arguments)


@pytest.mark.parametrize("bad", [-2, 5])
def test_given_ids_out_of_range_are_refused(bad: int) -> None:
    layer = layer_of(router=cmoe.GivenTopKRouter())
    ids = IDS.clone()
    ids[1, 1] = bad
    with pytest.raises(ValueError, match=r"topk_ids must be in \[-1, 5\)"):
        layer(x_of(3), topk_weights=torch.rand(3, 2), topk_ids=ids)


def test_logits_for_a_layer_with_a_gate_are_refused() -> None:
    layer = idle_layer(gate=Untouched())
    with pytest.raises(ValueError, match="owns its gate: leave router_logits out"):
        layer(x_of(3), logits_of(3))


def test_a_gate_of_the_wrong_width_is_refused() -> None:
    layer = idle_layer(gate=nn.Linear(HIDDEN, 4))
    with pytest.raises(ValueError, match=r"gate's logits \(3, 4\) must end in 5 columns"):
        layer(x_of(3))


def test_an_input_transform_of_the_wrong_width_is_refused() -> None:
    layer = idle_layer(input_transform=nn.Linear(HIDDEN, 12))
    with pytest.raises(ValueError, match=r"gives \(3, 12\), not hidden_size \(16\)"):
        layer(x_of(3), logits_of(3))


def test_compiled_layers_refuse_bad_input_too() -> None:
    compiled = torch.compile(idle_layer(), backend="aot_eager")
    with pytest.raises(ValueError, match=r"\(3, 15\) must end in hidden_size \(16\)"):
        compiled(x_of(3, width=15), logits_of(3))


# --- copies ---------------------------------------------------------------------------------------


def everything(prefix: str = "mlp") -> cmoe.MoERunner:
    return layer_of(
        config_of(has_bias=True, router=SIGMOID, quant=PADDED),
        prefix,
        gate=cmoe.GateLinear(HIDDEN, NUM_EXPERTS),
        shared_experts=shared(),
        shared_expert_gate=nn.Linear(HIDDEN, 1),
    ).requires_grad_(False)


COPIES: dict[str, Callable[[cmoe.MoERunner], cmoe.MoERunner]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": through_torch_save,
    "deepcopy of a deepcopy": lambda layer: copy.deepcopy(copy.deepcopy(layer)),
    "deepcopy inside a model": lambda layer: copy.deepcopy(nn.ModuleList([layer]))[0],
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_is_a_layer_of_its_own(how: str) -> None:
    layer = everything()
    x = x_of(7)
    y = layer(x)
    twin = COPIES[how](layer)
    assert torch.equal(twin(x), y)
    assert twin.layer_name != layer.layer_name == "mlp"
    assert cmoe.get_layer_from_name(twin.layer_name) is twin
    assert cmoe.get_layer_from_name("mlp") is layer
    fill(twin)
    assert not torch.equal(twin(x), y)
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_loads_the_checkpoint_of_its_original(how: str) -> None:
    layer = everything("model.layers.0.mlp")
    tensors = {f"model.layers.0.mlp.{name}": t for name, t in layer.state_dict().items()}
    twin = COPIES[how](layer)
    fill(twin)
    twin.load_weights(tensors)
    x = x_of(7)
    assert torch.equal(twin(x), layer(x))


def test_a_shallow_copy_shares_weights_but_no_token() -> None:
    layer = everything()
    twin = copy.copy(layer)
    assert twin.layer_token.data_ptr() != layer.layer_token.data_ptr()
    assert twin.routed_experts is layer.routed_experts
    x = x_of(7)
    assert torch.equal(twin(x), layer(x))
    assert cmoe.get_layer_from_name("mlp") is layer


def test_a_copy_of_a_compiled_layer_works() -> None:
    layer = everything()
    layer.compile(backend="aot_eager")
    layer.routed_experts.compile(backend="aot_eager")
    layer.router.compile(backend="aot_eager")
    x = x_of(7)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_a_saved_layer_works_in_a_fresh_process(tmp_path: Path) -> None:
    layer = everything()
    x = x_of(7)
    torch.save({"layer": layer, "x": x, "y": layer(x)}, tmp_path / "layer.pt")
    program = f"""
import torch, cmoe
saved = torch.load({str(tmp_path / "layer.pt")!r}, weights_only=False)
layer = saved["layer"]
print(torch.equal(layer(saved["x"]), saved["y"]), cmoe.get_layer_from_name("mlp") is layer)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "True True\n", done.stderr


def test_a_state_dict_holds_weights_alone() -> None:
    layer = everything()
    names = set(layer.state_dict())
    assert names == {
        "gate.weight",
        "router.e_score_correction_bias",
        *(f"routed_experts.{name}" for name in ("w13_weight", "w13_bias", "w2_weight", "w2_bias")),
        *(f"shared_experts.mlp.{n}.{kind}" for n in "02" for kind in ("weight", "bias")),
        "shared_experts.gate.weight",
        "shared_experts.gate.bias",
    }


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_makes_the_round_trip(assign: bool) -> None:
    layer, other = everything("a"), everything("b")
    x = x_of(7)
    assert not torch.equal(layer(x), other(x))
    other.load_state_dict(copy.deepcopy(layer.state_dict()), assign=assign)
    assert torch.equal(layer(x), other(x))


CASTS: dict[str, tuple[Callable[[cmoe.MoERunner], Any], torch.dtype]] = {
    "to(bfloat16)": (lambda layer: layer.to(torch.bfloat16), torch.bfloat16),
    "half": (lambda layer: layer.half(), torch.float16),
    "bfloat16": (lambda layer: layer.bfloat16(), torch.bfloat16),
    "double": (lambda layer: layer.double(), torch.float64),
    "inside a model": (lambda layer: nn.ModuleList([layer]).to(torch.bfloat16), torch.bfloat16),
}


@pytest.mark.parametrize("how", CASTS)
def test_a_cast_layer_is_right_and_keeps_its_bias(how: str) -> None:
    layer = everything()
    bias = layer.router.correction_bias().clone()
    cast, dtype = CASTS[how]
    cast(layer)
    assert layer.routed_experts.w13_weight.dtype == dtype
    assert layer.router.correction_bias().dtype == torch.float32
    assert torch.equal(layer.router.correction_bias(), bias)
    x = x_of(7, dtype=dtype)
    assert_exact(layer, layer(x), x, layer.gate(x))
    with pytest.raises(ValueError, match=r"dtype torch\.float8_e5m2, the weights"):
        layer(x.to(torch.float8_e5m2))


@pytest.mark.parametrize("how", ["load_weights", "load_state_dict", "assign"])
def test_a_layer_built_on_the_meta_device(how: str) -> None:
    source = everything("source")
    with torch.device("meta"):
        layer = cmoe.FusedMoE(
            source.config,
            "mlp",
            gate=cmoe.GateLinear(HIDDEN, NUM_EXPERTS),
            shared_experts=shared(),
            shared_expert_gate=nn.Linear(HIDDEN, 1),
        ).requires_grad_(False)
    tensors = source.state_dict()
    if how == "assign":
        layer.load_state_dict(tensors, assign=True)
    else:
        layer.to_empty(device="cpu")
        layer.load_weights(tensors) if how == "load_weights" else layer.load_state_dict(tensors)
    assert layer.router.correction_bias().dtype == torch.float32
    x = x_of(7)
    with Seen() as seen:
        assert torch.equal(layer(x), source(x))
    assert seen.names[:2] == ["cmoe_cpu.gate.default", "cmoe.moe_forward_shared.default"]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), source(x))


class Listening(cmoe.TopKRouter):
    """Remembers the kernels that it was given last."""

    def use_kernels(self, kernels: Any) -> None:
        super().use_kernels(kernels)
        self.given = kernels

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        del state["given"]  # kernels do not travel
        return state


@pytest.mark.parametrize("move", [lambda layer: layer.double(), copy.deepcopy, copy.copy])
def test_the_router_has_the_kernels_of_the_experts(move: Any) -> None:
    layer = layer_of(router=Listening(config_of()))
    moved = move(layer)
    assert moved.router.given is moved.routed_experts.kernels


def test_a_layer_moved_to_shared_memory_is_found() -> None:
    layer = everything()
    x = x_of(3)
    y = layer(x)
    layer.share_memory()
    assert torch.equal(layer(x), y)


def test_logical_weights_of_the_tests_know_the_padding() -> None:
    weights = logical_weights(everything())
    assert weights["w13"].shape == (NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN)
    assert all(tensor.count_nonzero() == tensor.numel() for tensor in weights.values())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_float16_sum_that_only_fits_when_scaled_is_right(backend: str) -> None:
    router = cmoe.RouterConfig(
        scoring_func="sigmoid",
        renormalize=False,
        routed_scaling_factor=0.01,
        apply_routed_scale_to_output=True,
    )
    config = cmoe.MoEConfig(
        num_experts=4,
        top_k=2,
        hidden_size=16,
        intermediate_size=8,
        params_dtype=torch.float16,
        router=router,
        backend=backend,
    )
    layer = cmoe.FusedMoE(config, "mlp")
    torch.nn.init.constant_(layer.routed_experts.w13_weight, 4.0)
    torch.nn.init.constant_(layer.routed_experts.w2_weight, 1.25)
    y = layer(torch.ones(3, 16, dtype=torch.float16), torch.full((3, 4), 20.0))
    # gate = up = 16 * 4 = 64, silu(64) * 64 = 4096, 8 * 1.25 * 4096 = 40960,
    # twice with weights of 1 is 81920, times 0.01.
    exact = torch.full((3, 16), 819.2, dtype=torch.float64)
    assert (y.double() - exact).abs().max() <= 2**-2  # half a step of float16 near 819
