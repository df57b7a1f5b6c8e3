"""Expert weights in the dtype of the activations."""

from __future__ import annotations

import pytest
import torch

import cmoe
from cmoe.custom_ops.backends import Kernels
from cmoe.quant.unquantized import Unquantized
from cmoe.routing import Routing
from tests.layers import config_of, x_of

SIZES = {
    "gated": ({}, 16, 16, 8),
    "not gated": ({"activation": "relu2_no_mul"}, 8, 16, 8),
    "padded": ({"quant": cmoe.QuantConfig(size_multiple=12)}, 24, 24, 12),
}


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_shapes_with_dtypes(sizes: str, has_bias: bool) -> None:
    changes, rows, hidden, intermediate = SIZES[sizes]
    config = config_of(has_bias=has_bias, params_dtype=torch.bfloat16, **changes)
    expected = {"w13_weight": (3, rows, hidden), "w2_weight": (3, hidden, intermediate)}
    if has_bias:
        expected |= {"w13_bias": (3, rows), "w2_bias": (3, hidden)}
    shapes = Unquantized().create_weights(config, num_local_experts=3)
    assert shapes == {name: (shape, torch.bfloat16) for name, shape in expected.items()}


@pytest.mark.parametrize("has_bias", [False, True])
def test_every_argument_reaches_the_kernel_in_its_place(has_bias: bool) -> None:
    seen = []

    def fused_experts(*arguments: object) -> torch.Tensor:
        seen.extend(arguments)
        return x

    names = [argument.name for argument in torch.ops.cmoe.fused_experts.default._schema.arguments]
    activation = cmoe.Activation(name="swigluoai", alpha=1.5, limit=6.0)
    router = cmoe.RouterConfig(apply_router_weight_on_input=True)
    config = config_of(top_k=1, activation=activation, router=router)
    weights = {"w13_weight": x_of(1), "w2_weight": x_of(2)}
    if has_bias:
        weights |= {"w13_bias": x_of(3), "w2_bias": x_of(4)}
    x, expert_map = x_of(5), torch.arange(5)
    routing = Routing(torch.rand(5, 1), torch.zeros(5, 1, dtype=torch.int32))
    kernels = Kernels(fused_experts=fused_experts, route=fused_experts)
    y = Unquantized().apply(config, weights, expert_map, kernels, x, routing)
    assert y is x
    expected = {
        "x": x,
        "w13": weights["w13_weight"],
        "w2": weights["w2_weight"],
        "topk_weights": routing.topk_weights,
        "topk_ids": routing.topk_ids,
        "w13_bias": weights.get("w13_bias"),
        "w2_bias": weights.get("w2_bias"),
        "expert_map": expert_map,
        "activation": "swigluoai",
        "alpha": 1.5,
        "limit": 6.0,
        "interleaved": False,
        "apply_router_weight_on_input": True,
    }
    assert names == list(expected)
    for name, argument in zip(names, seen, strict=True):
        given = expected[name]
        assert argument is given if isinstance(given, torch.Tensor) else argument == given, name
