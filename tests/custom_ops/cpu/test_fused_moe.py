"""The C++ op of route with experts: its parts to the bit, in one call."""

from __future__ import annotations

import pytest
import torch

from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.fused_experts import Experts
from cmoe.custom_ops.fused_moe import SCHEMA
from cmoe.custom_ops.route import Formula
from tests.custom_ops.fused_moe_cases import FORMULAS, call

pytestmark = pytest.mark.usefixtures("cpu_kernels")

NUM_FORMULA = len(Formula._fields)


def test_the_schema_is_that_of_every_backend(cpu_kernels: Kernels) -> None:
    assert cpu_kernels.fused_moe is not None
    assert str(cpu_kernels.fused_moe._schema) == f"cmoe_cpu::fused_moe{SCHEMA}"


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_it_is_route_then_fused_experts_to_the_bit(
    dtype: torch.dtype, formula: str, num_tokens: int
) -> None:
    moe = call(formula, num_tokens, dtype=dtype)
    ops = torch.ops.cmoe_cpu
    x, logits, *rest = moe.arguments()
    y = ops.fused_moe(x, logits, *rest)
    assert y.is_contiguous()
    weights, ids = ops.route(logits, *rest[:NUM_FORMULA])
    experts = Experts(*rest[NUM_FORMULA:])
    assert torch.equal(y, ops.fused_experts(*experts.arguments(x, weights, ids)))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_opcheck(num_tokens: int) -> None:
    torch.library.opcheck(
        torch.ops.cmoe_cpu.fused_moe.default, call("grouped, biased", num_tokens).arguments()
    )


def test_what_a_part_refuses_is_refused() -> None:
    x, logits, *rest = call("softmax", 3).arguments()
    with pytest.raises(ValueError, match=r"top_k \(3\) must be between 1 and the 2 experts"):
        torch.ops.cmoe_cpu.fused_moe(x, logits[:, :2], *rest)
    with pytest.raises(ValueError, match=r"x must be \[T, 7\]"):
        torch.ops.cmoe_cpu.fused_moe(x[:, :5], logits, *rest)
