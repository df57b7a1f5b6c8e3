"""A router's call as every backend is given it, with the judgement of its answer in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.oracle import naive_route

# A score is an exponential of a rounded argument of at most 16, then at most a sum, a quotient, a
# product: some dozens of rounding steps of float32, relative.
RTOL = 64 * torch.finfo(torch.float32).eps


def arguments(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    scoring_func: str = "softmax",
    softmax_after_topk: bool = False,
    renormalize: bool = False,
    renormalize_epsilon: float = 1e-20,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scaling: float = 1.0,
) -> tuple[Any, ...]:
    """The oracle's arguments in the order of the op's schema."""
    return (
        logits,
        bias,
        top_k,
        scoring_func,
        softmax_after_topk,
        renormalize,
        renormalize_epsilon,
        num_expert_group,
        topk_group,
        scaling,
    )


def assert_routed(
    routed: tuple[Tensor, Tensor], logits: Tensor, top_k: int, **options: Any
) -> None:
    """The oracle's ids exactly, its weights up to rounding, as the op promises them."""
    weights, ids = routed
    exact_weights, exact_ids = naive_route(logits, top_k, **options)
    assert torch.equal(ids.long().cpu(), exact_ids)
    wide = torch.promote_types(logits.dtype, torch.float32)
    assert (weights.dtype, ids.dtype) == (wide, torch.int32)
    assert weights.shape == ids.shape == (logits.shape[0], top_k)
    assert weights.stride() == ids.stride() == (top_k, 1)
    torch.testing.assert_close(weights.double().cpu(), exact_weights, rtol=RTOL, atol=1e-37)
