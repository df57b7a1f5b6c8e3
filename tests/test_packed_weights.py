"""Packed layers: the same values, under the same names, in the same objects as before."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import cmoe
from cmoe import LoadError, UnsupportedError
from cmoe.custom_ops.backends import (
    LayerSpec,
    explain_backends,
    register_backend,
    unregister_backend,
)
from cmoe.custom_ops.packing import pack, unpack
from cmoe.quant.base import QuantMethod
from cmoe.quant.unquantized import Unquantized
from tests.layers import (
    assert_exact,
    expert_tensors,
    layer_of,
    logits_of,
    poison,
    through_torch_save,
    x_of,
)
from tests.packable import HIDDEN, INTERMEDIATE, Strips, packable_config, strips_backend
from tests.test_routed_experts import (
    Doubled,
    checked_load,
    fused,
    per_expert_fused,
    renamed,
    stacked,
    without,
)

MATRICES = ("w13_weight", "w2_weight")
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def a_backend_that_reads_packed_weights() -> Iterator[None]:
    with strips_backend():
        yield


def packable_layer(prefix: str = "mlp", **changes: Any) -> cmoe.MoERunner:
    return layer_of(packable_config(**changes), prefix)


def packed_layer(prefix: str = "mlp", **changes: Any) -> cmoe.MoERunner:
    layer = packable_layer(prefix, **changes)
    cmoe.pack_weights(layer)
    return layer


def packed_experts(**changes: Any) -> cmoe.RoutedExperts:
    """Poisoned: what a load leaves out is NaN."""
    experts = cmoe.RoutedExperts(packable_config(**changes))
    poison(experts)
    cmoe.pack_weights(experts)
    return experts


def dims(module: nn.Module) -> list[int]:
    """Of the weights of every layer in it."""
    layers = [m for m in module.modules() if isinstance(m, cmoe.RoutedExperts)]
    return [getattr(experts, name).dim() for experts in layers for name in MATRICES]


def inputs(*lead: int) -> tuple[Tensor, Tensor]:
    return x_of(*lead, width=HIDDEN), logits_of(*lead)


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "relu2_no_mul"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_there_and_back(activation: str, has_bias: bool) -> None:
    layer = packable_layer(activation=activation, has_bias=has_bias)
    experts = layer.routed_experts
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    objects = {name: id(parameter) for name, parameter in layer.named_parameters()}
    call = inputs(7)
    expected = layer(*call)
    cmoe.pack_weights(layer)
    assert experts.w13_weight.shape == (
        5,
        len(before["routed_experts.w13_weight"][0]) // 32,
        32,
        32,
        2,
    )
    assert experts.w2_weight.shape == (5, 2, 16, 32, 2)
    assert torch.equal(layer(*call), expected)
    for name in MATRICES:
        assert torch.equal(getattr(experts, name), pack(before[f"routed_experts.{name}"]))
    cmoe.unpack_weights(layer)
    assert torch.equal(layer(*call), expected)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert {name: id(parameter) for name, parameter in layer.named_parameters()} == objects
    assert not any(p.requires_grad for p in layer.parameters())


def test_a_whole_model() -> None:
    model = nn.ModuleList(
        [packable_layer("a"), nn.Linear(2, 2), nn.Sequential(packable_layer("b"))]
    )
    cmoe.pack_weights(model)
    assert dims(model) == [5] * 4
    cmoe.unpack_weights(model)
    assert dims(model) == [3] * 4


def test_the_experts_by_themselves() -> None:
    experts = cmoe.RoutedExperts(packable_config())
    cmoe.pack_weights(experts)
    assert dims(experts) == [5, 5]


@pytest.mark.parametrize("function", [cmoe.pack_weights, cmoe.unpack_weights])
def test_twice_is_once(function: Callable[[nn.Module], None]) -> None:
    layer = packable_layer()
    function(layer)
    before = [(p.data_ptr(), p.clone()) for p in layer.parameters()]
    layer.requires_grad_()  # would be refused if there was anything to do
    function(layer)
    for parameter, (pointer, values) in zip(layer.parameters(), before, strict=True):
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter, values)


def test_what_was_taken_before_stays_as_it_was() -> None:
    layer = packable_layer()
    state, alias = layer.state_dict(), layer.routed_experts.w13_weight.data[1]
    values = copy.deepcopy(state)
    cmoe.pack_weights(layer)
    layer.routed_experts.reset_parameters()
    assert torch.equal(alias, values["routed_experts.w13_weight"][1])
    for name, tensor in state.items():
        assert torch.equal(tensor, values[name])
    cmoe.unpack_weights(layer)


@pytest.mark.parametrize("tied", [("w13_weight",), MATRICES])
def test_a_parameter_of_two_layers_is_packed_once(tied: tuple[str, ...]) -> None:
    model = nn.ModuleList([packable_layer("a"), packable_layer("b")])
    for name in tied:
        setattr(model[1].routed_experts, name, getattr(model[0].routed_experts, name))
    call = inputs(7)
    expected = [layer(*call) for layer in model]
    for function, dim in ((cmoe.pack_weights, 5), (cmoe.unpack_weights, 3)):
        function(model)
        assert dims(model) == [dim] * 4
        for name in tied:
            first, second = (getattr(layer.routed_experts, name) for layer in model)
            assert first is second
        for layer, y in zip(model, expected, strict=True):
            assert torch.equal(layer(*call), y)


def test_a_tied_layer_that_was_left_out_says_what_to_do() -> None:
    one, other = packable_layer("a"), packable_layer("b")
    other.routed_experts.w13_weight = one.routed_experts.w13_weight
    call = inputs(3)
    expected = other(*call)
    cmoe.pack_weights(one)
    with pytest.raises(ValueError, match=r"w13 and w2 must be both packed .*cmoe\.pack_weights"):
        other(*call)
    cmoe.pack_weights(other)
    assert torch.equal(other(*call), expected)


def test_parameters_of_inference_mode() -> None:
    layer = packable_layer()
    call = inputs(3)
    expected = layer(*call)
    with torch.inference_mode():
        cmoe.pack_weights(layer)
    assert torch.equal(layer(*call), expected)
    assert not any(p.is_inference() for p in layer.parameters())


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [cmoe.pack_weights, cmoe.unpack_weights])
def test_a_module_without_experts(function: Callable[[nn.Module], None]) -> None:
    message = r"Linear has no RoutedExperts.*experts switch keeps transformers' own.*replace_moe"
    with pytest.raises(ValueError, match=message):
        function(nn.Linear(2, 2))


class Theirs(Unquantized):
    """A subclass of ours, which keeps our layout."""


class Foreign(QuantMethod):
    """A format that nothing is known of."""

    create_weights = Unquantized.create_weights

    def apply(self, *arguments: Any) -> Tensor:
        raise AssertionError


def _parametrize(experts: cmoe.RoutedExperts) -> None:
    nn.utils.parametrize.register_parametrization(experts, "w2_weight", Doubled())


def _foreign(experts: cmoe.RoutedExperts) -> None:
    experts.quant_method = Foreign()


def _with_a_gradient(experts: cmoe.RoutedExperts) -> None:
    experts.w2_weight.grad = torch.zeros_like(experts.w2_weight)


def _cut(experts: cmoe.RoutedExperts) -> None:
    experts.w2_weight = nn.Parameter(experts.w2_weight.detach()[:, :33], requires_grad=False)


def _mixed(experts: cmoe.RoutedExperts) -> None:
    experts.w2_weight = nn.Parameter(experts.w2_weight.detach().bfloat16(), requires_grad=False)


FAULTS: dict[str, tuple[dict[str, Any], Callable[[cmoe.RoutedExperts], Any], str]] = {
    "gradients": (
        {},
        lambda e: e.requires_grad_(),
        "w13_weight, w2_weight: with gradients, .*for inf",
    ),
    "a gradient": ({}, _with_a_gradient, r"w2_weight: with gradients.*requires_grad_\(False\)"),
    "a shape": ({}, _cut, r"w2_weight is \(5, 33, 32\) torch.float32, not \(5, 64, 32\)"),
    "two dtypes": ({}, _mixed, r"w2_weight is .* torch.bfloat16, not .* torch.float32$"),
    "none": (
        {},
        lambda e: setattr(e, "w2_weight", None),
        "w2_weight: set to something that is no tensor$",
    ),
    "meta": ({}, lambda e: e.to("meta"), "on the meta device, without values; load them first$"),
    "parametrized": (
        {},
        _parametrize,
        "w2_weight: computed by a parametrization; remove it first$",
    ),
    "another format": ({}, _foreign, "Foreign has a layout of its own$"),
    "padding": (
        {"hidden_size": 60, "quant": cmoe.QuantConfig(size_multiple=32)},
        lambda e: None,
        r"sizes \(60, 32\) are padded to \(64, 32\); packed weights have no padding",
    ),
    "dtype": ({}, lambda e: e.half(), "backend strips reads no packed weights of torch.float16$"),
    "backend": (
        {"backend": "reference"},
        lambda e: None,
        "backend reference reads weights as checkpoints have them$",
    ),
    "several": (
        {"backend": "reference"},
        lambda e: e.w2_weight.requires_grad_(),
        "w2_weight: with gradients.*; backend reference reads weights as checkpoints have them$",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_packed_is_judged_before_any_change(fault: str) -> None:
    changes, spoil, message = FAULTS[fault]
    model = nn.ModuleDict({"good": packable_layer("a"), "bad": packable_layer("b", **changes)})
    spoil(model["bad"].routed_experts)
    before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    with pytest.raises(UnsupportedError) as error:
        cmoe.pack_weights(model)
    first, *others = str(error.value).splitlines()
    assert first == "these weights cannot be packed (nothing was changed):"
    assert len(others) == 1
    name, _, reasons = others[0].partition(" : ")
    assert name == "  bad.routed_experts"
    assert re.search(message, reasons), reasons
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == before
    with pytest.raises(UnsupportedError, match="  the layer : "):
        cmoe.pack_weights(model["bad"].routed_experts)


def test_a_subclass_of_our_format_is_packed() -> None:
    layer = packable_layer()
    layer.routed_experts.quant_method = Theirs()
    cmoe.pack_weights(layer)
    assert dims(layer) == [5, 5]


def test_the_backend_that_a_layer_chose_is_asked() -> None:
    """It keeps it, whatever was registered or taken away since."""
    layer = packable_layer(backend="reference")
    layer.routed_experts.config = packable_config()
    with pytest.raises(UnsupportedError, match="backend reference"):
        cmoe.pack_weights(layer)


def test_a_parametrization_of_packed_weights() -> None:
    layer, x = packed_layer(), inputs(7)
    twice = copy.deepcopy(layer)
    with torch.no_grad():
        twice.routed_experts.w2_weight.mul_(2)
    nn.utils.parametrize.register_parametrization(layer.routed_experts, "w2_weight", Doubled())
    assert torch.equal(layer(*x), twice(*x))
    with pytest.raises(UnsupportedError, match=r"w2_weight was packed before a parametrization"):
        cmoe.unpack_weights(layer)
    assert dims(layer) == [5, 5]


# --- moved, copied --------------------------------------------------------------------------------


def _pickled(layer: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(layer))


STAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to cpu": lambda layer: layer.to("cpu"),
    "to the same dtype": lambda layer: layer.float(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": _pickled,
    "torch.save": through_torch_save,
    "another memory format": lambda layer: layer.to(memory_format=torch.channels_last_3d),
    "shared memory": lambda layer: layer.share_memory(),
}


@pytest.mark.parametrize("how", STAYS)
def test_what_stays_packed(how: str) -> None:
    layer, call = packed_layer(), inputs(7)
    expected, state = layer(*call), layer.state_dict()
    moved = STAYS[how](layer)
    assert dims(moved) == [5, 5]
    assert all(p.is_contiguous() for p in moved.parameters())
    assert torch.equal(moved(*call), expected)
    for name, tensor in moved.state_dict().items():
        assert torch.equal(tensor, state[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_converted_to_what_is_not_read_packed(dtype: torch.dtype) -> None:
    layer, (x, logits) = packed_layer(), inputs(7)
    state = layer.state_dict()
    layer.to(dtype)
    assert dims(layer) == [3, 3]
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, state[name].to(dtype))
    assert layer(x.to(dtype), logits).dtype == dtype


def test_moved_to_where_no_kernel_reads_packed_weights() -> None:
    layer = packed_layer().to("meta")
    assert dims(layer) == [3, 3]
    layer.to_empty(device="cpu").routed_experts.load_weights(expert_tensors(layer.config))
    assert dims(layer) == [3, 3]


def test_a_copy_where_the_backend_is_gone() -> None:
    layer, call = packed_layer(), inputs(7)
    expected, pickled = layer(*call), pickle.dumps(layer)
    unregister_backend(Strips.name)
    try:
        other = pickle.loads(pickled)
        assert dims(other) == [3, 3]  # the cpu backend reads none of float32 either
        torch.testing.assert_close(other(*call), expected)
    finally:
        register_backend(Strips())


def test_both_layers_of_a_tied_parameter_are_moved() -> None:
    model = nn.ModuleList([packable_layer("a"), packable_layer("b")])
    for name in MATRICES:
        setattr(model[1].routed_experts, name, getattr(model[0].routed_experts, name))
    cmoe.pack_weights(model)
    model.double()
    assert dims(model) == [3] * 4
    assert model[0].routed_experts.w2_weight is model[1].routed_experts.w2_weight


def test_empty_memory_for_packed_weights_is_packed() -> None:
    layer, tensors = packed_layer(), expert_tensors(packable_config())
    layer.to_empty(device="cpu")
    checked_load(layer.routed_experts, tensors)
    assert dims(layer) == [5, 5]


# --- state_dict -----------------------------------------------------------------------------------


def test_a_state_dict_has_copies_in_the_checkpoint_s_layout() -> None:
    layer = packable_layer(has_bias=True)
    plain = copy.deepcopy(layer.state_dict())
    cmoe.pack_weights(layer)
    state = layer.state_dict()
    assert list(state) == list(plain)
    for name, tensor in state.items():
        assert torch.equal(tensor, plain[name])
        tensor.zero_()
    for name in MATRICES:
        own = getattr(layer.routed_experts, name)
        assert torch.equal(unpack(own), plain[f"routed_experts.{name}"])
    kept = layer.state_dict(keep_vars=True)
    for name, parameter in layer.named_parameters():
        assert kept[name] is parameter


SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.clone,
    "transposed": lambda t: t.mT.contiguous().mT,
    "a parameter": lambda t: nn.Parameter(t.clone()),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_keeps_a_layer_packed(assign: bool, source: str) -> None:
    layer, other, call = packed_layer(), packable_layer("b"), inputs(7)
    state = {n: SOURCES[source](t) if t.dim() == 3 else t for n, t in other.state_dict().items()}
    before = {name: (id(t), t.shape, t.detach().clone()) for name, t in state.items()}
    pointers = [p.data_ptr() for p in layer.parameters()]
    assert not any(layer.load_state_dict(state, assign=assign))
    assert dims(layer) == [5, 5]
    assert torch.equal(layer(*call), other(*call))
    assert all(p.is_contiguous() and not p.requires_grad for p in layer.parameters())
    if not assign:
        assert [p.data_ptr() for p in layer.parameters()] == pointers
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    for name, (identity, shape, values) in before.items():
        assert (id(state[name]), state[name].shape) == (identity, shape)
        assert torch.equal(state[name], values)


def test_assigned_weights_that_are_not_read_packed() -> None:
    layer, other = packed_layer(), packable_layer("b", params_dtype=torch.float64)
    layer.load_state_dict(other.state_dict(), assign=True)
    assert dims(layer) == [3, 3]
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])


def test_a_packed_state_between_packed_layers() -> None:
    layer, other, call = packed_layer(), packed_layer("b"), inputs(7)
    layer.load_state_dict(other.state_dict(keep_vars=True))
    assert torch.equal(layer(*call), other(*call))


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_that_does_not_fit(assign: bool) -> None:
    layer = packed_layer()
    before = {name: p.clone() for name, p in layer.named_parameters()}
    state = layer.state_dict()
    state["routed_experts.w2_weight"] = torch.zeros(5, HIDDEN, 3)
    message = r"routed_experts\.w2_weight: shape \(5, 64, 3\) should be \(5, 64, 32\)"
    with pytest.raises(RuntimeError, match=message) as error:
        layer.load_state_dict(state, assign=assign)
    assert not re.search("Missing|size mismatch", str(error.value))  # the fault is said once
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name])
    del state["routed_experts.w2_weight"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"routed_experts\.w2_weight"'):
        layer.load_state_dict(state, assign=assign)
    assert layer.load_state_dict(state, strict=False, assign=assign).missing_keys


# --- loading --------------------------------------------------------------------------------------


def native(tensors: Tensors) -> Tensors:
    given = fused(tensors, transposed=False, interleaved=False)
    names = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
    for old, new in names.items():
        given = {key.replace(old, new): tensor for key, tensor in given.items()}
    return {key.replace("_weight_bias", "_bias"): tensor for key, tensor in given.items()}


LAYOUTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], Tensors]]] = {
    "per expert": ({}, lambda t: t),
    "mixtral": ({}, lambda t: renamed(t, gate_proj="w1", up_proj="w3", down_proj="w2")),
    "gate and up fused per expert": ({"has_bias": False}, per_expert_fused),
    "native": ({}, native),
    **{
        f"fused{', transposed' * transposed}{', interleaved' * interleaved}": (
            {"layout": cmoe.CheckpointLayout(transposed=transposed, interleaved=interleaved)},
            lambda t, transposed=transposed, interleaved=interleaved: fused(
                t, transposed=transposed, interleaved=interleaved
            ),
        )
        for transposed in (False, True)
        for interleaved in (False, True)
    },
    "fused, each projection": (
        {"layout": cmoe.CheckpointLayout(transposed=False), "has_bias": False},
        lambda t: {
            f"experts.{name}": stacked(t, name) for name in ("gate_proj", "up_proj", "down_proj")
        },
    ),
}


@pytest.mark.parametrize("how", [dict, lambda tensors: iter(tensors.items())], ids=["dict", "iter"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_loaded_packed(layout: str, how: Callable[[Tensors], Any]) -> None:
    changes, lay = LAYOUTS[layout]
    changes = {"has_bias": True, **changes}
    plain, packed = cmoe.RoutedExperts(packable_config(**changes)), packed_experts(**changes)
    pointers = [p.data_ptr() for p in packed.parameters()]
    for _ in range(2):
        tensors = lay(expert_tensors(plain.config))
        plain.load_weights(tensors)
        report = packed.load_weights(how(tensors))
        assert sorted(report.slots_written) == sorted(packed.slots())
        assert dims(packed) == [5, 5]
        assert [p.data_ptr() for p in packed.parameters()] == pointers
        for name, tensor in packed.state_dict().items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_load_into_packed_weights_converts(dtype: torch.dtype) -> None:
    experts = packed_experts(params_dtype=torch.bfloat16)
    tensors = {key: t.to(dtype) for key, t in expert_tensors(experts.config).items()}
    checked_load(experts, tensors)
    down = experts.state_dict()["w2_weight"][3]
    assert torch.equal(down, tensors["experts.3.down_proj.weight"].bfloat16())


def test_values_that_overflow_are_seen() -> None:
    experts = packed_experts(params_dtype=torch.bfloat16)
    tensors = {key: t.double() for key, t in expert_tensors(experts.config).items()}
    tensors["experts.3.up_proj.weight"][7, 9] = 1e300
    with pytest.raises(LoadError, match=r"became infinite in experts\.3\.up_proj\.weight"):
        experts.load_weights(tensors)


def test_without_a_gate() -> None:
    experts = packed_experts(activation="relu2_no_mul")
    tensors = expert_tensors(experts.config)
    tensors = {key: t for key, t in tensors.items() if "gate_proj" not in key}
    checked_load(experts, tensors)
    up = experts.state_dict()["w13_weight"][3]
    assert torch.equal(up, tensors["experts.3.up_proj.weight"])


LOAD_FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "shape": (
        lambda t: t | {"experts.1.up_proj.weight": torch.ones(INTERMEDIATE, 15)},
        r"experts\.1\.up_proj\.weight: shape \(32, 15\) should be \(32, 64\)$",
    ),
    "fused shape": (
        lambda t: {"experts.gate_up_proj": torch.ones(5, 3, 16)},
        r"gate_up_proj: both orientations|shape \(5, 3, 16\) should be \(5, 64, 64\)",
    ),
    "native shape": (
        lambda t: {"experts.w13_weight": torch.ones(5, 3, 16)},
        r"w13_weight: shape \(5, 3, 16\) should be \(5, 64, 64\)$",
    ),
    "packed already": (
        lambda t: {"experts.w2_weight": torch.ones(5, 2, 16, 32, 2)},
        r"w2_weight: shape \(5, 2, 16, 32, 2\) should be \(5, 64, 32\)$",
    ),
    "missing": (
        lambda t: without(t, "experts.3.gate_proj.weight"),
        r"missing experts\.3\.gate_proj\.weight \(for w13_weight\[3\]\.w1\)$",
    ),
    "dtype": (
        lambda t: t | {"experts.1.up_proj.weight": torch.ones(32, 64, dtype=torch.uint8)},
        r"experts\.1\.up_proj\.weight has dtype torch\.uint8",
    ),
}


@pytest.mark.parametrize("fault", LOAD_FAULTS)
def test_a_faulty_load_changes_nothing(fault: str) -> None:
    change, message = LOAD_FAULTS[fault]
    experts = cmoe.RoutedExperts(packable_config())
    cmoe.pack_weights(experts)
    before = [(p.data_ptr(), p.clone()) for p in experts.parameters()]
    with pytest.raises(LoadError, match=message):
        experts.load_weights(change(expert_tensors(experts.config)))
    for parameter, (pointer, values) in zip(experts.parameters(), before, strict=True):
        assert parameter.data_ptr() == pointer
        assert torch.equal(parameter, values)


def test_sources_in_the_layer_s_own_memory_are_refused() -> None:
    experts = packed_experts()
    tensors = expert_tensors(experts.config)
    own = experts.w2_weight.data.view(5, HIDDEN, INTERMEDIATE)
    tensors["experts.1.down_proj.weight"] = own[1]
    with pytest.raises(LoadError, match="shares memory with the layer's own weights"):
        experts.load_weights(tensors)


def test_its_own_state_is_loaded() -> None:
    layer = packed_layer(has_bias=True)
    state = layer.state_dict()
    layer.load_weights({name: t for name, t in state.items() if "routed_experts" in name})
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, state[name])


# --- the module -----------------------------------------------------------------------------------


def test_its_repr_says_so() -> None:
    layer = packed_layer()
    assert "activation=silu, packed)" in repr(layer.routed_experts)
    cmoe.unpack_weights(layer)
    assert "packed" not in repr(layer)


def test_fresh_weights_stay_packed() -> None:
    experts = packed_experts(has_bias=True)
    pointer = experts.w13_weight.data_ptr()
    experts.reset_parameters()
    assert (dims(experts), experts.w13_weight.data_ptr()) == ([5, 5], pointer)
    assert 0.015 < experts.w13_weight.std() < 0.025
    assert not experts.w2_bias.any()
    assert experts.activation_dtype() == torch.float32


def test_gradients_of_the_input() -> None:
    layer, (x, logits) = packable_layer(), inputs(7)
    grads = []
    for _ in range(2):
        given = x.clone().requires_grad_(), logits.clone().requires_grad_()
        layer(*given).square().sum().backward()
        grads.append([tensor.grad for tensor in given])
        cmoe.pack_weights(layer)
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_gradients_of_packed_weights_are_packed() -> None:
    layer, call = packable_layer(), inputs(7)
    other = copy.deepcopy(layer)
    cmoe.pack_weights(other)
    for each in (layer, other):
        each.requires_grad_()
        each(*call).square().sum().backward()
    for name in MATRICES:
        plain, packed = (getattr(each.routed_experts, name).grad for each in (layer, other))
        assert torch.equal(unpack(packed), plain)


def test_functional_call() -> None:
    layer, call = packed_layer(), inputs(7)
    other = packable_layer("b")
    expected = other(*call)
    with torch.no_grad():
        assert torch.equal(functional_call(layer, other.state_dict(), call), expected)
        cmoe.pack_weights(other)
        packed = dict(other.named_parameters())
        assert torch.equal(functional_call(layer, packed, call), expected)
        cmoe.unpack_weights(layer)
        assert torch.equal(functional_call(layer, packed, call), expected)
    message = "w13 and w2 must be both packed or both as checkpoints have them"
    with pytest.raises(ValueError, match=message):
        functional_call(
            layer, {"routed_experts.w2_weight": packed["routed_experts.w2_weight"]}, call
        )


# --- compiled, exported ---------------------------------------------------------------------------


@pytest.mark.parametrize("transparent", [False, True])
@torch.no_grad()
def test_a_compiled_layer_is_compiled_once_more(
    transparent: bool, count_compiles: Callable[[], int]
) -> None:
    layer = packable_layer()
    layer.transparent = transparent
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for step, function in enumerate((None, cmoe.pack_weights, cmoe.unpack_weights)):
        if function is not None:
            function(layer)
        for num_tokens in (7, 3):
            call = inputs(num_tokens)
            torch.testing.assert_close(compiled(*call), layer(*call))
        assert count_compiles() <= step + 1
    # The second layout is the last that is new: graphs of a layout are found again.
    assert count_compiles() == 2


@torch.no_grad()
def test_packed_layers_share_a_graph(count_compiles: Callable[[], int]) -> None:
    layers, call = [packed_layer(f"layers.{number}") for number in range(3)], inputs(7)
    for layer in layers:
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*call), layer(*call))
    assert count_compiles() == 1


@torch.no_grad()
def test_a_packed_layer_is_exported() -> None:
    layer, call = packed_layer(), inputs(7)
    program = torch.export.export(layer, call)
    assert torch.equal(program.module()(*call), layer(*call))
    assert program.state_dict["routed_experts.w2_weight"].dim() == 5


# --- the cpu backend ------------------------------------------------------------------------------


def _cpu_refuses() -> str:
    spec = LayerSpec(
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        num_experts=5,
        top_k=2,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        activation="silu",
    )
    return "; ".join(explain_backends(spec)["cpu"])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 40])
@torch.no_grad()
def test_the_cpu_kernels_read_packed_weights(num_tokens: int, compiled: bool) -> None:
    if reason := _cpu_refuses():
        pytest.skip(reason)
    layer = packable_layer(backend="cpu", params_dtype=torch.bfloat16)
    plain = copy.deepcopy(layer)
    cmoe.pack_weights(layer)
    x, logits = x_of(num_tokens, width=HIDDEN, dtype=torch.bfloat16), logits_of(num_tokens)
    call = torch.compile(layer, fullgraph=True) if compiled else layer
    assert_exact(plain, call(x, logits), x, logits)


def test_the_cpu_backend_says_what_it_does_not_pack() -> None:
    if reason := _cpu_refuses():
        pytest.skip(reason)
    layer = packable_layer(backend="cpu", hidden_size=80)
    message = (
        r"backend cpu reads packed weights of bfloat16, not of torch\.float32; "
        r"backend cpu packs by 32, of which hidden_size \(80\) is no multiple"
    )
    with pytest.raises(UnsupportedError, match=message):
        cmoe.pack_weights(layer)
