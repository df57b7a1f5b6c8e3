"""The router's product: logits in float32 from weights in the dtype that they have.

T tokens, H hidden, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cmoe.custom_ops.registration import of_real_calls_too

SCHEMA = "(Tensor x, Tensor weight, Tensor? bias) -> Tensor"
"""The one signature that every backend's op has."""


def gate_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x: [T, H], weight: [E, H], bias: [E] -> x @ weight.T + bias: [T, E].

    The result is float32 (float64 for float64), unrounded. Plain traceable torch, differentiable.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, weight = x.to(wide), weight.to(wide)
    bias = None if bias is None else bias.to(wide)
    if torch.compiler.is_compiling() and _is_one_token(x):
        # For one token the compiler fuses this sum with the conversion of the weights; ahead of
        # a matrix product it would write all of them out in float32.
        logits = (x.unsqueeze(-2) * weight).sum(-1)
        return logits if bias is None else logits + bias
    return F.linear(x, weight, bias)


def _is_one_token(x: Tensor) -> bool:
    """Whether the graph that is being traced is for one token alone; never adds a guard."""
    # Loads sympy, which takes longer than all of `import cmoe`.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(x.numel() == x.shape[-1]))


@of_real_calls_too
def gate_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Shape, stride, dtype of every backend's result."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=wide)
