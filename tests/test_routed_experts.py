"""The expert weights: how checkpoints get in, what is refused."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmoe
from cmoe.custom_ops.backends import (
    Backend,
    Kernels,
    LayerSpec,
    register_backend,
    unregister_backend,
)
from cmoe.custom_ops.route import route
from cmoe.routing import Routing
from tests.layers import config_of, expert_tensors, has_nan, layer_of, logits_of, poison, x_of

Tensors = dict[str, Tensor]

PREFIXES = ["", "mlp.", "model.layers.0.mlp.", "a.b.c.d."]


def experts_of(**changes: Any) -> cmoe.RoutedExperts:
    """Poisoned: what a load leaves out is NaN."""
    experts = cmoe.RoutedExperts(config_of(**changes))
    poison(experts)
    return experts


def assert_holds(experts: cmoe.RoutedExperts, tensors: Tensors) -> None:
    """The per-expert tensors lie in the parameters, gate rows ahead of up rows, zeros behind."""
    config = experts.config
    hidden, intermediate = config.hidden_size, config.intermediate_size
    step, gated = config.padded_intermediate_size(), config.activation.is_gated()
    kinds = {"weight": hidden, "bias": None} if config.has_bias else {"weight": hidden}
    expected = {name: torch.zeros_like(p) for name, p in experts.named_parameters()}
    for expert in range(config.num_experts):
        for kind, width in kinds.items():
            parts = {0: "gate_proj", step: "up_proj"} if gated else {0: "up_proj"}
            for start, part in parts.items():
                rows = expected[f"w13_{kind}"][expert, start : start + intermediate]
                source = tensors[f"experts.{expert}.{part}.{kind}"]
                (rows if width is None else rows[:, :width]).copy_(source)
            down = tensors[f"experts.{expert}.down_proj.{kind}"]
            rows = expected[f"w2_{kind}"][expert, :hidden]
            (rows if width is None else rows[:, :intermediate]).copy_(down)
    for name, parameter in experts.named_parameters():
        assert torch.equal(parameter, expected[name].to(parameter.dtype)), name


def stacked(tensors: Tensors, name: str, kind: str = "weight") -> Tensor:
    number = len({key.split(".")[1] for key in tensors})
    return torch.stack([tensors[f"experts.{e}.{name}.{kind}"] for e in range(number)])


def fused(tensors: Tensors, *, transposed: bool, interleaved: bool, suffix: str = "") -> Tensors:
    """The same weights as `gate_up_proj`, `down_proj` of all experts."""

    def gate_up(kind: str) -> Tensor:
        gate, up = (stacked(tensors, name, kind) for name in ("gate_proj", "up_proj"))
        if interleaved:
            return torch.stack([gate, up], 2).flatten(1, 2)
        return torch.cat([gate, up], 1)

    result = {"gate_up_proj": gate_up("weight"), "down_proj": stacked(tensors, "down_proj")}
    if transposed:
        result = {name: t.transpose(1, 2).contiguous() for name, t in result.items()}
    result = {f"{name}{suffix}": tensor for name, tensor in result.items()}
    if "experts.0.up_proj.bias" in tensors:
        result["gate_up_proj_bias"] = gate_up("bias")
        result["down_proj_bias"] = stacked(tensors, "down_proj", "bias")
    return {f"experts.{name}": tensor for name, tensor in result.items()}


def per_expert_fused(tensors: Tensors) -> Tensors:
    number = len({key.split(".")[1] for key in tensors})
    result = {key: t for key, t in tensors.items() if "down_proj" in key}
    for e in range(number):
        parts = [tensors[f"experts.{e}.{name}.weight"] for name in ("gate_proj", "up_proj")]
        result[f"experts.{e}.gate_up_proj.weight"] = torch.cat(parts)
    return result


def renamed(tensors: Tensors, **names: str) -> Tensors:
    for old, new in names.items():
        tensors = {key.replace(f".{old}.", f".{new}."): t for key, t in tensors.items()}
    return tensors


def prefixed(tensors: Tensors, prefix: str) -> Tensors:
    return {f"{prefix}{key}": tensor for key, tensor in tensors.items()}


def checked_load(experts: cmoe.RoutedExperts, tensors: Tensors, **options: Any) -> None:
    """Every key used, every slot written, no NaN left."""
    report = experts.load_weights(tensors, **options)
    assert sorted(report.keys_used) == sorted(tensors)
    assert sorted(report.slots_written) == sorted(experts.slots())
    assert (report.keys_without_home, report.slots_unwritten) == ((), ())
    assert not has_nan(experts)


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("size_multiple", [1, 12])
def test_per_expert_tensors(prefix: str, has_bias: bool, size_multiple: int) -> None:
    quant = cmoe.QuantConfig(size_multiple=size_multiple)
    experts = experts_of(has_bias=has_bias, quant=quant)
    tensors = expert_tensors(experts.config)
    checked_load(experts, prefixed(tensors, prefix))
    assert_holds(experts, tensors)


def test_mixtral_names() -> None:
    experts = experts_of()
    tensors = expert_tensors(experts.config)
    names = renamed(tensors, gate_proj="w1", up_proj="w3", down_proj="w2")
    checked_load(experts, prefixed(names, "block_sparse_moe."))
    assert_holds(experts, tensors)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("prefix", "suffix"), [("", ""), ("model.layers.3.mlp.", ".weight")])
@pytest.mark.parametrize("sizes", [(12, 10), (8, 4), (8, 8)], ids=str)
def test_fused_tensors(
    sizes: tuple[int, int], transposed: bool, interleaved: bool, prefix: str, suffix: str
) -> None:
    """With 2I = H, or with I = H, the shape does not tell the orientation."""
    layout = cmoe.CheckpointLayout(transposed=transposed, interleaved=interleaved)
    experts = experts_of(
        hidden_size=sizes[0], intermediate_size=sizes[1], has_bias=True, layout=layout
    )
    tensors = expert_tensors(experts.config)
    given = fused(tensors, transposed=transposed, interleaved=interleaved, suffix=suffix)
    checked_load(experts, prefixed(given, prefix))
    assert_holds(experts, tensors)


@pytest.mark.parametrize(("sizes", "name"), [((8, 4), "gate_up_proj"), ((8, 8), "down_proj")])
def test_an_undeclared_layout_is_never_guessed(sizes: tuple[int, int], name: str) -> None:
    experts = experts_of(hidden_size=sizes[0], intermediate_size=sizes[1])
    given = fused(expert_tensors(experts.config), transposed=False, interleaved=False)
    with pytest.raises(cmoe.LoadError, match=rf"experts\.{name}: both orientations .* declare"):
        experts.load_weights(given)


@pytest.mark.parametrize("transposed", [False, True])
def test_an_undeclared_layout_that_only_fits_one_way_is_right(transposed: bool) -> None:
    experts = experts_of(hidden_size=12, intermediate_size=10)
    tensors = expert_tensors(experts.config)
    checked_load(experts, fused(tensors, transposed=transposed, interleaved=False))
    assert_holds(experts, tensors)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (False, r"\(5, 20, 12\) \(declared as not transposed\)"),
        (True, r"\(5, 12, 20\) \(declared transposed\)"),
    ],
)
def test_the_other_orientation_is_an_error(declared: bool, message: str) -> None:
    layout = cmoe.CheckpointLayout(transposed=declared)
    experts = experts_of(hidden_size=12, intermediate_size=10, layout=layout)
    given = fused(expert_tensors(experts.config), transposed=not declared, interleaved=False)
    with pytest.raises(cmoe.LoadError, match=rf"gate_up_proj: shape .* should be {message}"):
        experts.load_weights(given)


def test_a_shape_of_neither_orientation() -> None:
    experts = experts_of(hidden_size=12, intermediate_size=10)
    given = {"experts.gate_up_proj": torch.zeros(5, 12, 10)}
    with pytest.raises(cmoe.LoadError, match=r"should be \(5, 20, 12\) \(or \(5, 12, 20\)\)"):
        experts.load_weights(given)


@pytest.mark.parametrize("transposed", [None, True])
def test_a_declared_layout_is_that_of_fused_tensors(transposed: bool | None) -> None:
    """Tensors of single experts lie as nn.Linear has them."""
    experts = experts_of(layout=cmoe.CheckpointLayout(transposed=transposed))
    tensors = expert_tensors(experts.config)
    checked_load(experts, tensors)
    assert_holds(experts, tensors)


def test_fused_tensors_of_one_projection_each() -> None:
    experts = experts_of(layout=cmoe.CheckpointLayout(transposed=False))
    tensors = expert_tensors(experts.config)
    names = ("gate_proj", "up_proj", "down_proj")
    checked_load(experts, {f"experts.{name}.weight": stacked(tensors, name) for name in names})
    assert_holds(experts, tensors)


def test_gate_and_up_fused_per_expert() -> None:
    experts = experts_of()
    tensors = expert_tensors(experts.config)
    checked_load(experts, prefixed(per_expert_fused(tensors), "mlp."))
    assert_holds(experts, tensors)


@pytest.mark.parametrize("layout", ["per expert", "fused"])
def test_without_a_gate(layout: str) -> None:
    """The up projection is all there is: a list of names that expects a gate loses it."""
    experts = experts_of(
        activation="relu2_no_mul", has_bias=True, layout=cmoe.CheckpointLayout(transposed=False)
    )
    tensors = expert_tensors(experts.config)
    tensors = {key: t for key, t in tensors.items() if "gate_proj" not in key}
    given = tensors
    if layout == "fused":
        given = {
            f"experts.{name}{suffix}": stacked(tensors, name, kind)
            for name in ("up_proj", "down_proj")
            for kind, suffix in {"weight": "", "bias": "_bias"}.items()
        }
    checked_load(experts, given)
    assert_holds(experts, tensors)


def test_without_a_gate_a_gate_is_an_error() -> None:
    experts = experts_of(activation="relu2_no_mul")
    message = r"experts\.0\.up_proj\.weight: w13_weight\[0\]\.w1 is filled by .*gate_proj"
    with pytest.raises(cmoe.LoadError, match=message):
        experts.load_weights(expert_tensors(experts.config))


@pytest.mark.parametrize("where", ["", "routed_experts.", "mlp.experts.routed_experts."])
def test_native_names_are_always_in_native_layout(where: str) -> None:
    layout = cmoe.CheckpointLayout(transposed=True, interleaved=True)
    experts = experts_of(has_bias=True, layout=layout, quant=cmoe.QuantConfig(size_multiple=12))
    tensors = expert_tensors(experts.config)
    source = cmoe.RoutedExperts(experts.config)
    source.load_weights(tensors)
    given = prefixed(source.state_dict(), where or "experts.")
    checked_load(experts, given)
    assert_holds(experts, tensors)


def test_native_tensors_with_garbage_in_the_padding() -> None:
    experts = experts_of(quant=cmoe.QuantConfig(size_multiple=12), has_bias=True)
    source = cmoe.RoutedExperts(experts.config)
    tensors = expert_tensors(experts.config)
    poison(source)
    source.load_weights(tensors)
    given = source.state_dict()
    for name, tensor in given.items():
        tensor[tensor == 0] = 7.0
        assert (tensor == 7.0).any(), name
    experts.load_weights(prefixed(given, "experts."))
    assert_holds(experts, tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_loading_casts_to_the_dtype_of_the_layer(dtype: torch.dtype) -> None:
    experts = experts_of(params_dtype=torch.bfloat16)
    tensors = {key: t.to(dtype) for key, t in expert_tensors(experts.config).items()}
    checked_load(experts, tensors)
    assert_holds(experts, tensors)
    assert {p.dtype for p in experts.parameters()} == {torch.bfloat16}


def test_sources_may_have_any_strides_and_ask_for_gradients() -> None:
    experts = experts_of()
    tensors = expert_tensors(experts.config)
    strided = {k: t.t().contiguous().t().requires_grad_() for k, t in tensors.items()}
    checked_load(experts, strided)
    assert_holds(experts, tensors)
    assert not any(p.requires_grad for p in experts.parameters())


# --- again ----------------------------------------------------------------------------------------


LAYOUTS: dict[str, Callable[[Tensors], Tensors]] = {
    "per expert": lambda tensors: tensors,
    "fused": lambda tensors: fused(tensors, transposed=True, interleaved=True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size_multiple", [1, 12])
def test_loading_again(layout: str, size_multiple: int) -> None:
    """Load A, load B, load A: each as in a fresh layer, in storage that does not move."""
    changes = {
        "layout": cmoe.CheckpointLayout(transposed=True, interleaved=True),
        "quant": cmoe.QuantConfig(size_multiple=size_multiple),
        "has_bias": True,
    }
    experts = experts_of(**changes)
    a, b = (LAYOUTS[layout](expert_tensors(experts.config)) for _ in "ab")
    kept = [tensor.data_ptr() for tensor in [*experts.parameters(), *experts.buffers()]]
    for tensors in (a, b, a, a):
        checked_load(experts, tensors)
        fresh = experts_of(**changes)
        fresh.load_weights(tensors)
        for loaded, expected in zip(experts.parameters(), fresh.parameters(), strict=True):
            assert torch.equal(loaded, expected)
    assert kept == [tensor.data_ptr() for tensor in [*experts.parameters(), *experts.buffers()]]


@pytest.mark.parametrize("how", ["mapping", "iterator"])
def test_mapping_and_iterator_are_one(how: str) -> None:
    experts = experts_of()
    tensors = expert_tensors(experts.config)
    checked = experts.load_weights(tensors if how == "mapping" else iter(tensors.items()))
    assert sorted(checked.keys_used) == sorted(tensors)
    assert_holds(experts, tensors)


def test_an_iterator_is_read_one_tensor_at_a_time() -> None:
    """A checkpoint may be larger than the memory."""
    experts = experts_of()
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in expert_tensors(experts.config).items():
            own = tensor.clone()
            given.append(weakref.ref(own))
            yield name, own
            del own
            alive.append(sum(reference() is not None for reference in given))

    experts.load_weights(stream())
    assert len(alive) == 15
    assert max(alive) <= 1


# --- what is refused ------------------------------------------------------------------------------


def without(tensors: Tensors, *keys: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key not in keys}


FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no home": (
        lambda t: t | {"experts.0.gate_proj.weight_scale_inv": torch.ones(1)},
        r"no home for experts\.0\.gate_proj\.weight_scale_inv",
    ),
    "no home at all": (
        lambda t: t | {"self_attn.q_proj.weight": torch.ones(1)},
        r"no home for self_attn\.q_proj\.weight",
    ),
    "a bias": (
        lambda t: t | {"experts.0.gate_proj.bias": torch.ones(8)},
        r"no home for experts\.0\.gate_proj\.bias",
    ),
    "shared experts": (
        lambda t: t | {"shared_experts.gate_proj.weight": torch.ones(8, 16)},
        r"no home for shared_experts\.gate_proj\.weight",
    ),
    "nothing": (
        lambda t: {},
        r"missing experts\.0\.down_proj\.weight \(for w2_weight\[0\]\), .* with 3 more",
    ),
    "a gate missing": (
        lambda t: without(t, "experts.3.gate_proj.weight"),
        r"missing experts\.3\.gate_proj\.weight \(for w13_weight\[3\]\.w1\)$",
    ),
    "an up missing": (
        lambda t: without(t, "experts.3.up_proj.weight"),
        r"missing experts\.3\.up_proj\.weight \(for w13_weight\[3\]\.w3\)$",
    ),
    "a down missing": (
        lambda t: without(t, "experts.4.down_proj.weight"),
        r"missing experts\.4\.down_proj\.weight \(for w2_weight\[4\]\)$",
    ),
    "both": (
        lambda t: renamed(t, up_proj="upper_proj"),
        r"no home for experts\.0\.upper_proj.*; missing experts\.0\.up_proj\.weight",
    ),
    "an expert too many": (
        lambda t: t | {"experts.5.gate_proj.weight": torch.ones(8, 16)},
        r"experts\.5\.gate_proj\.weight: this layer has 5 experts",
    ),
    "shape": (
        lambda t: t | {"experts.1.up_proj.weight": torch.ones(8, 15)},
        r"experts\.1\.up_proj\.weight: shape \(8, 15\) should be \(8, 16\)$",
    ),
    "fused shape": (
        lambda t: {"experts.gate_up_proj": torch.ones(5, 3, 16)},
        r"both orientations|should be \(5, 16, 16\)",
    ),
    "native shape": (
        lambda t: {"experts.w13_weight": torch.ones(5, 3, 16)},
        r"w13_weight: shape \(5, 3, 16\) should be \(5, 16, 16\)",
    ),
    "dtype": (
        lambda t: t | {"experts.1.up_proj.weight": torch.ones(8, 16, dtype=torch.uint8)},
        r"experts\.1\.up_proj\.weight has dtype torch\.uint8",
    ),
    "twice": (
        lambda t: prefixed(t, "layers.0.mlp.") | prefixed(t, "layers.1.mlp."),
        r"layers\.1\.mlp\.experts\.0.* is filled by layers\.0\.mlp\.experts\.0",
    ),
    "twice, in two layouts": (
        lambda t: t | {"experts.w2_weight": torch.ones(5, 16, 8)},
        r"experts\.w2_weight: w2_weight\[0\] is filled by experts\.0\.down_proj\.weight already",
    ),
    "without values": (
        lambda t: t | {"experts.1.up_proj.weight": torch.empty(8, 16, device="meta")},
        r"experts\.1\.up_proj\.weight: a tensor on the meta device has no values",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_mapping_writes_nothing(fault: str) -> None:
    change, message = FAULTS[fault]
    experts = cmoe.RoutedExperts(config_of())
    before = copy.deepcopy(experts.state_dict())
    with pytest.raises(cmoe.LoadError, match=message):
        experts.load_weights(change(expert_tensors(experts.config)))
    for name, tensor in experts.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_iterator_is_an_error(fault: str) -> None:
    change, message = FAULTS[fault]
    experts = cmoe.RoutedExperts(config_of())
    with pytest.raises(cmoe.LoadError, match=message.removesuffix("$")):
        experts.load_weights(iter(change(expert_tensors(experts.config)).items()))


def test_a_load_that_stops_midway_says_that_something_is_written() -> None:
    experts = cmoe.RoutedExperts(config_of())
    tensors = list(expert_tensors(experts.config).items())
    with pytest.raises(cmoe.LoadError, match=r"partly written: load again, or pass a dict"):
        experts.load_weights(iter(tensors[:-1]))
    with pytest.raises(cmoe.LoadError) as error:
        experts.load_weights(iter([("nothing.of.mine", torch.ones(3))]))
    assert "partly written" not in str(error.value)


@pytest.mark.parametrize("fault", ["shape", "dtype", "twice", "an expert too many"])
def test_what_does_not_fit_is_an_error_without_strict_too(fault: str) -> None:
    change, message = FAULTS[fault]
    experts = cmoe.RoutedExperts(config_of())
    with pytest.raises(cmoe.LoadError, match=message):
        experts.load_weights(change(expert_tensors(experts.config)), strict=False)


@pytest.mark.parametrize("how", [dict, lambda tensors: iter(tensors.items())])
def test_a_lenient_load_reports(how: Callable[[Tensors], Any]) -> None:
    experts = experts_of()
    tensors = without(expert_tensors(experts.config), "experts.3.gate_proj.weight")
    report = experts.load_weights(how(tensors | {"lm_head.weight": x_of(2)}), strict=False)
    assert report.keys_without_home == ("lm_head.weight",)
    assert report.slots_unwritten == ("w13_weight[3].w1",)
    assert sorted(report.keys_used) == sorted(tensors)
    assert set(report.slots_written) == set(experts.slots()) - {"w13_weight[3].w1"}
    assert experts.w13_weight[3, :8].isnan().all()
    assert not experts.w13_weight[3, 8:].isnan().any()


def test_a_layer_on_the_meta_device_says_what_to_do() -> None:
    with torch.device("meta"):
        experts = cmoe.RoutedExperts(config_of())
    with pytest.raises(cmoe.LoadError, match=r"on the meta device; call to_empty\(device=\.\.\.\)"):
        experts.load_weights(expert_tensors(experts.config))


def test_a_load_can_be_rehearsed_on_the_meta_device() -> None:
    with torch.device("meta"):
        experts = cmoe.RoutedExperts(config_of())
        report = experts.load_weights(expert_tensors(experts.config))
    assert sorted(report.slots_written) == sorted(experts.slots())


# --- the module -----------------------------------------------------------------------------------


def test_fresh_weights_have_zeros_behind_the_logical_sizes() -> None:
    quant = cmoe.QuantConfig(size_multiple=12)
    experts = cmoe.RoutedExperts(config_of(quant=quant, has_bias=True))
    assert experts.w13_weight.shape == (5, 24, 24)
    assert not experts.w13_weight[:, :, 16:].any()
    assert not experts.w13_weight[:, 8:12].any()
    assert not experts.w13_weight[:, 20:].any()
    assert not experts.w2_weight[:, 16:].any()
    assert not experts.w2_weight[:, :, 8:].any()
    assert experts.w13_weight[:, :8, :16].all()
    assert experts.w13_weight[:, 12:20, :16].all()
    assert experts.w2_weight[:, :16, :8].all()
    assert not experts.w13_bias.any()


def experts_on_rank_1() -> cmoe.RoutedExperts:
    return cmoe.RoutedExperts(config_of(parallel=cmoe.ParallelConfig(ep_size=2, ep_rank=1)))


MAP = [-1, -1, -1, 0, 1]


def test_a_rank_loads_its_own_experts() -> None:
    experts = experts_on_rank_1()
    poison(experts)
    tensors = expert_tensors(experts.config)
    report = experts.load_weights(tensors)
    assert sorted(report.keys_used) == sorted(tensors)
    assert experts.w13_weight.shape[0] == 2
    assert torch.equal(experts.w2_weight[1], tensors["experts.4.down_proj.weight"])
    assert not has_nan(experts)
    for strict in (False, True):
        fused_tensors = fused(tensors, transposed=False, interleaved=False)
        layout = cmoe.CheckpointLayout(transposed=False)
        other = cmoe.RoutedExperts(config_of(parallel=experts.config.parallel, layout=layout))
        other.load_weights(fused_tensors, strict=strict)
        assert torch.equal(other.w13_weight, experts.w13_weight)


MOVES: dict[str, Callable[[cmoe.RoutedExperts], cmoe.RoutedExperts]] = {
    "as built": lambda experts: experts,
    "double": lambda experts: experts.double(),
    "type": lambda experts: experts.type(torch.float64),
    "to_empty": lambda experts: experts.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda experts: pickle.loads(pickle.dumps(experts)),
}


@pytest.mark.parametrize("how", MOVES)
def test_the_expert_map_is_always_there(how: str) -> None:
    experts = MOVES[how](experts_on_rank_1())
    assert experts.expert_map.dtype == torch.int32
    assert experts.expert_map.tolist() == MAP
    assert "expert_map" not in experts.state_dict()


def test_its_repr_says_sizes() -> None:
    expected = "num_experts=5, top_k=2, hidden_size=16, intermediate_size=8, activation=silu"
    assert expected in repr(cmoe.RoutedExperts(config_of()))


def test_parameters_ask_for_no_gradient_until_told() -> None:
    experts = cmoe.RoutedExperts(config_of(has_bias=True))
    assert not any(p.requires_grad for p in experts.parameters())
    assert all(p.requires_grad for p in experts.requires_grad_().parameters())


def test_one_quant_method_is_found_by_those_who_walk_modules() -> None:
    layer = cmoe.FusedMoE(config_of(), "mlp")
    found = [name for name, module in layer.named_modules() if hasattr(module, "quant_method")]
    assert found == ["routed_experts"]


# --- what others do to a module -------------------------------------------------------------------


class Doubled(nn.Module):
    """A parametrization, as adapters register one."""

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@pytest.mark.parametrize("name", ["w13_weight", "w2_weight"])
def test_a_parametrized_weight_is_computed_from(name: str) -> None:
    layer = layer_of()
    x, logits = x_of(7), logits_of(7)
    expected = copy.deepcopy(layer)
    with torch.no_grad():
        getattr(expected.routed_experts, name).mul_(2)
    nn.utils.parametrize.register_parametrization(layer.routed_experts, name, Doubled())
    assert torch.equal(layer(x, logits), expected(x, logits))


def test_a_parametrized_weight_cannot_be_loaded() -> None:
    experts = experts_of()
    nn.utils.parametrize.register_parametrization(experts, "w2_weight", Doubled())
    with pytest.raises(cmoe.LoadError, match=r"w2_weight is computed by a parametrization.*remove"):
        experts.load_weights(expert_tensors(experts.config))


class Float64Only(Backend):
    """Its experts give zeros, so that a call of them shows."""

    name = "float64-only"

    def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
        return () if spec.dtype == torch.float64 else ("takes float64",)

    def kernels(self) -> Kernels:
        return Kernels(lambda x, *arguments: torch.zeros_like(x), route)


def test_assigned_weights_choose_their_kernels_anew() -> None:
    register_backend(Float64Only())
    try:
        experts = cmoe.RoutedExperts(config_of())
        other = cmoe.RoutedExperts(config_of(params_dtype=torch.float64))
        routing = Routing(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int32))
        assert experts(x_of(3), routing).count_nonzero()
        experts.load_state_dict(other.state_dict(), assign=True)
        assert not experts(x_of(3, dtype=torch.float64), routing).count_nonzero()
    finally:
        unregister_backend(Float64Only.name)
