"""The checks can fail; they say where."""

from __future__ import annotations

import math

import pytest
import torch

from cmoe.demo.verdict import LogitsError, check_results, check_rounding, check_tokens

NO_ERROR = LogitsError(median=0.0, worst=0.0, largest=0.0)


def error_of(median: float, worst: float = 9.0) -> LogitsError:
    return LogitsError(median=median, worst=worst, largest=10.0)


def test_the_same_tokens_pass() -> None:
    verdict = check_tokens([1, 2, 3], [1, 2, 3], NO_ERROR)
    assert verdict.passed
    assert "all 3 greedy tokens are the same" in verdict.text


def test_other_tokens_fail_with_the_step_where_they_part() -> None:
    verdict = check_tokens([1, 2, 9], [1, 2, 3], NO_ERROR)
    assert not verdict.passed
    assert "part at step 2: transformers chose 3, cmoe 9" in verdict.text


@pytest.mark.parametrize(("ours", "passed"), [(0.5, True), (2.0, True), (2.1, False)])
def test_twice_the_error_of_transformers_is_allowed(ours: float, passed: bool) -> None:
    assert check_rounding("bfloat16", error_of(ours), error_of(1.0)).passed is passed


def test_an_error_that_is_no_number_fails() -> None:
    assert not check_rounding("bfloat16", error_of(float("nan")), error_of(1.0)).passed


def test_the_error_between_logits() -> None:
    reference = torch.tensor([[3.0, 4.0], [0.0, 2.0], [6.0, 8.0]])
    logits = torch.tensor([[3.0, 4.0], [0.0, 2.5], [6.0, 9.0]])
    error = LogitsError.between(logits, reference)
    assert error == LogitsError(median=0.1, worst=0.25, largest=1.0)


def test_a_token_that_takes_another_expert_does_not_decide() -> None:
    reference = torch.randn(5, 7)
    rounded = reference + 1e-3 * torch.randn(5, 7)
    ours = rounded.clone()
    ours[3] = torch.randn(7)
    errors = [LogitsError.between(logits, reference) for logits in (ours, rounded)]
    assert errors[0].worst > 100 * errors[1].worst
    assert check_rounding("bfloat16", *errors).passed


@pytest.mark.parametrize(("worst", "passed"), [(1e-6, True), (1e-2, False), (math.nan, False)])
def test_results_of_a_model_without_tokens(worst: float, passed: bool) -> None:
    verdict = check_results(error_of(0.0, worst))
    assert verdict.passed is passed
    assert f"the results are transformers' within {worst:.1e}" in verdict.text
