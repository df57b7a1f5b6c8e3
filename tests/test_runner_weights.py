"""The checkpoint of a whole block: gate, correction bias, shared experts, transforms."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmoe
from tests.layers import (
    HIDDEN,
    NUM_EXPERTS,
    config_of,
    expert_tensors,
    has_nan,
    layer_of,
    poison,
    x_of,
)

PREFIX = "model.layers.3.mlp"

Tensors = dict[str, Tensor]


class Mlp(nn.Module):
    """DeepSeek's shared experts: three projections without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, 6, bias=False)
        self.up_proj = nn.Linear(HIDDEN, 6, bias=False)
        self.down_proj = nn.Linear(6, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def deepseek_layer(prefix: str = PREFIX, **parts: Any) -> cmoe.MoERunner:
    """Poisoned all over."""
    router = cmoe.RouterConfig(scoring_func="sigmoid", e_score_correction_bias=True)
    layer = layer_of(
        config_of(router=router),
        prefix,
        gate=cmoe.GateLinear(HIDDEN, NUM_EXPERTS),
        shared_experts=Mlp(),
        **parts,
    )
    poison(layer)
    layer.router.correction_bias().fill_(float("nan"))
    return layer


def deepseek_tensors() -> Tensors:
    tensors = expert_tensors(config_of())
    tensors["gate.weight"] = x_of(NUM_EXPERTS)
    tensors["gate.e_score_correction_bias"] = torch.rand(NUM_EXPERTS) * 0.25 + 6.8
    for name, shape in {
        "gate_proj": (6, HIDDEN),
        "up_proj": (6, HIDDEN),
        "down_proj": (HIDDEN, 6),
    }.items():
        tensors[f"shared_experts.{name}.weight"] = torch.randn(shape)
    return tensors


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {f"{prefix}{key}": tensor for key, tensor in tensors.items()}


def assert_holds(layer: cmoe.MoERunner, tensors: Tensors) -> None:
    assert not has_nan(layer)
    assert torch.equal(layer.gate.weight, tensors["gate.weight"])
    bias = layer.router.correction_bias()
    assert torch.equal(bias, tensors["gate.e_score_correction_bias"])
    for name, parameter in layer.shared_experts.mlp.named_parameters():
        assert torch.equal(parameter, tensors[f"shared_experts.{name}"])
    rows = layer.routed_experts.w13_weight[4, 8:]
    assert torch.equal(rows, tensors["experts.4.up_proj.weight"])


@pytest.mark.parametrize("built_as", ["mlp", PREFIX, "a.b.c.d.e"])
@pytest.mark.parametrize("with_prefix", [False, True])
@pytest.mark.parametrize("how", [dict, lambda tensors: iter(tensors.items())])
def test_a_deepseek_block(built_as: str, with_prefix: bool, how: Callable[[Tensors], Any]) -> None:
    layer = deepseek_layer(built_as)
    tensors = deepseek_tensors()
    given = prefixed(tensors, f"{built_as}." if with_prefix else "")
    report = layer.load_weights(how(given))
    assert sorted(report.keys_used) == sorted(given)
    slots = {"gate.weight", "gate.e_score_correction_bias", *layer.routed_experts.slots()}
    slots |= {key for key in tensors if key.startswith("shared_experts.")}
    assert set(report.slots_written) == slots
    assert_holds(layer, tensors)


def test_the_padding_is_cleared_too() -> None:
    config = config_of(quant=cmoe.QuantConfig(size_multiple=12), has_bias=True)
    layer = layer_of(config)
    poison(layer)
    layer.load_weights(expert_tensors(config))
    assert not has_nan(layer)


def test_loading_again_moves_nothing() -> None:
    layer = deepseek_layer()
    held = [t.data_ptr() for t in [*layer.parameters(), *layer.buffers()]]
    a, b = deepseek_tensors(), deepseek_tensors()
    outputs = []
    x = x_of(7)
    for tensors in (a, b, a):
        layer.load_weights(tensors)
        assert_holds(layer, tensors)
        outputs.append(layer(x))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])
    assert held == [t.data_ptr() for t in [*layer.parameters(), *layer.buffers()]]


@pytest.mark.parametrize("bias", ["gate", "router", ""])
@pytest.mark.parametrize("gate", ["gate", "router"])
@pytest.mark.parametrize("shared", ["shared_experts", "shared_expert", "shared_experts.mlp"])
def test_other_names_of_the_same_places(bias: str, gate: str, shared: str) -> None:
    layer = deepseek_layer()
    tensors = deepseek_tensors()
    names = {"gate.e_score_correction_bias": f"{bias}.e_score_correction_bias".lstrip(".")}
    names["gate.weight"] = f"{gate}.weight"
    given = {
        names.get(key, key.replace("shared_experts.", f"{shared}.")): tensor
        for key, tensor in tensors.items()
    }
    layer.load_weights(given)
    assert_holds(layer, tensors)


def test_the_correction_bias_keeps_float32_bits_in_a_bfloat16_layer() -> None:
    """At 7 bfloat16 has steps of 1/32."""
    layer = deepseek_layer().to(torch.bfloat16)
    tensors = deepseek_tensors()
    layer.load_weights(tensors)
    bias = layer.router.correction_bias()
    assert bias.dtype == torch.float32
    assert torch.equal(bias, tensors["gate.e_score_correction_bias"])
    saved = copy.deepcopy(layer.state_dict())["router.e_score_correction_bias"]
    assert torch.equal(saved, tensors["gate.e_score_correction_bias"])


@pytest.mark.parametrize("gate_name", ["shared_expert_gate", "shared_experts_gate"])
def test_a_qwen2_block(gate_name: str) -> None:
    layer = layer_of(
        prefix=PREFIX, shared_experts=Mlp(), shared_expert_gate=nn.Linear(HIDDEN, 1, bias=False)
    )
    poison(layer)
    tensors = {k: t for k, t in deepseek_tensors().items() if not k.startswith("gate.")}
    gate = x_of(1)
    layer.load_weights(prefixed(tensors | {f"{gate_name}.weight": gate}, f"{PREFIX}."))
    assert torch.equal(layer.shared_experts.gate.weight, gate)
    assert not has_nan(layer)


def parts_of_every_kind() -> dict[str, nn.Module]:
    return {
        "shared_expert_gate": nn.Linear(HIDDEN, 1),
        "input_transform": nn.Linear(HIDDEN, HIDDEN),
        "output_transform": nn.Sequential(nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)),
    }


def test_a_layer_loads_its_own_state_dict() -> None:
    source = deepseek_layer("source", **parts_of_every_kind())
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.normal_()
    layer = deepseek_layer(**parts_of_every_kind())
    report = layer.load_weights(source.state_dict())
    assert sorted(report.keys_used) == sorted(source.state_dict())
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name]), name


def test_the_bias_over_zero_experts_too() -> None:
    config = config_of(router=cmoe.RouterConfig(e_score_correction_bias=True))
    layer = layer_of(config, router=cmoe.ZeroExpertRouter(config, 3))
    layer.router.correction_bias().fill_(float("nan"))
    layer.load_weights(expert_tensors(config) | {"gate.e_score_correction_bias": x_of(width=8)})
    other = layer_of(config, "other", router=cmoe.ZeroExpertRouter(config, 3))
    other.load_weights(layer.state_dict())
    assert torch.equal(other.router.correction_bias(), layer.router.correction_bias())


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no home": (
        lambda t: t | {"gate.bias": torch.ones(NUM_EXPERTS)},
        rf"^{re.escape(PREFIX)}: no home for gate\.bias$",
    ),
    "another layer's": (
        lambda t: t | {"model.layers.4.mlp.gate.weight": torch.ones(NUM_EXPERTS, HIDDEN)},
        r"no home for model\.layers\.4\.mlp\.gate\.weight",
    ),
    "gate missing": (
        lambda t: {k: v for k, v in t.items() if k != "gate.weight"},
        rf"^{re.escape(PREFIX)}: missing gate\.weight$",
    ),
    "bias missing": (
        lambda t: {k: v for k, v in t.items() if "correction" not in k},
        rf"^{re.escape(PREFIX)}: missing gate\.e_score_correction_bias$",
    ),
    "shared expert missing": (
        lambda t: {k: v for k, v in t.items() if k != "shared_experts.up_proj.weight"},
        rf"^{re.escape(PREFIX)}: missing shared_experts\.up_proj\.weight$",
    ),
    "routed expert missing": (
        lambda t: {k: v for k, v in t.items() if k != "experts.2.up_proj.weight"},
        rf"^{re.escape(PREFIX)}: missing experts\.2\.up_proj\.weight \(for w13_weight\[2\]\.w3\)$",
    ),
    "shape": (
        lambda t: t | {"gate.weight": torch.ones(4, HIDDEN)},
        r"^gate\.weight: shape \(4, 16\) should be \(5, 16\)$",
    ),
    "dtype": (
        lambda t: t | {"gate.weight": torch.ones(NUM_EXPERTS, HIDDEN, dtype=torch.int8)},
        r"^gate\.weight has dtype torch\.int8; its place has torch\.float32",
    ),
    "experts' dtype": (
        lambda t: t | {"experts.0.up_proj.weight": torch.ones(8, HIDDEN, dtype=torch.int8)},
        r"^experts\.0\.up_proj\.weight has dtype torch\.int8",
    ),
    "another layer's experts": (
        lambda t: (
            t | {"model.layers.7.mlp.experts.0.up_proj.weight": t["experts.0.up_proj.weight"]}
        ),
        r"no home for model\.layers\.7\.mlp\.experts\.0\.up_proj\.weight$",
    ),
    "twice": (
        lambda t: t | {"router.weight": t["gate.weight"]},
        r"^router\.weight: gate\.weight is filled by gate\.weight already",
    ),
    "with the prefix, without": (
        lambda t: t | {f"{PREFIX}.gate.weight": t["gate.weight"]},
        r"gate\.weight: gate\.weight is filled by gate\.weight already",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_mapping_writes_nothing(fault: str) -> None:
    change, message = FAULTS[fault]
    layer = deepseek_layer()
    layer.load_weights(deepseek_tensors())
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(cmoe.LoadError, match=message):
        layer.load_weights(change(deepseek_tensors()))
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_iterator_is_an_error(fault: str) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(cmoe.LoadError, match=message.removesuffix("$")):
        deepseek_layer().load_weights(iter(change(deepseek_tensors()).items()))


def test_transforms_are_not_forgotten() -> None:
    layer = layer_of(input_transform=nn.Linear(HIDDEN, HIDDEN), output_transform=nn.RMSNorm(HIDDEN))
    missing = r"input_transform\.bias, input_transform\.weight, output_transform\.weight"
    with pytest.raises(cmoe.LoadError, match=f"^mlp: missing {missing}$"):
        layer.load_weights(expert_tensors(layer.config))


def test_a_lenient_load_reports() -> None:
    layer = deepseek_layer()
    tensors = deepseek_tensors()
    gate = tensors.pop("gate.weight")
    report = layer.load_weights(tensors | {"lm_head.weight": gate}, strict=False)
    assert report.keys_without_home == ("lm_head.weight",)
    assert report.slots_unwritten == ("gate.weight",)
    assert layer.gate.weight.isnan().all()
