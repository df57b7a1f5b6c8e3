"""The C++ router against the row by row oracle."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.route import SCHEMA, SCORING_FUNCTIONS
from tests.custom_ops.route_cases import arguments, assert_routed
from tests.oracle import naive_route

INF, NAN = float("inf"), float("nan")
LOWEST = torch.finfo(torch.float32).min

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def call(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    return torch.ops.cmoe_cpu.route(*arguments(logits, top_k, **options))


def check(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    routed = call(logits, top_k, **options)
    assert_routed(routed, logits, top_k, **options)
    return routed


def test_the_schema_is_that_of_every_backend(cpu_kernels: Kernels) -> None:
    assert str(cpu_kernels.route._schema) == f"cmoe_cpu::route{SCHEMA}"


@pytest.mark.parametrize("seed", range(40))
def test_random_routers(seed: int) -> None:
    choose = random.Random(seed)
    groups = choose.choice([1, 1, 2, 4])
    E = groups * choose.choice([1, 2, 3, 7, 16])
    topk_group = choose.randint(1, groups)
    softmax_after_topk = choose.random() < 0.25
    check(
        (2 * torch.randn(choose.choice([0, 1, 7, 33]), E)).to(
            choose.choice([torch.float32, torch.bfloat16, torch.float16, torch.float64])
        ),
        choose.randint(1, topk_group * E // groups),
        # Few bits, so that float32 and float64 agree on every sum.
        bias=None
        if softmax_after_topk or choose.random() < 0.5
        else (torch.randn(E) * 64).round() / 64,
        scoring_func=choose.choice(SCORING_FUNCTIONS),
        softmax_after_topk=softmax_after_topk,
        renormalize=not softmax_after_topk and choose.random() < 0.5,
        renormalize_epsilon=choose.choice([1e-20, 1e-6, 0.5]),
        num_expert_group=groups,
        topk_group=topk_group,
        scaling=choose.choice([1.0, 2.5]),
    )


@pytest.mark.parametrize("scoring_func", SCORING_FUNCTIONS)
@pytest.mark.parametrize("softmax_after_topk", [False, True])
def test_the_lower_id_wins_ties(scoring_func: str, softmax_after_topk: bool) -> None:
    for E in (8, 384):
        options = dict(scoring_func=scoring_func, softmax_after_topk=softmax_after_topk)
        _, ids = check(torch.zeros(3, E), 5, **options)
        assert torch.equal(ids, torch.arange(5, dtype=torch.int32).expand(3, -1))
        check(torch.randint(0, 3, (9, E)).to(torch.bfloat16), 5, **options)


def test_groups_tie_to_the_lower_one() -> None:
    _, ids = check(torch.zeros(2, 8), 3, num_expert_group=4, topk_group=2)
    assert ids[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("scoring_func", SCORING_FUNCTIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_that_are_not_finite(scoring_func: str, with_bias: bool) -> None:
    """Ids in range, distinct in a row; other rows as if the bad ones were not there."""
    good = torch.randn(2, 8)
    bad = torch.randn(5, 8)
    bad[0] = NAN
    bad[1, 3] = NAN
    bad[2] = -INF
    bad[3, 2] = INF
    bad[4, :2] = INF
    bias = torch.arange(8) / 8 if with_bias else None
    options = dict(scoring_func=scoring_func, bias=bias, renormalize=True)
    if not with_bias:
        check(torch.cat([good, bad]), 3, **options)
    weights, ids = call(torch.cat([good, bad]), 3, **options)
    assert ((ids >= 0) & (ids < 8)).all()
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert not weights.isnan().any()
    alone = call(good, 3, **options)
    assert torch.equal(weights[:2], alone[0])
    assert torch.equal(ids[:2], alone[1])


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("scoring_func", SCORING_FUNCTIONS)
def test_biases_that_are_not_finite(scoring_func: str, groups: int) -> None:
    """Every place of a NaN, of an infinity: chosen last or first, ids distinct and in range."""
    logits = torch.randn(5, 16)
    for value in (NAN, INF, -INF):
        for count in (1, 3, 15, 16):
            bias = torch.zeros(16)
            bias[torch.randperm(16)[:count]] = value
            weights, ids = check(
                logits,
                6,
                bias=bias,
                scoring_func=scoring_func,
                num_expert_group=groups,
                topk_group=(groups + 1) // 2,
            )
            assert all(len(set(row)) == 6 for row in ids.tolist())
            assert weights.isfinite().all()


def test_float64_logits_are_routed_in_float64() -> None:
    """Logits that float32 would take for equal."""
    logits = torch.tensor([[1.0, 1.0 + 1e-12, 1.0 - 1e-12]], dtype=torch.float64)
    assert call(logits, 2)[1].tolist() == [[1, 0]]
    bias = torch.tensor([0.0, 0.0, 1e-11], dtype=torch.float64)
    weights, ids = call(logits, 2, bias=bias, scoring_func="sigmoid")
    assert ids.tolist() == [[2, 1]]
    exact, _ = naive_route(logits, 2, bias=bias, scoring_func="sigmoid")
    torch.testing.assert_close(weights, exact, rtol=1e-15, atol=0)


def test_negative_choices_lose_to_no_masked_group() -> None:
    bias = torch.full((8,), -2.0)
    _, ids = check(
        torch.randn(16, 8),
        4,
        bias=bias,
        scoring_func="sigmoid",
        num_expert_group=4,
        topk_group=2,
    )
    assert all(len({e // 2 for e in row}) == 2 for row in ids.tolist())


def test_weights_are_gathered_never_recovered_from_the_choice() -> None:
    logits = torch.tensor([[-16.1, -17.0, -18.0, -16.5]])
    bias = torch.full((4,), 12.0)
    weights, ids = call(logits, 2, bias=bias, scoring_func="sigmoid", renormalize=True)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.711, 0.289]]), rtol=0, atol=5e-4)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(num_threads: int) -> None:
    logits = torch.randn(700, 64)
    expected = call(logits, 6)
    torch.set_num_threads(num_threads)
    weights, ids = call(logits, 6)
    assert torch.equal(weights, expected[0])
    assert torch.equal(ids, expected[1])


def test_strides_of_the_logits() -> None:
    logits = torch.randn(9, 16)
    for other in (logits.T.contiguous().T, logits.repeat_interleave(2, 0)[::2]):
        assert torch.equal(call(other, 4)[1], call(logits, 4)[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(top_k=9), r"top_k \(9\) must be between 1 and the 8 experts"),
        (dict(top_k=0), r"top_k \(0\) must be between 1 and the 8 experts"),
        (dict(bias=torch.zeros(7)), r"bias must be \[8\]"),
        (dict(scoring_func="relu"), "unknown scoring_func 'relu'"),
        (dict(num_expert_group=3), r"num_expert_group \(3\) must divide the 8 experts"),
        (dict(num_expert_group=4, topk_group=5), "topk_group .5. must be between"),
        (dict(top_k=5, num_expert_group=4, topk_group=2), r"top_k \(5\) exceeds the 4 experts"),
        (dict(logits=torch.zeros(2, 8, dtype=torch.long)), r"logits must be a float tensor"),
        (dict(softmax_after_topk=True, bias=torch.zeros(8)), "give no bias"),
        (dict(logits=torch.zeros(8)), r"logits must be a float tensor \[T, E\]"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(logits=torch.zeros(2, 8), top_k=2) | options
    with pytest.raises(ValueError, match=message):
        call(**arguments)


def test_under_opcheck(cpu_kernels: Kernels) -> None:
    arguments = (torch.randn(5, 8), torch.randn(8), 2, "sigmoid", False, True, 1e-6, 2, 1, 2.5)
    torch.library.opcheck(cpu_kernels.route, arguments)
    torch.library.opcheck(cpu_kernels.route, (torch.randn(0, 8), *arguments[1:]))
