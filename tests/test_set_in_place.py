"""What a user sets in the place of a part's code is run, by every backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import cmoe
from cmoe.custom_ops.backends import Kernels
from cmoe.router.topk import TopKRouter
from cmoe.routing import Routing
from cmoe.runner_interface import MoEOutput
from tests.layers import config_of, layer_of, logits_of, x_of

BACKENDS = ("auto", "reference")


def zero(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its result times zero."""

    def zeroed(*arguments: Any) -> Any:
        result = function(*arguments)
        if isinstance(result, MoEOutput):
            return result._replace(routed=result.routed * 0)
        if isinstance(result, Routing):
            return result._replace(topk_weights=result.topk_weights * 0)
        if isinstance(result, tuple):
            return result[0] * 0, *result[1:]
        return result * 0

    return zeroed


def _forward_impl(layer: cmoe.MoERunner) -> None:
    layer.forward_impl = zero(layer.forward_impl)  # type: ignore[method-assign]


def _route(layer: cmoe.MoERunner) -> None:
    kernels = layer.routed_experts.kernels
    layer.router.use_kernels(kernels._replace(route=zero(kernels.route)))


def _fused_experts(layer: cmoe.MoERunner) -> None:
    kernels = layer.routed_experts.kernels
    layer.routed_experts.kernels = kernels._replace(fused_experts=zero(kernels.fused_experts))


def _apply(layer: cmoe.MoERunner) -> None:
    method = layer.routed_experts.quant_method
    method.apply = zero(method.apply)  # type: ignore[method-assign]


def _combine(layer: cmoe.MoERunner) -> None:
    layer.dispatcher.combine = zero(layer.dispatcher.combine)  # type: ignore[method-assign]


def _experts_forward(layer: cmoe.MoERunner) -> None:
    layer.routed_experts.forward = zero(layer.routed_experts.forward)  # type: ignore[method-assign]


SETTINGS = (_forward_impl, _route, _fused_experts, _apply, _combine, _experts_forward)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda f: f.__name__)
def test_on_an_instance(setting: Callable[[cmoe.MoERunner], None], backend: str) -> None:
    layer = layer_of(config_of(backend=backend))
    assert layer(x_of(5), logits_of(5)).any()
    setting(layer)
    assert not layer(x_of(5), logits_of(5)).any()


@pytest.mark.parametrize("owner", [cmoe.RoutedExperts, TopKRouter])
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_class(owner: type[nn.Module], backend: str) -> None:
    layer = layer_of(config_of(backend=backend))
    with mock.patch.object(owner, "forward", zero(owner.forward)):
        assert not layer(x_of(5), logits_of(5)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_a_replacement(backend: str) -> None:
    class Silent(cmoe.MoERunner):
        def forward_impl(self, inputs: Any, shared_experts_input: Tensor | None) -> MoEOutput:
            output = super().forward_impl(inputs, shared_experts_input)
            return output._replace(routed=output.routed * 0)

    with cmoe.MoERunner.replaced_by(Silent):
        layer = layer_of(config_of(backend=backend))
    assert not layer(x_of(5), logits_of(5)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_router_s_own_kernel(backend: str) -> None:
    class Silent(TopKRouter):
        def use_kernels(self, kernels: Kernels) -> None:
            super().use_kernels(kernels._replace(route=zero(kernels.route)))

    layer = layer_of(config_of(backend=backend))
    layer.router = Silent(layer.config)
    layer.router.use_kernels(layer.routed_experts.kernels)
    assert not layer(x_of(5), logits_of(5)).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_of_all_modules(backend: str) -> None:
    layer, seen = layer_of(config_of(backend=backend)), list[str]()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, arguments, result: seen.append(type(module).__name__)
    )
    try:
        layer(x_of(5), logits_of(5))
    finally:
        hook.remove()
    assert {"TopKRouter", "RoutedExperts", "MoERunner"} <= set(seen)


# torch does not look into the bundle that a router takes.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("part", ["router", "routed_experts"])
def test_a_hook_ahead_of_the_backward(part: str, backend: str) -> None:
    layer = layer_of(config_of(backend=backend))
    module = layer.get_submodule(part)
    called: list[Any] = []
    module.register_full_backward_pre_hook(lambda module, gradients: called.append(gradients))
    logits = logits_of(5).requires_grad_()
    layer(x_of(5), logits).sum().backward()
    assert len(called) == 1


def test_a_tensor_left_on_meta_is_an_error() -> None:
    config = cmoe.MoEConfig(
        num_experts=5,
        top_k=2,
        hidden_size=16,
        intermediate_size=16,
        router=cmoe.RouterConfig(scoring_func="sigmoid", e_score_correction_bias=True),
    )
    with torch.device("meta"):
        layer = cmoe.FusedMoE(config, "left on meta", gate=cmoe.GateLinear(16, 5))
    state = layer.state_dict()
    for missing in state:
        loaded = {
            name: torch.randn(tensor.shape) for name, tensor in state.items() if name != missing
        }
        layer.load_state_dict(loaded, strict=False, assign=True)
        layer.get_submodule(missing.rpartition(".")[0]).to("meta")
        with pytest.raises((ValueError, RuntimeError), match="meta"):
            layer(torch.randn(3, 16))
