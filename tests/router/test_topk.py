"""The router of the closed formulas: its bias, its copies, its kernels."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cmoe import RouterConfig, RouterInputs, Routing, TopKRouter
from cmoe.custom_ops.backends import Kernels
from tests.layers import config_of
from tests.oracle import naive_route

# Values near 7 as in DeepSeek-V3, where a bfloat16 has steps of 1/32.
BIAS = 7 + torch.arange(8) / 512
DEEPSEEK = RouterConfig(
    scoring_func="sigmoid",
    renormalize=True,
    use_grouped_topk=True,
    num_expert_group=4,
    topk_group=2,
    e_score_correction_bias=True,
    routed_scaling_factor=2.5,
)


def router_of(router: RouterConfig = DEEPSEEK, **changes: Any) -> TopKRouter:
    made = TopKRouter(config_of(num_experts=8, top_k=2, router=router, **changes))
    if made.e_score_correction_bias is not None:
        made.e_score_correction_bias.copy_(BIAS)
    return made


def routed(router: TopKRouter, logits: Tensor) -> Routing:
    return router(RouterInputs(torch.randn(logits.shape[0], 16), logits))


def options_of(router: RouterConfig) -> dict[str, Any]:
    return dict(
        bias=BIAS if router.e_score_correction_bias else None,
        scoring_func=router.scoring_func,
        softmax_after_topk=router.softmax_after_topk,
        renormalize=router.renormalize,
        num_expert_group=router.num_expert_group,
        topk_group=router.topk_group,
        scaling=router.routed_scaling_factor,
    )


CONFIGS = {
    "softmax": RouterConfig(renormalize=False),
    "renormalised": RouterConfig(),
    "gpt-oss": RouterConfig(softmax_after_topk=True, renormalize=False),
    "sigmoid": RouterConfig(scoring_func="sigmoid", routed_scaling_factor=1.5),
    "sqrtsoftplus": RouterConfig(scoring_func="sqrtsoftplus", e_score_correction_bias=True),
    "DeepSeek-V2": RouterConfig(use_grouped_topk=True, num_expert_group=4, topk_group=2),
    "DeepSeek-V3": DEEPSEEK,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_reaches_the_formula(name: str) -> None:
    logits = torch.randn(9, 8)
    weights, ids, identity = routed(router_of(CONFIGS[name]), logits)
    exact_weights, exact_ids = naive_route(logits, 2, **options_of(CONFIGS[name]))
    assert torch.equal(ids.long(), exact_ids)
    torch.testing.assert_close(weights, exact_weights.float())
    assert identity is None


def test_more_columns_than_experts() -> None:
    config = config_of(num_experts=8, router=RouterConfig(e_score_correction_bias=True))
    router = TopKRouter(config, num_logits=11)
    assert router.num_logits == 11
    assert router.e_score_correction_bias.shape == (11,)
    assert routed(router, torch.arange(11.0)[None]).topk_ids.tolist() == [[10, 9]]


def test_only_a_bias_is_in_the_state_dict() -> None:
    assert set(router_of().state_dict()) == {"e_score_correction_bias"}
    assert set(router_of(RouterConfig()).state_dict()) == set()


MOVES: dict[str, Callable[[TopKRouter], TopKRouter]] = {
    "to bfloat16": lambda router: router.to(torch.bfloat16),
    "bfloat16": lambda router: router.bfloat16(),
    "half": lambda router: router.half(),
    "double": lambda router: router.double(),
    "half, float": lambda router: router.half().float(),
    "cpu": lambda router: router.cpu(),
    "to cpu in bfloat16": lambda router: router.to("cpu", torch.bfloat16),
    "deepcopy": copy.deepcopy,
    "pickle": lambda router: pickle.loads(pickle.dumps(router)),
    "deepcopy of half": lambda router: copy.deepcopy(router.half()),
}


@pytest.mark.parametrize("move", MOVES)
def test_the_bias_keeps_its_bits(move: str) -> None:
    logits = torch.zeros(1, 8)
    moved = MOVES[move](router_of())
    assert moved.e_score_correction_bias.dtype == torch.float32
    assert torch.equal(moved.e_score_correction_bias, BIAS)
    assert moved.correction_bias() is moved.e_score_correction_bias
    assert routed(moved, logits).topk_ids.tolist() == [[7, 6]]


def test_the_bias_by_way_of_the_meta_device() -> None:
    with torch.device("meta"):
        built = TopKRouter(config_of(num_experts=8, router=DEEPSEEK))
    for router in (built, router_of().to("meta"), router_of().to("meta", torch.bfloat16)):
        assert router.e_score_correction_bias.is_meta
        assert router.e_score_correction_bias.dtype == torch.float32
        router.to_empty(device="cpu").load_state_dict(router_of().state_dict())
        assert router.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(router.e_score_correction_bias, BIAS)


def test_the_bias_under_a_bfloat16_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    router = TopKRouter(config_of(num_experts=8, router=DEEPSEEK))
    assert router.e_score_correction_bias.dtype == torch.float32


def test_the_bias_saved_with_the_state() -> None:
    file = io.BytesIO()
    torch.save(router_of().bfloat16().state_dict(), file)
    file.seek(0)
    router = TopKRouter(config_of(num_experts=8, router=DEEPSEEK)).bfloat16()
    router.load_state_dict(torch.load(file))
    assert torch.equal(router.e_score_correction_bias, BIAS)


def test_a_copy_has_a_bias_of_its_own() -> None:
    router = router_of()
    copied = copy.deepcopy(router)
    copied.e_score_correction_bias.zero_()
    assert torch.equal(router.e_score_correction_bias, BIAS)


def test_the_backends_kernel_is_used_until_a_copy_is_made() -> None:
    def kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
        return arguments[0][:, :2] * 0 + 5, torch.zeros(1, 2, dtype=torch.int32)

    router = router_of()
    router.use_kernels(Kernels(fused_experts=kernel, route=kernel))
    logits = torch.zeros(1, 8)
    assert routed(router, logits).topk_weights.tolist() == [[5.0, 5.0]]
    # A copy may live elsewhere: it has the reference until its runner hands it other kernels.
    assert routed(copy.deepcopy(router), logits).topk_ids.tolist() == [[7, 6]]
    assert routed(router, logits).topk_weights.tolist() == [[5.0, 5.0]]


@pytest.mark.parametrize(
    ("router", "text"),
    [
        (RouterConfig(), "TopKRouter(top_k=2, softmax, renormalized)"),
        (
            RouterConfig(softmax_after_topk=True, renormalize=False),
            "TopKRouter(top_k=2, softmax after top-k)",
        ),
        (DEEPSEEK, "TopKRouter(top_k=2, sigmoid, renormalized, best 2 of 4 groups)"),
    ],
)
def test_a_printed_model_shows_the_formula(router: RouterConfig, text: str) -> None:
    assert repr(router_of(router)) == text
