"""Whether cmoe computed what transformers computed.

N steps of generation, V size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_ERROR_RATIO = 2.0
"""cmoe's rounding error may be this many times that of transformers."""

MAX_FLOAT32_ERROR = 1e-3
"""Of results that choose no tokens: far above float32's rounding, far below a wrong formula's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome of one check, in words."""

    passed: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsError:
    """How far logits [N, V] are from the reference's.

    A step's error is the root of the mean squared difference over that of the reference. median,
    worst: of the steps' errors. largest: the largest absolute difference.
    """

    median: float
    worst: float
    largest: float

    @classmethod
    def between(cls, logits: Tensor, reference: Tensor) -> LogitsError:
        """Both [N, V], float32."""
        difference = logits.double() - reference.double()
        steps = difference.norm(dim=1) / reference.double().norm(dim=1)
        return cls(
            median=float(steps.quantile(0.5)),
            worst=float(steps.max()),
            largest=float(difference.abs().max()),
        )


def check_tokens(tokens: list[int], reference: list[int], error: LogitsError) -> Verdict:
    """float32: the tokens must be the same, to the last one."""
    for step, (ours, theirs) in enumerate(zip(tokens, reference, strict=True)):
        if ours != theirs:
            text = (
                f"float32: the tokens part at step {step}: transformers chose {theirs}, cmoe "
                f"{ours}; the first {step} of {len(tokens)} are the same"
            )
            return Verdict(passed=False, text=text)
    text = (
        f"float32: all {len(tokens)} greedy tokens are the same as transformers', logits within "
        f"{error.worst:.1e}"
    )
    return Verdict(passed=True, text=text)


def check_results(error: LogitsError) -> Verdict:
    """float32, of a model that predicts no tokens: its results themselves."""
    text = f"float32: the results are transformers' within {error.worst:.1e}"
    return Verdict(passed=error.worst <= MAX_FLOAT32_ERROR, text=text)


def check_rounding(dtype: str, ours: LogitsError, theirs: LogitsError) -> Verdict:
    """A narrow dtype: both are compared with the float32 run on the same tokens.

    Tokens are not: where two logits nearly tie, rounding decides. So it does between two experts,
    in either model at its own tokens: hence the median over the steps.
    """
    passed = ours.median <= MAX_ERROR_RATIO * theirs.median
    text = (
        f"{dtype}: relative error of the logits to the float32 run: cmoe {ours.median:.2e}, "
        f"transformers {theirs.median:.2e}, medians over the steps; "
        f"cmoe's may be {MAX_ERROR_RATIO:g} times transformers'"
        + ("" if passed else ": it is more")
    )
    return Verdict(passed=passed, text=text)
