"""Calls of fused_moe, judged by the naive loop in fp64 over the routing that `route` gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cmoe.custom_ops.fused_experts import Experts
from cmoe.custom_ops.route import Formula, route_reference
from tests.custom_ops import cases, route_cases
from tests.custom_ops.cases import Problem
from tests.oracle import assert_within_budget, naive_experts

NUM_EXPERTS, TOP_K = 8, 3

FORMULAS: Mapping[str, Mapping[str, Any]] = {
    "softmax": {"renormalize": True},
    "LFM2": {"scoring_func": "sigmoid", "renormalize": True, "renormalize_epsilon": 0.125},
    "softmax after": {"softmax_after_topk": True},
    "grouped, biased": {
        "scoring_func": "sigmoid",
        "bias": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "scaling": 2.5,
    },
}


@dataclass(frozen=True)
class Call:
    """One call, with its arguments by the stages that they belong to."""

    problem: Problem
    logits: Tensor
    options: Mapping[str, Any]

    def arguments(self) -> tuple[Any, ...]:
        formula = Formula(*route_cases.arguments(self.logits, TOP_K, **self.options)[1:])
        p = self.problem
        experts = Experts(p.w13, p.w2, *p.arguments()[5:])
        return (p.x, self.logits, *formula, *experts)

    def check(self, y: Tensor) -> None:
        """y must be within the budget around the oracle's."""
        p = self.problem
        weights, ids = route_reference(*route_cases.arguments(self.logits, TOP_K, **self.options))
        routed = p.but(topk_weights=weights, topk_ids=ids)
        exact = naive_experts(*routed.arguments())
        assert (y.dtype, y.shape, y.is_contiguous()) == (p.x.dtype, p.x.shape, True)
        assert_within_budget(y, exact, naive_experts(*routed.arguments(), dtype=y.dtype))


def call(formula: str, num_tokens: int, *, dtype: torch.dtype = torch.float32) -> Call:
    """A call under one of FORMULAS, with biases of the experts."""
    options = dict(FORMULAS[formula])
    if options.pop("bias", False):
        options["bias"] = torch.randn(NUM_EXPERTS)
    problem = cases.problem(num_tokens, NUM_EXPERTS, TOP_K, dtype=dtype)
    return Call(problem, torch.randn(num_tokens, NUM_EXPERTS), options)
