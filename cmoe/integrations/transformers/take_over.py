"""Expert weights between the layout of transformers' modules, that of RoutedExperts.

E experts, H hidden, I intermediate; N = 2I for gated experts, I for others.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cmoe.families import Layout


@torch.no_grad()
def take_over(layout: Layout, parameter: str, source: nn.Parameter) -> nn.Parameter:
    """The parameter itself, seen as RoutedExperts wants it, in the storage that it has.

    parameter: its name in RoutedExperts. source: w13 [E, N, H], or [E, H, N] where the layout is
    transposed; w2 likewise; biases [E, N], [E, H]. Its data becomes a transposed view where that is
    needed. Alternating gate and up rows are put in order in place, with one expert's weight as
    temporary memory.
    """
    if layout.interleaved and parameter.startswith("w13"):
        for expert in source.data:
            expert.copy_(_gate_before_up(expert, _rows(layout, parameter)))
    if layout.transposed and parameter.endswith("_weight"):
        source.data = source.data.transpose(1, 2)
    return source


def to_runner(layout: Layout, parameter: str, theirs: Tensor) -> Tensor:
    """The tensor as RoutedExperts has it; a view, unless gate and up rows alternate."""
    if layout.interleaved and parameter.startswith("w13"):
        theirs = _gate_before_up(theirs, _rows(layout, parameter))
    return _turned(layout, parameter, theirs)


def to_transformers(layout: Layout, parameter: str, ours: Tensor) -> Tensor:
    """The tensor as transformers has it; a view, unless gate and up rows alternate."""
    theirs = _turned(layout, parameter, ours)
    if layout.interleaved and parameter.startswith("w13"):
        dim = _rows(layout, parameter)
        halves = theirs.unflatten(dim, (2, -1))
        theirs = halves.transpose(dim - 1, dim).flatten(dim - 1, dim)
    return theirs


def _turned(layout: Layout, parameter: str, tensor: Tensor) -> Tensor:
    is_weight = parameter.endswith("_weight")
    return tensor.transpose(1, 2) if layout.transposed and is_weight else tensor


def _rows(layout: Layout, parameter: str) -> int:
    """The dimension of transformers' tensor, from the last, along which gate and up rows lie."""
    return -2 if parameter.endswith("_weight") and not layout.transposed else -1


def _gate_before_up(tensor: Tensor, dim: int) -> Tensor:
    """g0, u0, g1, u1, ... along dim as g0, g1, ..., u0, u1, ..."""
    pairs = tensor.unflatten(dim, (-1, 2))
    return pairs.transpose(dim - 1, dim).flatten(dim - 1, dim)
