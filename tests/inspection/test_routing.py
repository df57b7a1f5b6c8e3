"""Routing in words: each constant of the formula changes them."""

from __future__ import annotations

from typing import Any

import pytest

from cmoe import RouterConfig
from cmoe.inspection.routing import routing_in_words
from tests.layers import config_of

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "softmax": ({}, "softmax over all experts; weights: the score, divided by the sum"),
    "epsilon": ({"renormalize_epsilon": 1e-6}, "divided by the sum of the chosen plus 1e-06"),
    "not renormalised": ({"renormalize": False}, "weights: the score"),
    "sigmoid": ({"scoring_func": "sigmoid"}, "score: sigmoid of the logit"),
    "sqrtsoftplus": ({"scoring_func": "sqrtsoftplus"}, "square root of the softplus"),
    "after": ({"softmax_after_topk": True}, "score: the logit; weights: softmax over the chosen"),
    "biased": ({"e_score_correction_bias": True}, "highest score plus correction bias"),
    "scaled": ({"routed_scaling_factor": 2.5}, "they are times 2.5"),
    "output scaled": (
        {"routed_scaling_factor": 2.5, "apply_routed_scale_to_output": True},
        "the experts' sum times 2.5",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_words(case: str) -> None:
    router, words = CASES[case]
    text = routing_in_words(config_of(router=RouterConfig(**router)))
    assert text.startswith("the 2 of 5 experts of highest")
    assert words in text
    assert case == "softmax" or text != routing_in_words(config_of())


@pytest.mark.parametrize(("bias", "how"), [(True, "the sum of its two best"), (False, "the best")])
def test_groups(bias: bool, how: str) -> None:
    router = RouterConfig(
        use_grouped_topk=True, num_expert_group=3, topk_group=2, e_score_correction_bias=bias
    )
    text = routing_in_words(config_of(num_experts=6, router=router))
    assert f"within the 2 best of 3 groups (a group counts by {how})" in text


def test_the_weight_on_the_input() -> None:
    router = RouterConfig(apply_router_weight_on_input=True)
    assert "the weight multiplies the expert's input" in routing_in_words(
        config_of(top_k=1, router=router)
    )
