"""The router with zero experts, against one loop over all columns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from cmoe import RouterConfig, RouterInputs, ZeroExpertRouter
from tests.layers import config_of, layer_of
from tests.oracle import assert_within_budget, naive_experts, naive_route

NUM_EXPERTS, NUM_ZERO = 5, 3


def router_of(**router: Any) -> ZeroExpertRouter:
    made = ZeroExpertRouter(config_of(router=RouterConfig(**router)), NUM_ZERO)
    if made.correction_bias() is not None:
        made.correction_bias().copy_(torch.linspace(-0.2, 0.2, NUM_EXPERTS + NUM_ZERO))
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_formula(bias: bool, renormalize: bool) -> None:
    router = router_of(
        e_score_correction_bias=bias, renormalize=renormalize, routed_scaling_factor=1.5
    )
    logits = torch.randn(33, NUM_EXPERTS + NUM_ZERO)
    routing = router(RouterInputs(torch.randn(33, 16), logits))
    weights, ids = naive_route(
        logits, 2, bias=router.correction_bias(), renormalize=renormalize, scaling=1.5
    )
    seen = set()
    for t in range(33):
        identity = 0.0
        for k in range(2):
            is_zero = bool(ids[t, k] >= NUM_EXPERTS)
            seen.add(is_zero)
            identity += weights[t, k].item() if is_zero else 0.0
            assert routing.topk_ids[t, k] == (-1 if is_zero else ids[t, k])
            expected = 0.0 if is_zero else weights[t, k].item()
            assert routing.topk_weights[t, k].item() == pytest.approx(expected, rel=1e-5)
        assert routing.identity_weights[t].item() == pytest.approx(identity, rel=1e-5)
    assert seen == {False, True}, "the logits must give both kinds of choice"


@pytest.mark.parametrize("apply_routed_scale_to_output", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_of_a_layer(apply_routed_scale_to_output: bool, dtype: torch.dtype) -> None:
    settings = RouterConfig(
        routed_scaling_factor=1.5, apply_routed_scale_to_output=apply_routed_scale_to_output
    )
    config = config_of(router=settings, params_dtype=dtype)
    layer = layer_of(config, router=ZeroExpertRouter(config, NUM_ZERO))
    x = torch.randn(17, 16).to(dtype)
    logits = torch.randn(17, NUM_EXPERTS + NUM_ZERO)
    w13, w2 = layer.routed_experts.w13_weight, layer.routed_experts.w2_weight
    weights, ids = naive_route(logits, 2, renormalize=True, scaling=1.5)

    def block(dtype: torch.dtype) -> torch.Tensor:
        # A zero expert is an expert that gives the token back.
        real = naive_experts(
            x, w13, w2, weights, torch.where(ids < NUM_EXPERTS, ids, -1), dtype=dtype
        )
        identity = torch.where(ids < NUM_EXPERTS, 0, weights).sum(1, keepdim=True)
        return real + (identity.to(dtype) * x.to(dtype))

    assert_within_budget(layer(x, logits), block(torch.float64), block(dtype))


def test_only_zero_experts_give_the_token_back() -> None:
    logits = torch.full((3, NUM_EXPERTS + NUM_ZERO), -50.0)
    logits[:, NUM_EXPERTS:] = 50
    config = config_of()
    layer = layer_of(config, router=ZeroExpertRouter(config, NUM_ZERO))
    x = torch.randn(3, 16)
    torch.testing.assert_close(layer(x, logits), x)


def test_its_bias_stays_in_float32() -> None:
    router = router_of(e_score_correction_bias=True)
    before = router.correction_bias().clone()
    for moved in (copy.deepcopy(router), router.bfloat16()):
        assert moved.correction_bias().dtype == torch.float32
        assert torch.equal(moved.correction_bias(), before)


def test_no_zero_experts() -> None:
    with pytest.raises(ValueError, match="num_zero_experts must be at least 1, got 0"):
        ZeroExpertRouter(config_of(), 0)


def test_groups() -> None:
    config = config_of(
        num_experts=8, router=RouterConfig(use_grouped_topk=True, num_expert_group=4, topk_group=2)
    )
    with pytest.raises(ValueError, match="num_expert_group must be 1, got 4"):
        ZeroExpertRouter(config, 8)
