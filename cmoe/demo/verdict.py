"""Whether cmoe computed what transformers computed.

N steps of generation, V size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_ERROR_RATIO = 2.0
"""cmoe's rounding error may be this many times that of transformers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The outcome of one check, in words."""

    passed: bool
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsError:
    """How far logits [N, V] are from the reference's.

    relative: root of the mean squared difference over that of the reference. largest: the largest
    absolute difference.
    """

    relative: float
    largest: float

    @classmethod
    def between(cls, logits: Tensor, reference: Tensor) -> LogitsError:
        """Both [N, V], float32."""
        difference = logits.double() - reference.double()
        relative = difference.norm() / reference.double().norm()
        return cls(relative=float(relative), largest=float(difference.abs().max()))


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
        f"{error.relative:.1e}"
    )
    return Verdict(passed=True, text=text)


def check_rounding(dtype: str, ours: LogitsError, theirs: LogitsError) -> Verdict:
    """A narrow dtype: both are compared with the float32 run on the same tokens.

    Tokens are not: where two logits nearly tie, rounding decides.
    """
    passed = ours.relative <= MAX_ERROR_RATIO * theirs.relative
    text = (
        f"{dtype}: relative error of the logits to the float32 run: cmoe {ours.relative:.2e}, "
        f"transformers {theirs.relative:.2e}; "
        f"cmoe's may be {MAX_ERROR_RATIO:g} times transformers'"
        + ("" if passed else ": it is more")
    )
    return Verdict(passed=passed, text=text)
