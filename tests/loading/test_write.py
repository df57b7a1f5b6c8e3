"""One write: dtypes that clash, memory that is written over, values that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

import cmoe
from cmoe import LoadError
from tests.layers import config_of, expert_tensors, x_of

Tensors = dict[str, Tensor]
HOWS: tuple[Callable[[Tensors], Any], ...] = (dict, lambda tensors: iter(tensors.items()))


def experts_of(**changes: Any) -> cmoe.RoutedExperts:
    return cmoe.RoutedExperts(config_of(**changes))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    ],
)
def test_codes_are_no_weights(dtype: torch.dtype, how: Callable[[Tensors], Any]) -> None:
    experts = experts_of()
    tensors = expert_tensors(experts.config)
    tensors["experts.1.up_proj.weight"] = torch.ones(8, 16).to(dtype)
    message = rf"up_proj\.weight has dtype {dtype}; its place has torch\.float32; it takes float"
    with pytest.raises(LoadError, match=message):
        experts.load_weights(how(tensors))


@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_wide_floats_are_converted(source: torch.dtype, target: torch.dtype) -> None:
    experts = experts_of(params_dtype=target)
    tensors = {name: t.to(source) for name, t in expert_tensors(experts.config).items()}
    experts.load_weights(tensors)
    assert torch.equal(experts.w2_weight[3], tensors["experts.3.down_proj.weight"].to(target))


# --- memory ---------------------------------------------------------------------------------------


def own_views(experts: cmoe.RoutedExperts, order: Iterable[int]) -> Tensors:
    """The layer's own weights as a per-expert checkpoint, the experts in another order."""
    views = {}
    for expert, own in enumerate(order):
        w1, w3 = experts.w13_weight.data[own].chunk(2)
        views[f"experts.{expert}.gate_proj.weight"] = w1
        views[f"experts.{expert}.up_proj.weight"] = w3
        views[f"experts.{expert}.down_proj.weight"] = experts.w2_weight.data[own]
    return views


@pytest.mark.parametrize("how", HOWS)
def test_a_layer_may_be_loaded_from_itself(how: Callable[[Tensors], Any]) -> None:
    experts = experts_of()
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    native = {f"experts.{name}": tensor for name, tensor in experts.state_dict().items()}
    for tensors in (own_views(experts, range(5)), native):
        experts.load_weights(how(tensors))
        for name, tensor in experts.state_dict().items():
            assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("how", HOWS)
def test_sources_that_are_written_over_are_refused(how: Callable[[Tensors], Any]) -> None:
    experts = experts_of()
    views = own_views(experts, [1, 2, 3, 4, 0])
    copies = {name: view.clone() for name, view in views.items()}
    with pytest.raises(LoadError, match=r"shares memory with the layer's own weights.*clone"):
        experts.load_weights(how(views))
    experts.load_weights(how(copies))
    assert torch.equal(experts.w2_weight[4], copies["experts.4.down_proj.weight"])


def test_a_mapping_with_such_sources_writes_nothing() -> None:
    experts = experts_of()
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    with pytest.raises(LoadError, match="shares memory"):
        experts.load_weights(own_views(experts, [1, 0, 2, 3, 4]), strict=False)
    for name, tensor in experts.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_other_bytes_of_the_same_storage_are_no_overlap() -> None:
    """A model may keep all its parameters in one flat buffer."""
    experts = experts_of()
    size = experts.w2_weight.numel()
    flat = torch.randn(2 * size)
    experts.w2_weight.data = flat[:size].view_as(experts.w2_weight)
    tensors = own_views(experts, range(5))
    for expert in range(5):
        tensors[f"experts.{expert}.down_proj.weight"] = flat[size:].view(5, 16, 8)[expert]
    experts.load_weights(tensors)
    assert torch.equal(flat[:size], flat[size:])


def test_the_same_memory_as_another_dtype_is_refused() -> None:
    experts = experts_of(params_dtype=torch.bfloat16)
    views = own_views(experts, range(5))
    views["experts.0.down_proj.weight"] = experts.w2_weight.data[0].view(torch.float16)
    with pytest.raises(LoadError, match=r"0\.down_proj\.weight shares memory"):
        experts.load_weights(views)


# --- values that do not fit -----------------------------------------------------------------------

TOO_LARGE = [
    (torch.float16, torch.float32, 65520.0),
    (torch.float16, torch.float32, -1e6),
    (torch.float16, torch.bfloat16, 1e5),
    (torch.bfloat16, torch.float32, 3.4e38),
    (torch.float32, torch.float64, 1e300),
]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("target", "source", "value"), TOO_LARGE)
def test_what_becomes_infinite_is_an_error(
    target: torch.dtype, source: torch.dtype, value: float, how: Callable[[Tensors], Any]
) -> None:
    experts = experts_of(params_dtype=target)
    tensors = {name: t.to(source) for name, t in expert_tensors(experts.config).items()}
    tensors["experts.2.up_proj.weight"][3, 5] = value
    key = "experts.2.up_proj.weight"
    with pytest.raises(LoadError, match=rf"became infinite in {key}: load into a layer of bfloat"):
        experts.load_weights(how(tensors))
    report = experts.load_weights(how(tensors), strict=False)
    assert report.keys_overflowed == (key,)


@pytest.mark.parametrize("value", [65504.0, 65519.0, torch.inf, -torch.inf, torch.nan])
def test_what_fits_or_was_infinite_before_is_none(value: float) -> None:
    experts = experts_of(params_dtype=torch.float16)
    tensors = expert_tensors(experts.config)
    tensors["experts.2.up_proj.weight"][3, 5] = value
    assert experts.load_weights(tensors).keys_overflowed == ()


def test_a_nan_beside_it_hides_nothing() -> None:
    experts = experts_of(params_dtype=torch.float16)
    tensors = expert_tensors(experts.config)
    tensors["experts.2.up_proj.weight"][3, 4:6] = torch.tensor([torch.nan, 1e6])
    with pytest.raises(LoadError, match="became infinite"):
        experts.load_weights(tensors)


def test_a_block_reports_its_gate_too() -> None:
    config = config_of(params_dtype=torch.float16)
    gate = cmoe.GateLinear(16, 5, dtype=torch.float16)
    layer = cmoe.FusedMoE(config, "mlp", gate=gate)
    tensors = expert_tensors(config) | {"gate.weight": 1e9 * x_of(5)}
    with pytest.raises(LoadError, match=r"became infinite in gate\.weight"):
        layer.load_weights(tensors)
