"""Per-expert products, against one matmul for each expert in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cmoe.custom_ops.grouped_mm import grouped_mm
from tests.oracle import assert_within_budget

OP = torch.ops.cmoe.grouped_mm.default
WEIGHT_GRAD_OP = torch.ops.cmoe.grouped_mm_weight_grad.default
K, N = 5, 3

# Rows of each of seven experts, and the rows in all: some experts, none, one for all, a tail.
COUNTS = {
    "uneven": ((3, 0, 1, 5, 0, 0, 2), 11),
    "one expert gets everything": ((0, 0, 9, 0, 0, 0, 0), 9),
    "rows past the last offset": ((2, 0, 1, 0, 0, 4, 0), 12),
    "no expert has a row": ((0,) * 7, 6),
    "no rows": ((0,) * 7, 0),
    "one row": ((0, 1, 0, 0, 0, 0, 0), 1),
}
CASES = pytest.mark.parametrize("counts", COUNTS)


def operands(counts: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    rows, num_rows = COUNTS[counts]
    offsets = torch.tensor(rows).cumsum(0).to(torch.int32)
    return (
        torch.randn(num_rows, K).to(dtype),
        torch.randn(len(rows), N, K).to(dtype),
        offsets,
    )


def naive(x: Tensor, weight: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    y, start = torch.zeros(x.shape[0], weight.shape[1], dtype=dtype), 0
    for expert, end in enumerate(offsets.tolist()):
        for row in range(start, end):
            y[row] = weight[expert].to(dtype) @ x[row].to(dtype)
        start = end
    return y


@CASES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_the_oracle(counts: str, dtype: torch.dtype) -> None:
    arguments = operands(counts, dtype)
    y = grouped_mm(*arguments)
    assert y.dtype == dtype
    assert_within_budget(y, naive(*arguments, torch.float64), naive(*arguments, dtype))


def test_rows_of_no_expert_are_zero_whatever_they_hold() -> None:
    x, weight, offsets = operands("rows past the last offset")
    x[7:] = torch.nan
    assert (grouped_mm(x, weight, offsets)[7:] == 0).all()


@CASES
def test_views_give_the_same(counts: str) -> None:
    x, weight, offsets = operands(counts)
    x_view, weight_view = (
        x.t().contiguous().t(),
        weight.transpose(1, 2).contiguous().transpose(1, 2),
    )
    torch.testing.assert_close(
        grouped_mm(x_view, weight_view, offsets), grouped_mm(x, weight, offsets)
    )


@CASES
def test_opcheck(counts: str) -> None:
    x, weight, offsets = operands(counts)
    arguments = (x.requires_grad_(), weight.requires_grad_(), offsets)
    torch.library.opcheck(OP, arguments)
    torch.library.opcheck(WEIGHT_GRAD_OP, (torch.randn(x.shape[0], N), x.detach(), offsets))


@CASES
def test_gradcheck(counts: str) -> None:
    x, weight, offsets = operands(counts, torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, weight: grouped_mm(x, weight, offsets),
        (x.requires_grad_(), weight.requires_grad_()),
    )


@CASES
def test_experts_without_rows_get_zero_gradients(counts: str) -> None:
    x, weight, offsets = operands(counts)
    grouped_mm(x, weight.requires_grad_(), offsets).sum().backward()
    idle = torch.tensor(COUNTS[counts][0]) == 0
    assert (weight.grad[idle] == 0).all()
    assert (weight.grad[~idle] != 0).any() or bool(idle.all())


def test_a_frozen_weight_costs_no_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(
        "cmoe.custom_ops.grouped_mm._weight_grad_op",
        lambda *arguments: called.append("weight") or WEIGHT_GRAD_OP(*arguments),
    )
    monkeypatch.setattr(
        "cmoe.custom_ops.grouped_mm._op",
        lambda *arguments: called.append("product") or OP(*arguments),
    )
    x, weight, offsets = operands("uneven")
    grouped_mm(x.requires_grad_(), weight, offsets).sum().backward()
    assert called == ["product", "product"]
    called.clear()
    grouped_mm(x.detach(), weight.requires_grad_(), offsets).sum().backward()
    assert called == ["product", "weight"]


@pytest.mark.parametrize(
    ("x", "weight", "offsets"),
    [((4, 5), (2, 3, 6), (2,)), ((4, 5), (2, 3, 5), (3,)), ((4,), (2, 3, 5), (2,))],
)
def test_shapes_that_do_not_fit(x: tuple, weight: tuple, offsets: tuple) -> None:
    arguments = (torch.zeros(x), torch.zeros(weight), torch.zeros(offsets, dtype=torch.int32))
    with pytest.raises(ValueError, match="grouped_mm needs x") as error:
        grouped_mm(*arguments)
    assert all(str(shape) in str(error.value) for shape in (x, weight, offsets))
