"""Whether an implementation computes the right thing, asked before it is timed.

T tokens, H hidden, I intermediate, K experts per token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.inputs import Draw, Weights
from bench.shapes import Shape

NUM_ROWS = 32
"""Tokens that are checked, spread over the batch; tokens do not depend on each other."""

SWIGLUOAI_ALPHA = 1.702
SWIGLUOAI_LIMIT = 7.0


def checked_rows(tokens: int) -> Tensor:
    """Indices of the tokens that are compared, at most NUM_ROWS of them."""
    return torch.linspace(0, tokens - 1, min(tokens, NUM_ROWS)).long().unique()


def activate(h: Tensor, activation: str) -> Tensor:
    """The gated activation of [rows, 2I], gate columns first: [rows, I]."""
    gate, up = h.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "swigluoai":
        gate = gate.clamp(max=SWIGLUOAI_LIMIT)
        up = up.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT)
        return gate * torch.sigmoid(SWIGLUOAI_ALPHA * gate) * (up + 1)
    raise ValueError(f"no reference for activation {activation!r}")


def naive(shape: Shape, weights: Weights, draw: Draw, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the layer's output, expert by expert, every step in `dtype`: [rows, H]."""
    ids, scales, x = draw.topk_ids[rows], draw.topk_weights[rows], draw.x[rows].to(dtype)
    out = torch.zeros(len(rows), shape.hidden_size, dtype=dtype, device=x.device)
    for expert in ids.unique().tolist():
        row, slot = torch.where(ids == expert)
        h = F.linear(x[row], weights.w13[expert].to(dtype))
        if weights.w13_bias is not None:
            h = h + weights.w13_bias[expert].to(dtype)
        y = F.linear(activate(h, shape.activation), weights.w2[expert].to(dtype))
        if weights.w2_bias is not None:
            y = y + weights.w2_bias[expert].to(dtype)
        out.index_add_(0, row, y * scales[row, slot, None].to(dtype))
    return out


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Relative L2 distance; infinite where `got` is not finite."""
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


class Reference:
    """The right answer of one case on its checked rows, with the error that is allowed.

    Allowed is twice what plain arithmetic in the case's own dtype makes, plus one rounding step.
    """

    def __init__(self, shape: Shape, weights: Weights, draw: Draw) -> None:
        rows = checked_rows(draw.x.shape[0])
        self.expected = naive(shape, weights, draw, rows, torch.float32).cpu()
        plain = naive(shape, weights, draw, rows, draw.x.dtype).cpu()
        eps = torch.finfo(draw.x.dtype).eps
        self.allowed = 2 * relative_error(plain, self.expected) + eps

    def fault(self, got: Tensor) -> tuple[float, str | None]:
        """The relative error of the checked rows `got`, with a message when it is too large."""
        if got.shape != self.expected.shape:
            return float("inf"), f"output rows {tuple(got.shape)}, not {tuple(self.expected.shape)}"
        error = relative_error(got, self.expected)
        if error <= self.allowed:
            return error, None
        return error, f"wrong result: relative error {error:.2g}, allowed {self.allowed:.2g}"
