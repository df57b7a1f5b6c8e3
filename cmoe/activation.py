"""The table of expert activations: name, formula, gated or not.

g is the gate part, u the up part of an expert's first projection; non-gated forms have g alone.
Formulas are computed in the dtype of their input: callers widen it to float32 first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_Formula = Callable[[Tensor, Tensor, float], Tensor]


def _silu(g: Tensor, u: Tensor, alpha: float) -> Tensor:
    return F.silu(g) * u


def _gelu(g: Tensor, u: Tensor, alpha: float) -> Tensor:
    return F.gelu(g) * u


def _gelu_tanh(g: Tensor, u: Tensor, alpha: float) -> Tensor:
    return F.gelu(g, approximate="tanh") * u


def _relu2(g: Tensor, u: Tensor, alpha: float) -> Tensor:
    return F.relu(g).square() * u


def _swigluoai(g: Tensor, u: Tensor, alpha: float) -> Tensor:
    return g * torch.sigmoid(alpha * g) * (u + 1)


# Sources: SwiGLU/GEGLU, Shazeer 2020 (arXiv 2002.05202); squared ReLU, So et al. 2021 (arXiv
# 2109.08668); swigluoai, the clamped SwiGLU of OpenAI's gpt-oss reference.
_GATED: Mapping[str, _Formula] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "relu2": _relu2,
    "swigluoai": _swigluoai,
}
_NON_GATED: Mapping[str, str] = {
    f"{name}_no_mul": name for name in ("silu", "gelu", "gelu_tanh", "relu2")
}

ACTIVATIONS: tuple[str, ...] = (*_GATED, *_NON_GATED)
"""Every name that `Activation` accepts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """One row of the table with its constants.

    name: one of `ACTIVATIONS`; `<name>_no_mul` is the non-gated form.
    alpha: slope inside the sigmoid of swigluoai; unused elsewhere.
    limit: clamp of the pre-activations, g to at most limit, u to [-limit, limit]; None: no clamp.
    """

    name: str
    alpha: float = 1.0
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ValueError(
                f"unknown activation {self.name!r}; choose one of {', '.join(ACTIVATIONS)}"
            )
        for name in ("alpha", "limit"):
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number and not (name == "limit" and value is None):
                raise ValueError(f"activation {name} must be a number, got {value!r}")
        if self.limit is not None and not (self.limit > 0 and math.isfinite(self.limit)):
            raise ValueError(f"activation limit must be positive and finite, got {self.limit}")

    @classmethod
    def named(cls, name: str) -> Activation:
        """The activation with its usual constants (gpt-oss: alpha 1.702, limit 7)."""
        if name == "swigluoai":
            return cls(name=name, alpha=1.702, limit=7.0)
        return cls(name=name)

    def is_gated(self) -> bool:
        """Whether the first projection has an up part beside the gate part."""
        return self.name in _GATED


def apply_activation(
    h: Tensor, name: str, alpha: float, limit: float | None, *, interleaved: bool = False
) -> Tensor:
    """The activation of h, in h's dtype.

    h: [rows, 2I] for gated names: gate columns then up columns, or alternating (gate first) with
    `interleaved`; [rows, I] for non-gated names. -> [rows, I].
    """
    if name in _NON_GATED:
        g = h if limit is None else h.clamp(max=limit)
        return _GATED[_NON_GATED[name]](g, torch.ones_like(g), alpha)
    if interleaved:
        g, u = h[..., 0::2], h[..., 1::2]
    else:
        g, u = h.chunk(2, dim=-1)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return _GATED[name](g, u, alpha)
