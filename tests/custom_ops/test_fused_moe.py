"""Route with experts as one function: the argument list, the reference."""

from __future__ import annotations

import re

import pytest
import torch

from cmoe.custom_ops import fused_experts, route
from cmoe.custom_ops.fused_moe import SCHEMA, fused_moe_fake, fused_moe_reference
from tests.custom_ops.fused_moe_cases import FORMULAS, call


def _arguments(schema: str) -> list[str]:
    return re.match(r"\((.*)\) ->", schema).group(1).split(", ")  # type: ignore[union-attr]


def test_the_schema_is_that_of_route_with_that_of_fused_experts() -> None:
    given = ("Tensor x", "Tensor logits", "Tensor topk_weights", "Tensor topk_ids")
    parts = [
        argument
        for schema in (route.SCHEMA, fused_experts.SCHEMA)
        for argument in _arguments(schema)
        if argument not in given
    ]
    assert _arguments(SCHEMA) == ["Tensor x", "Tensor logits", *parts]
    names = [argument.split("=")[0].split()[-1] for argument in parts]
    assert names == [*route.Formula._fields, *fused_experts.Experts._fields]


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("formula", FORMULAS)
def test_the_reference_is_route_then_experts(formula: str, num_tokens: int) -> None:
    moe = call(formula, num_tokens)
    moe.check(fused_moe_reference(*moe.arguments()))


def test_the_fake_has_the_shape_of_x() -> None:
    moe = call("softmax", 3)
    fake = fused_moe_fake(*moe.arguments())
    assert (fake.shape, fake.dtype, fake.stride()) == ((3, 7), torch.float32, (7, 1))
