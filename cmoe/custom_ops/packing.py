"""Packed weights: a layout of expert weights that outer products read from end to end.

E experts, N rows, K columns. 32 rows are a strip, two neighbouring columns a pair.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

STRIP = 32
"""Rows that lie side by side; kStrip in cpu/problem.h."""

PAIR = 2
"""Columns of a row that lie together."""


def is_packed(weight: Tensor) -> bool:
    """Whether a weight of the experts is packed; its number of dimensions is all that tells."""
    return weight.dim() == 5


def pack(weight: Tensor) -> Tensor:
    """[E, N, K], any strides -> [E, N/32, K/2, 32, 2], contiguous, as many bytes.

    packed[e, s, p, r, h] = weight[e, 32 * s + r, 2 * p + h]. A copy, without temporary memory.
    ValueError unless N is a multiple of 32, K of 2.
    """
    if weight.dim() != 3 or weight.shape[1] % STRIP or weight.shape[2] % PAIR:
        raise ValueError(
            f"a weight to pack must be [E, N, K], N a multiple of {STRIP}, K of {PAIR}; "
            f"got {tuple(weight.shape)}"
        )
    return as_packed(weight).clone(memory_format=torch.contiguous_format)


def unpack(packed: Tensor) -> Tensor:
    """[E, N/32, K/2, 32, 2] -> [E, N, K], contiguous: the inverse of `pack`.

    A copy, without temporary memory; traceable, differentiable. ValueError for another shape.
    """
    shape = unpacked_shape(packed)
    rows = packed.transpose(-3, -2)
    return rows.clone(memory_format=torch.contiguous_format).view(shape)


def unpacked_shape(packed: Tensor) -> tuple[int, int, int]:
    """[E, N/32, K/2, 32, 2] -> (E, N, K). ValueError for another shape."""
    if not is_packed(packed) or tuple(packed.shape[3:]) != (STRIP, PAIR):
        raise ValueError(
            f"a packed weight must be [E, N/{STRIP}, K/{PAIR}, {STRIP}, {PAIR}]; "
            f"got {tuple(packed.shape)}"
        )
    return packed.shape[0], packed.shape[1] * STRIP, packed.shape[2] * PAIR


@torch.inference_mode(False)
@torch.no_grad()
def lay_out(parameter: nn.Parameter, layout: Callable[[Tensor], Tensor]) -> None:
    """Gives the parameter, which stays the same object, storage with the layout's result.

    layout: pack, unpack or another copy. Other tensors on the former storage keep it as it is. A
    gradient follows.
    """
    grad = parameter.grad
    parameter.data = layout(parameter.data)
    if grad is not None:
        parameter.grad = layout(grad)


def as_packed(weight: Tensor) -> Tensor:
    """[..., N, K], any strides -> [..., N/32, K/2, 32, 2], a view: what is copied to a packed one.

    N a multiple of 32, K of 2.
    """
    rows, columns = weight.shape[-2:]
    pairs = weight.unflatten(-1, (columns // PAIR, PAIR))
    return pairs.unflatten(-3, (rows // STRIP, STRIP)).transpose(-3, -2)
