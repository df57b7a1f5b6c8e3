"""The experts' calls that every backend is tried with, judged by the naive loop in fp64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cmoe.activation import ACTIVATIONS
from tests.oracle import GATED, assert_within_budget, naive_experts

H, I = 7, 5  # noqa: E741 - the names of the shape vocabulary


@dataclass(frozen=True)
class Problem:
    """The arguments of one call, in the order of the op's schema."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13_bias: Tensor | None = None
    w2_bias: Tensor | None = None
    expert_map: Tensor | None = None
    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    interleaved: bool = False
    apply_router_weight_on_input: bool = False

    def arguments(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def but(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)


def problem(
    num_tokens: int = 9,
    num_experts: int = 5,
    top_k: int = 2,
    *,
    dtype: torch.dtype = torch.float32,
    activation: str = "silu",
    bias: bool = True,
) -> Problem:
    """Values whose products are of order one; every weight and bias takes part."""
    rows = (2 if activation in GATED else 1) * I
    ids = torch.rand(num_tokens, num_experts).argsort(1)[:, :top_k].to(torch.int32)
    return Problem(
        x=torch.randn(num_tokens, H).to(dtype),
        w13=torch.randn(num_experts, rows, H).to(dtype),
        w2=torch.randn(num_experts, H, I).to(dtype),
        topk_weights=torch.rand(num_tokens, top_k) + 0.1,
        topk_ids=ids,
        w13_bias=torch.randn(num_experts, rows).to(dtype) if bias else None,
        w2_bias=torch.randn(num_experts, H).to(dtype) if bias else None,
        activation=activation,
        alpha=1.702,
    )


def check(implementation: Callable[..., Tensor], p: Problem) -> Tensor:
    """Runs the problem; the result must be within the budget around the oracle's."""
    before = [a.clone() if isinstance(a, Tensor) else a for a in p.arguments()]
    y = implementation(*p.arguments())
    exact = naive_experts(*p.arguments())
    assert y.dtype == p.x.dtype
    assert y.is_contiguous()
    if y.dtype == torch.float64:
        # Sums of a few dozen terms in another order: some hundred steps of 2e-16, far below any
        # wrong formula.
        torch.testing.assert_close(y, exact, rtol=1e-13, atol=1e-13)
    else:
        assert_within_budget(y, exact, naive_experts(*p.arguments(), dtype=y.dtype))
    for argument, former in zip(p.arguments(), before, strict=True):
        if isinstance(argument, Tensor):
            assert torch.equal(argument, former), "an input was changed"
    return y


ROUTINGS = {
    "experts with nothing": [[1, 3], [3, 1], [1, 3]],
    "one expert gets everything": [[2, 2], [2, 2], [2, 2]],
    "the last expert alone": [[4, -1], [4, -1], [4, -1]],
    "a skipped slot": [[-1, 0], [4, -1], [2, 3]],
    "a skipped row": [[-1, -1], [4, 0], [-1, -1]],
    "nothing at all": [[-1, -1], [-1, -1], [-1, -1]],
    "an expert twice in a row": [[3, 3], [0, 0], [1, 3]],
}


def strided(tensor: Tensor) -> Tensor:
    """The same values, transposed in memory."""
    return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)


EXPERTS_ELSEWHERE = torch.tensor([-1, 2, -1, -1, -1, 0, -1, 1], dtype=torch.int32)
"""Eight ids in the model, three rows here, out of order."""

IDS_OF_EIGHT = [[0, 1], [2, 7], [3, 4], [6, 5], [-1, 1], [-1, 0], [7, 7]]


def inside_nan(tensor: Tensor) -> Tensor:
    """The same values as a window of a larger tensor that holds NaN around them."""
    big = torch.full([size + 3 for size in tensor.shape], torch.nan, dtype=tensor.dtype)
    window = big[tuple(slice(1, 1 + size) for size in tensor.shape)]
    return window.copy_(tensor)


def cases(dtypes: Sequence[torch.dtype]) -> dict[str, Callable[[], Problem]]:
    """Problems by name, made when they are called for, after the test's own seed."""
    return dict(_cases(dtypes))


def _cases(dtypes: Sequence[torch.dtype]) -> Iterator[tuple[str, Callable[[], Problem]]]:
    def case(
        name: str,
        *sizes: int,
        changes: Callable[[Problem], dict[str, Any]] | None = None,
        **options: Any,
    ) -> tuple[str, Callable[[], Problem]]:
        def make() -> Problem:
            p = problem(*sizes, **options)
            return p if changes is None else p.but(**changes(p))

        return name, make

    sizes = itertools.product((0, 1, 7, 33), ((7, 1), (5, 2), (3, 3)))
    for dtype, (num_tokens, (num_experts, top_k)) in itertools.product(dtypes, sizes):
        name = f"{short(dtype)} T{num_tokens} E{num_experts} K{top_k}"
        yield case(name, num_tokens, num_experts, top_k, dtype=dtype)
    for activation, limit, dtype in itertools.product(
        ACTIVATIONS, (None, 0.7), (torch.float32, torch.bfloat16)
    ):
        name = f"{activation} limit {limit} {short(dtype)}"
        yield case(
            name,
            activation=activation,
            dtype=dtype,
            changes=lambda p, limit=limit: dict(limit=limit),
        )
    for activation in GATED:
        yield case(
            f"{activation} interleaved",
            activation=activation,
            changes=lambda p: dict(interleaved=True, limit=0.7),
        )
    for (routing, ids), dtype in itertools.product(ROUTINGS.items(), (torch.int32, torch.int64)):
        tensor = torch.tensor(ids, dtype=dtype)
        yield case(
            f"{routing}, {short(dtype)}",
            3,
            bias=dtype == torch.int32,
            changes=lambda p, tensor=tensor: dict(topk_ids=tensor),
        )
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor(IDS_OF_EIGHT, dtype=dtype)
        yield case(
            f"expert_map with holes, {short(dtype)}",
            len(ids),
            3,
            changes=lambda p, ids=ids: dict(topk_ids=ids, expert_map=EXPERTS_ELSEWHERE),
        )
    for dtype in (torch.float32, torch.bfloat16):
        yield case(
            f"weight on input {short(dtype)}",
            top_k=1,
            dtype=dtype,
            changes=lambda p: dict(
                apply_router_weight_on_input=True,
                topk_ids=p.topk_ids.masked_fill(torch.arange(9)[:, None] == 3, -1),
            ),
        )
    operands = ("x", "w13", "w2", "topk_weights", "topk_ids")
    for name in operands:
        yield case(f"strided {name}", changes=lambda p, n=name: {n: strided(getattr(p, n))})
    yield case(
        "all strided, interleaved",
        changes=lambda p: {"interleaved": True} | {n: strided(getattr(p, n)) for n in operands},
    )
    for name in (*operands[:4], "w13_bias", "w2_bias"):
        yield case(f"{name} inside NaN", changes=lambda p, n=name: {n: inside_nan(getattr(p, n))})
    yield case("expanded x", changes=lambda p: dict(x=p.x[:1].expand(9, H)))


def short(dtype: torch.dtype) -> str:
    """The name without the module."""
    return str(dtype).removeprefix("torch.")
