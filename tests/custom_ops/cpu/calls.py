"""Calls of the C++ experts, judged by the naive loop in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cmoe.custom_ops.packing import STRIP, is_packed, pack, unpack
from tests.custom_ops import cases
from tests.custom_ops.cases import Problem
from tests.oracle import GATED


@dataclass(frozen=True)
class Call(Problem):
    """A problem for the C++ op, with gpt-oss' alpha."""

    alpha: float = 1.702

    def run(self) -> Tensor:
        return torch.ops.cmoe_cpu.fused_experts(*self.arguments())


def experts(num_experts: int, rows: int, columns: int, dtype: torch.dtype, layout: str) -> Tensor:
    """[E, rows, columns] of order 1 / sqrt(columns), contiguous along the columns or the rows.

    Or such a weight packed.
    """
    w = (torch.randn(num_experts, rows, columns) / columns**0.5).to(dtype)
    if layout == "rows":
        return w.transpose(1, 2).contiguous().transpose(1, 2)
    return pack(w) if layout == "packed" else w


def call(
    T: int,
    E: int,
    K: int,
    H: int,
    I: int,  # noqa: E741 - the names of the shape vocabulary
    *,
    dtype: torch.dtype = torch.bfloat16,
    activation: str = "silu",
    bias: bool = False,
    layout: str = "columns",
    **options: Any,
) -> Call:
    """layout: see `experts`; packed weights have H, I rounded up to whole strips."""
    if layout == "packed":
        H, I = (-(-size // STRIP) * STRIP for size in (H, I))  # noqa: E741
    rows = (2 if activation in GATED else 1) * I
    return Call(
        x=torch.randn(T, H).to(dtype),
        w13=experts(E, rows, H, dtype, layout),
        w2=experts(E, H, I, dtype, layout),
        topk_weights=torch.rand(T, K) + 0.1,
        topk_ids=torch.rand(T, E).argsort(1)[:, :K].to(torch.int32),
        w13_bias=torch.randn(E, rows).to(dtype) if bias else None,
        w2_bias=torch.randn(E, H).to(dtype) if bias else None,
        activation=activation,
        **options,
    )


def check(c: Call) -> Tensor:
    """Right by the oracle; see `cases.check`."""
    if not is_packed(c.w2):
        return cases.check(torch.ops.cmoe_cpu.fused_experts, c)

    def op(x: Tensor, w13: Tensor, w2: Tensor, *rest: Any) -> Tensor:
        return torch.ops.cmoe_cpu.fused_experts(x, pack(w13), pack(w2), *rest)

    return cases.check(op, c.but(w13=unpack(c.w13), w2=unpack(c.w2)))
