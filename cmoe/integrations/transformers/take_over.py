"""Expert weights of a transformers module as RoutedExperts keeps them, in the storage they have.

E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cmoe.families import Family


@torch.no_grad()
def take_over(family: Family, parameter: str, source: nn.Parameter) -> nn.Parameter:
    """The parameter of RoutedExperts in the storage of transformers' own.

    source: gate_up_proj [E, 2I, H], or [E, H, 2I] where the family keeps it transposed; down_proj
    likewise; biases [E, 2I], [E, H]. Returns source itself where it lies as cmoe wants it, else a
    parameter that is a transposed view of it. Alternating gate and up rows are put in order in
    place, with one expert's weight as temporary memory.
    """
    is_bias = parameter.endswith("_bias")
    if family.interleaved and parameter.startswith("w13"):
        put_gate_before_up(source.data, dim=-1 if is_bias or family.transposed else -2)
    if is_bias or not family.transposed:
        return source
    return nn.Parameter(source.data.transpose(1, 2), requires_grad=source.requires_grad)


def put_gate_before_up(experts: Tensor, dim: int) -> None:
    """g0, u0, g1, u1, ... along dim becomes g0, g1, ..., u0, u1, ... in place, expert by expert."""
    for expert in experts:
        pairs = expert.unflatten(dim, (-1, 2))
        expert.copy_(torch.cat([pairs.select(dim, 0), pairs.select(dim, 1)], dim))
