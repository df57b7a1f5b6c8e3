"""The table of what transformers' experts compute between their two projections.

Data, with the one function that reads it. An experts class that is not told by these rows runs the
staged path, which calls the class's own activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2CLS
from transformers.integrations.moe import _default_apply_gate


class FusedForm(NamedTuple):
    """The arguments of `fused_experts` that say what happens between the projections."""

    activation: str
    alpha: float = 1.0
    limit: float | None = None
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One row: what a class's own `_apply_gate` computes.

    activation: a name of `cmoe.activation`; None: that of the module's act_fn.
    alpha, limit: the module's attributes that hold these constants; None: it has none.
    """

    activation: str | None = None
    alpha: str | None = None
    limit: str | None = None
    interleaved: bool = False


_DEFAULT = Gate()

# By the names that transformers gives to the activations in its configs.
_NAMES: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
_ACT_FNS: Mapping[type, str] = {ACT2CLS[hf]: name for hf, name in _NAMES.items()}

_MODELS = "transformers.models."
GATES: Mapping[str, Gate] = {
    f"{_MODELS}beam.modeling_beam.BeamExperts": _DEFAULT,
    f"{_MODELS}deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts": Gate(limit="limit"),
    f"{_MODELS}glm5_next.modeling_glm5_next.Glm5NextTextExperts": Gate(
        activation="silu", limit="swiglu_limit"
    ),
    f"{_MODELS}gpt_oss.modeling_gpt_oss.GptOssExperts": Gate(
        activation="swigluoai", alpha="alpha", limit="limit", interleaved=True
    ),
    f"{_MODELS}hy_v4.modeling_hy_v4.HYV4Experts": Gate(activation="silu", limit="swiglu_limit"),
    f"{_MODELS}hy_v4_vl.modeling_hy_v4_vl.HYV4VLExperts": Gate(
        activation="silu", limit="swiglu_limit"
    ),
    f"{_MODELS}minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts": Gate(
        activation="swigluoai", alpha="swiglu_alpha", limit="swiglu_limit"
    ),
    f"{_MODELS}openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts": (
        Gate(activation="swigluoai", alpha="alpha", limit="limit")
    ),
}
"""The classes of transformers with an `_apply_gate` that `fused_experts` can compute."""


def fused_form(experts: Any) -> FusedForm | str:
    """What `fused_experts` is to compute in place of the module, or why it cannot.

    experts: a module of transformers' experts interface. Ordinary traceable Python, so that a
    compiled graph is guarded by all that the answer depends on.
    """
    if experts.has_post_expert_norm:
        return "it normalises each expert's output"
    row = _gate_of(experts) if experts.has_gate else _DEFAULT
    if row is None:
        return "its _apply_gate is not in the table"
    name = row.activation or _activation(experts.act_fn)
    if name is None:
        return f"its activation {type(experts.act_fn).__name__} is not in the table"
    if not experts.has_gate:
        return FusedForm(f"{name}_no_mul")
    alpha = 1.0 if row.alpha is None else float(getattr(experts, row.alpha))
    limit = None if row.limit is None else getattr(experts, row.limit)
    return FusedForm(name, alpha, None if limit is None else float(limit), row.interleaved)


def _activation(act_fn: Callable[[Tensor], Tensor]) -> str | None:
    return "silu" if act_fn is F.silu else _ACT_FNS.get(type(act_fn))


def _gate_of(experts: Any) -> Gate | None:
    """The row for the gate that a call of the module would run."""
    if "_apply_gate" in experts.__dict__:
        return None
    apply_gate = type(experts)._apply_gate
    if apply_gate is _default_apply_gate:
        return _DEFAULT
    return GATES.get(_name(apply_gate).removesuffix("._apply_gate"))


@torch.compiler.assume_constant_result  # A graph is guarded by the function that it is given.
def _name(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"
