"""The tensors that every implementation of one case is given.

T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bench.routing import draw_ids
from bench.shapes import DTYPES, Shape

NUM_DRAWS = 16
"""Inputs of one case; calls go round them, so none follows itself."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One problem: what is computed, not by whom."""

    shape: Shape
    tokens: int
    dtype: str = "bf16"
    routing: str = "uniform"
    seed: int = 0


class Weights(NamedTuple):
    """Expert weights in checkpoint layout."""

    w13: Tensor  # [E, 2I, H], gate rows, then up rows
    w2: Tensor  # [E, H, I]
    w13_bias: Tensor | None  # [E, 2I]
    w2_bias: Tensor | None  # [E, H]


class Draw(NamedTuple):
    """The activations of one call."""

    x: Tensor  # [T, H]
    topk_weights: Tensor  # [T, K] float32
    topk_ids: Tensor  # [T, K] int32


def make_weights(shape: Shape, dtype: str, *, seed: int) -> Weights:
    """Random weights, different for every expert, cheap to make.

    Each expert is a window into one pool of normal values that is a bit larger than an expert, so
    that the cost is a copy rather than a random number for every weight.
    """
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(3 * h * i + 4099 * 64, generator=generator).to(DTYPES[dtype])
    spread = pool.numel() - 3 * h * i
    w13 = torch.empty(e, 2 * i, h, dtype=pool.dtype)
    w2 = torch.empty(e, h, i, dtype=pool.dtype)
    for expert in range(e):
        start = (expert * 40961) % spread
        window = pool[start : start + 3 * h * i]
        torch.mul(window[: 2 * i * h].view(2 * i, h), h**-0.5, out=w13[expert])
        torch.mul(window[2 * i * h :].view(h, i), i**-0.5, out=w2[expert])
    if not shape.has_bias:
        return Weights(w13, w2, None, None)
    biases = torch.randn(e, 2 * i + h, generator=generator).mul_(0.1).to(DTYPES[dtype])
    return Weights(w13, w2, biases[:, : 2 * i].contiguous(), biases[:, 2 * i :].contiguous())


def make_draws(case: Case, *, num_draws: int = NUM_DRAWS) -> list[Draw]:
    """The inputs of `case`, the same in every process that asks for them."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    draws = []
    for ids in draw_ids(
        case.shape,
        case.tokens,
        routing=case.routing,
        num_draws=num_draws,
        seed=case.seed + 2,
    ):
        x = torch.randn(case.tokens, case.shape.hidden_size, generator=generator)
        logits = torch.randn(case.tokens, case.shape.top_k, generator=generator)
        draws.append(Draw(x.to(DTYPES[case.dtype]), logits.softmax(dim=1), ids))
    return draws
