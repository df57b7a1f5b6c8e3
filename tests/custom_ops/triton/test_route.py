"""The Triton router against the row by row oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cmoe.custom_ops.route import SCHEMA, SCORING_FUNCTIONS, route_reference
from cmoe.environment import triton_is_interpreted
from tests.custom_ops.route_cases import arguments, assert_routed

pytest.importorskip("triton", reason="Triton is not installed")

from cmoe.custom_ops.triton.route import route

DEVICE = "cpu" if triton_is_interpreted() else "cuda"
INF, NAN = float("inf"), float("nan")

pytestmark = pytest.mark.usefixtures("kernel_device")


def call(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    function: Callable[..., Any] = route,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    bias = None if bias is None else bias.to(DEVICE)
    return function(*arguments(logits.to(DEVICE), top_k, bias=bias, **options))


def check(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    weights, ids = call(logits, top_k, **options)
    assert_routed((weights, ids), logits, top_k, **options)
    assert torch.equal(ids, call(logits, top_k, **options, function=route_reference)[1])
    return weights.cpu(), ids.cpu()


def few_bits(bias: Tensor) -> Tensor:
    """So that float32 and float64 agree on the order of every sum but those of equal scores."""
    return (bias * 64).round() / 64


def test_the_schema_is_that_of_every_backend() -> None:
    assert str(route._schema) == f"cmoe_triton::route{SCHEMA}"


@pytest.mark.parametrize("seed", range(60))
def test_random_routers(seed: int) -> None:
    choose = random.Random(seed)
    groups = choose.choice([1, 1, 2, 3, 4, 8])
    E = groups * choose.choice([1, 2, 3, 7, 16, 31])
    topk_group = choose.randint(1, groups)
    softmax_after_topk = choose.random() < 0.25
    with_bias = not softmax_after_topk and choose.random() < 0.5
    check(
        (2 * torch.randn(choose.choice([0, 1, 7, 12]), E)).to(
            choose.choice([torch.float32, torch.bfloat16, torch.float16])
        ),
        choose.randint(1, min(32, topk_group * E // groups)),
        bias=few_bits(torch.randn(E)) if with_bias else None,
        scoring_func="softmax" if softmax_after_topk else choose.choice(SCORING_FUNCTIONS),
        softmax_after_topk=softmax_after_topk,
        renormalize=choose.random() < 0.5,
        renormalize_epsilon=choose.choice([1e-20, 1e-6, 0.5]),
        num_expert_group=groups,
        topk_group=topk_group,
        scaling=choose.choice([1.0, 2.5]),
    )


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(1, 1), (13, 13), (127, 3), (384, 8), (512, 32), (769, 32)]
)
def test_every_size(num_experts: int, top_k: int) -> None:
    logits = torch.randn(3, num_experts)
    check(logits, top_k)
    check(logits, top_k, scoring_func="sigmoid", bias=few_bits(torch.randn(num_experts)))


def test_deepseek_v3() -> None:
    check(
        torch.randn(3, 256).bfloat16(),
        8,
        bias=few_bits(torch.rand(256)),
        scoring_func="sigmoid",
        renormalize=True,
        num_expert_group=8,
        topk_group=4,
        scaling=2.5,
    )


@pytest.mark.parametrize("softmax_after_topk", [False, True])
def test_the_lower_id_wins_ties(softmax_after_topk: bool) -> None:
    for E in (8, 384):
        options = dict(softmax_after_topk=softmax_after_topk)
        _, ids = check(torch.zeros(3, E), 5, **options)
        assert torch.equal(ids, torch.arange(5, dtype=torch.int32).expand(3, -1))
        check(torch.randint(0, 3, (5, E)).to(torch.bfloat16), 5, **options)


@pytest.mark.parametrize("bias", [torch.zeros(24), torch.ones(24)])
def test_the_lower_id_wins_ties_of_biased_scores(bias: Tensor) -> None:
    check(torch.randint(-3, 4, (9, 24)) / 4, 5, bias=bias, scoring_func="sigmoid")


def test_both_zeros_tie() -> None:
    assert check(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 3)[1].tolist() == [[0, 1, 2]]


def test_groups_tie_to_the_lower_one() -> None:
    for bias in (None, torch.zeros(12)):
        options = dict(num_expert_group=6, topk_group=2, scoring_func="sigmoid", bias=bias)
        assert check(torch.zeros(2, 12), 4, **options)[1].tolist() == [[0, 1, 2, 3]] * 2


def test_logits_that_softmax_cannot_tell_apart() -> None:
    assert check(torch.tensor([[0.0, -300.0, -200.0]]), 2)[1].tolist() == [[0, 2]]


def test_scores_near_the_smallest_numbers() -> None:
    """softplus(-80) is 1.8e-35, where a plain log(1 + exp(x)) gives 0."""
    logits = torch.tensor([[-80.0, -40.0, -10.0, -1e-4, 1e-4, 10.0, 19.0, 21.0]])
    weights, _ = check(logits, 8, scoring_func="sqrtsoftplus")
    assert (weights > 0).all()


BAD_ROWS = torch.tensor(
    [
        [NAN] * 8,
        [-INF] * 8,
        [INF] * 8,
        [NAN, 1, 2, 3, 0, 0, 0, 0],
        [INF, NAN, -INF, INF, NAN, INF, 0, 0],
        [-INF, 1, -INF, 3, NAN, -INF, -INF, -INF],
    ]
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("groups", [{}, dict(num_expert_group=4, topk_group=2)])
@pytest.mark.parametrize("scoring_func", SCORING_FUNCTIONS)
def test_rows_that_are_not_finite(
    scoring_func: str, groups: dict[str, Any], dtype: torch.dtype
) -> None:
    """Ids in range, distinct in a row; other rows as if the bad ones were not there."""
    good = torch.randn(2, 8).to(dtype)
    mixed = torch.cat([good[:1], BAD_ROWS.to(dtype), good[1:]])
    for bias in (None, torch.arange(8) / 8):
        options = dict(scoring_func=scoring_func, renormalize=True, bias=bias, **groups)
        weights, ids = check(mixed, 3, **options) if bias is None else call(mixed, 3, **options)
        assert ((ids >= 0) & (ids < 8)).all()
        assert all(len(set(row)) == 3 for row in ids.tolist())
        assert weights.isfinite().all()
        alone = call(good, 3, **options)
        assert torch.equal(weights[[0, -1]].cpu(), alone[0].cpu())
        assert torch.equal(ids[[0, -1]].cpu(), alone[1].cpu())


def test_rows_that_are_not_finite_under_softmax_after_topk() -> None:
    weights, ids = check(BAD_ROWS, 2, softmax_after_topk=True)
    assert weights[:3].tolist() == [[0.5, 0.5]] * 3
    assert ids[3].tolist() == [3, 2]


@pytest.mark.parametrize("groups", [{}, dict(num_expert_group=4, topk_group=2)])
def test_a_bias_that_is_not_finite(groups: dict[str, Any]) -> None:
    for bias in BAD_ROWS:
        _, ids = check(torch.randn(2, 8), 3, bias=bias, scoring_func="sigmoid", **groups)
        assert all(len(set(row)) == 3 for row in ids.tolist())


def test_negative_choices_lose_to_no_masked_group() -> None:
    _, ids = check(
        torch.randn(9, 8),
        4,
        bias=torch.full((8,), -2.0),
        scoring_func="sigmoid",
        num_expert_group=4,
        topk_group=2,
    )
    assert all(len({e // 2 for e in row}) == 2 for row in ids.tolist())


def test_weights_are_read_again_never_recovered_from_the_choice() -> None:
    logits = torch.tensor([[-16.1, -17.0, -18.0, -16.5]])
    bias = torch.full((4,), 12.0)
    weights, ids = call(logits, 2, bias=bias, scoring_func="sigmoid", renormalize=True)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights.cpu(), torch.tensor([[0.711, 0.289]]), rtol=0, atol=5e-4)


def test_any_strides() -> None:
    logits, bias = torch.randn(5, 16).to(DEVICE), few_bits(torch.randn(16)).to(DEVICE)
    options = dict(bias=bias, scoring_func="sigmoid", num_expert_group=4, topk_group=2)
    expected = call(logits, 4, **options)
    options["bias"] = bias.repeat_interleave(3)[::3]
    for other in (logits.t().contiguous().t(), logits.repeat_interleave(2, 0)[::2]):
        assert not other.is_contiguous()
        weights, ids = call(other, 4, **options)
        assert torch.equal(weights, expected[0])
        assert torch.equal(ids, expected[1])
    expanded = logits[:1].expand(5, 16)
    assert torch.equal(call(expanded, 4, **options)[1], expected[1][:1].expand(5, 4))


def test_a_row_does_not_depend_on_the_others() -> None:
    logits = torch.randn(9, 24)
    weights, ids = call(logits, 5)
    for t in (0, 4, 8):
        alone = call(logits[t : t + 1], 5)
        assert torch.equal(alone[0][0], weights[t])
        assert torch.equal(alone[1][0], ids[t])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(top_k=9), r"top_k \(9\) must be between 1 and the 8 experts"),
        (dict(bias=torch.zeros(7)), r"bias must be \[8\]"),
        (dict(scoring_func="relu"), "unknown scoring_func 'relu'"),
        (dict(num_expert_group=3), r"num_expert_group \(3\) must divide the 8 experts"),
        (dict(softmax_after_topk=True, bias=torch.zeros(8)), "it takes no bias"),
        (
            dict(logits=torch.zeros(2, 8).double()),
            "routes bfloat16, float16, float32 logits; got torch.float64",
        ),
        (dict(logits=torch.zeros(8)), r"logits must be a float tensor \[T, E\]"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(logits=torch.zeros(2, 8), top_k=2) | options
    with pytest.raises(ValueError, match=message):
        call(**arguments)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_under_opcheck(num_tokens: int) -> None:
    logits, bias = torch.randn(num_tokens, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    torch.library.opcheck(route, (logits, bias, 2, "sigmoid", False, True, 1e-6, 2, 1, 2.5))
