"""The checks can fail; they say where."""

from __future__ import annotations

import pytest
import torch

from cmoe.demo.verdict import LogitsError, check_rounding, check_tokens

NO_ERROR = LogitsError(relative=0.0, largest=0.0)


def error_of(relative: float) -> LogitsError:
    return LogitsError(relative=relative, largest=1.0)


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
    reference = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    logits = torch.tensor([[3.0, 4.0], [0.0, 0.5]])
    assert LogitsError.between(logits, reference) == LogitsError(relative=0.1, largest=0.5)
