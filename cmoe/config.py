"""The configuration of one MoE layer: frozen, validated where it is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch

from cmoe.activation import Activation
from cmoe.families import FAMILIES, SWITCH_ONLY, Attr, Choice, family_of

_HF_ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}

_SMALLEST_EPSILON = 1e-37  # of what float32 holds to full precision


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterConfig:
    """The closed routing formulas; `custom_ops/route.py` states them.

    scoring_func: softmax, sigmoid or sqrtsoftplus of the logits.
    softmax_after_topk: choose by the logits, then softmax over the chosen ones (gpt-oss).
    renormalize: divide a token's weights by their sum plus renormalize_epsilon.
    use_grouped_topk: choose within the best `topk_group` of `num_expert_group` groups.
    e_score_correction_bias: the router has a bias, float32 [E], that takes part in the choice only.
    routed_scaling_factor: multiplies the weights, or the experts' sum where
        apply_routed_scale_to_output says so.
    apply_router_weight_on_input: the weight multiplies the experts' input instead (top_k = 1).
    """

    scoring_func: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    softmax_after_topk: bool = False
    renormalize: bool = True
    renormalize_epsilon: float = 1e-20
    use_grouped_topk: bool = False
    num_expert_group: int = 1
    topk_group: int = 1
    e_score_correction_bias: bool = False
    routed_scaling_factor: float = 1.0
    apply_routed_scale_to_output: bool = False
    apply_router_weight_on_input: bool = False

    def scale_on_weights(self) -> float:
        """The factor that a router multiplies its weights by."""
        return 1.0 if self.apply_routed_scale_to_output else self.routed_scaling_factor

    def scale_on_output(self) -> float:
        """The factor that the runner multiplies the experts' sum by."""
        return self.routed_scaling_factor if self.apply_routed_scale_to_output else 1.0

    def __post_init__(self) -> None:
        self._check_types()
        if self.scoring_func not in ("softmax", "sigmoid", "sqrtsoftplus"):
            raise ValueError(
                f"unknown scoring_func {self.scoring_func!r}; "
                "choose one of softmax, sigmoid, sqrtsoftplus"
            )
        if self.softmax_after_topk and (
            self.scoring_func != "softmax" or self.e_score_correction_bias
        ):
            raise ValueError("softmax_after_topk needs scoring_func='softmax' without a bias")
        if not self.use_grouped_topk and (self.num_expert_group, self.topk_group) != (1, 1):
            raise ValueError(
                f"num_expert_group ({self.num_expert_group}) with topk_group ({self.topk_group}) "
                "needs use_grouped_topk=True"
            )
        if not 1 <= self.topk_group <= self.num_expert_group:
            raise ValueError(
                f"topk_group ({self.topk_group}) must be between 1 and "
                f"num_expert_group ({self.num_expert_group})"
            )

    def _check_types(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if field_.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{field_.name} must be True or False, got {value!r}")
            if field_.type == "int" and not _is_int(value):
                raise ValueError(f"{field_.name} must be an int, got {value!r}")
        if not _is_finite(self.routed_scaling_factor):
            raise ValueError(
                f"routed_scaling_factor must be finite, got {self.routed_scaling_factor!r}"
            )
        epsilon = self.renormalize_epsilon
        if not _is_finite(epsilon) or epsilon < _SMALLEST_EPSILON:
            raise ValueError(
                f"renormalize_epsilon must be at least {_SMALLEST_EPSILON}, got {epsilon!r}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLayout:
    """How fused expert tensors lie in the checkpoint.

    transposed: [E, K, N] instead of [E, N, K]; None: a tensor's shape tells, and one that fits both
        is an error, never a guess.
    interleaved: gate with up rows alternate (g0, u0, g1, u1, ...) instead of gate rows, up rows.
    """

    transposed: bool | None = None
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantConfig:
    """The number format of the expert weights.

    method: a row of the table in `quant/table.py`.
    size_multiple: hidden and intermediate sizes are stored rounded up to a multiple of this, with
        zeros behind the logical size.
    """

    method: str = "unquantized"
    size_multiple: int = 1

    def __post_init__(self) -> None:
        if self.size_multiple < 1:
            raise ValueError(f"size_multiple must be at least 1, got {self.size_multiple}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Sizes with this rank's place in them: tensor, expert, data, sequence parallel.

    expert_placement: which rank holds which physical expert, see `expert_map.py`.
    num_redundant_experts: physical experts beyond the logical ones.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    dp_size: int = 1
    dp_rank: int = 0
    sp_size: int = 1
    sp_rank: int = 0
    expert_placement: Literal["linear", "round_robin"] = "linear"
    num_redundant_experts: int = 0

    def __post_init__(self) -> None:
        for axis in ("tp", "ep", "dp", "sp"):
            size, rank = getattr(self, f"{axis}_size"), getattr(self, f"{axis}_rank")
            if size < 1 or not 0 <= rank < size:
                raise ValueError(
                    f"{axis}_rank ({rank}) must be in [0, {axis}_size) with {axis}_size ({size}) "
                    "at least 1"
                )
        if self.expert_placement not in ("linear", "round_robin"):
            raise ValueError(
                f"unknown expert_placement {self.expert_placement!r}; choose linear or round_robin"
            )
        if self.num_redundant_experts < 0:
            raise ValueError(f"num_redundant_experts is negative: {self.num_redundant_experts}")


_PARTS: Mapping[str, type] = {
    "router": RouterConfig,
    "activation": Activation,
    "quant": QuantConfig,
    "parallel": ParallelConfig,
    "layout": CheckpointLayout,
}
"""The fields of MoEConfig that are configs themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """Static description of one MoE layer; sizes are logical, per model, not per rank.

    num_experts, top_k, hidden_size, intermediate_size: E, K, H, I.
    activation: a name of `cmoe.activation.ACTIVATIONS`, or an Activation with its constants.
    has_bias: the experts' projections have biases.
    params_dtype: dtype of the weights when the layer is built; inputs must have the same.
    backend: "auto" or the name of a backend, which then never falls back.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: Activation = field(default_factory=lambda: Activation.named("silu"))
    has_bias: bool = False
    params_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    router: RouterConfig = field(default_factory=RouterConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    layout: CheckpointLayout = field(default_factory=CheckpointLayout)
    backend: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.activation, str):
            object.__setattr__(self, "activation", Activation.named(self.activation))
        for name in ("num_experts", "top_k", "hidden_size", "intermediate_size"):
            value = getattr(self, name)
            if not _is_int(value) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if not isinstance(self.has_bias, bool):
            raise ValueError(f"has_bias must be True or False, got {self.has_bias!r}")
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k ({self.top_k}) must not exceed num_experts ({self.num_experts})"
            )
        is_dtype = isinstance(self.params_dtype, torch.dtype)
        if not is_dtype or not self.params_dtype.is_floating_point:
            raise ValueError(
                f"params_dtype must be a float dtype such as torch.bfloat16, "
                f"got {self.params_dtype!r}"
            )
        for name, kind in _PARTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")
        self._check_router()

    def _check_router(self) -> None:
        router = self.router
        if router.apply_router_weight_on_input and self.top_k != 1:
            raise ValueError(f"apply_router_weight_on_input needs top_k = 1, got {self.top_k}")
        if self.num_experts % router.num_expert_group:
            divisors = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
            raise ValueError(
                f"num_expert_group ({router.num_expert_group}) must divide num_experts "
                f"({self.num_experts}); choose one of {', '.join(map(str, divisors))}"
            )
        reachable = router.topk_group * (self.num_experts // router.num_expert_group)
        if self.top_k > reachable:
            raise ValueError(
                f"top_k ({self.top_k}) exceeds the {reachable} experts in topk_group "
                f"({router.topk_group}) groups"
            )

    def num_physical_experts(self) -> int:
        """Logical plus redundant experts, over all ranks."""
        return self.num_experts + self.parallel.num_redundant_experts

    def padded_hidden_size(self) -> int:
        """H as the weights store it."""
        return _round_up(self.hidden_size, self.quant.size_multiple)

    def padded_intermediate_size(self) -> int:
        """I as the weights store it."""
        return _round_up(self.intermediate_size, self.quant.size_multiple)

    @classmethod
    def from_hf(cls, hf_config: Any) -> MoEConfig:
        """The layer that a Hugging Face config describes.

        hf_config: a transformers config, or the dict of a config.json; of a model of several parts,
        the part that has experts is read. The dtype is the config's, else torch's default.
        ValueError for a family that is not in the table, for an attribute that the family's row
        names but the config lacks, for values that no layer can have.
        """
        part = moe_part(hf_config)
        family = family_of(part_type := _model_type(part))
        activation = _resolve(part, family.activation)
        if not isinstance(activation["name"], str):
            raise ValueError(
                f"the activation of {part_type} must be a name, got {activation['name']!r}"
            )
        name = _HF_ACTIVATIONS.get(activation["name"], activation["name"])
        activation["name"] = name if family.gated else f"{name}_no_mul"
        layout = family.file_layout or family.layout
        return cls(
            activation=Activation(**activation),
            router=RouterConfig(**_resolve(part, family.router)),
            layout=CheckpointLayout(transposed=layout.transposed, interleaved=layout.interleaved),
            params_dtype=_dtype(part) or _dtype(hf_config) or torch.get_default_dtype(),
            **_resolve(part, family.config),
        )


def moe_part(hf_config: Any) -> Any:
    """The part of a Hugging Face config whose model_type the table of families knows.

    hf_config itself, or the one config within it, at any depth. ValueError where there are several;
    hf_config where there is none.
    """
    if _is_known(hf_config):
        return hf_config
    found = [part for part in _parts(hf_config) if _is_known(part)]
    if len(found) > 1:
        names = ", ".join(_model_type(part) for part in found)
        raise ValueError(
            f"the Hugging Face config has several parts with experts: {names}; give one"
        )
    return found[0] if found else hf_config


def _is_known(hf_config: Any) -> bool:
    known = [*SWITCH_ONLY, *(family.model_type for family in FAMILIES)]
    return _read(hf_config, "model_type") in known


def _parts(hf_config: Any) -> Iterator[Any]:
    """The configs within a config."""
    inside = hf_config if isinstance(hf_config, Mapping) else _read(hf_config, "__dict__")
    if inside is _MISSING:
        return
    for value in inside.values():
        if _read(value, "model_type") is not _MISSING:
            yield value
            yield from _parts(value)


def _model_type(hf_config: Any) -> str:
    name = _attribute(hf_config, Attr("model_type"))
    if not isinstance(name, str):
        raise ValueError(f"model_type of the Hugging Face config must be a string, got {name!r}")
    return name


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


_MISSING = object()


def _read(hf_config: Any, name: str) -> Any:
    """An attribute of a transformers config, or an entry of a config.json's dict."""
    if isinstance(hf_config, Mapping):
        return hf_config.get(name, _MISSING)
    return getattr(hf_config, name, _MISSING)


def _attribute(hf_config: Any, attribute: Attr) -> Any:
    """The value that the config has under one of the names, else the default."""
    value = _read(hf_config, attribute.name)
    if value in (_MISSING, None) and attribute.other_name is not None:
        value = _read(hf_config, attribute.other_name)
    if value in (_MISSING, None) and attribute.default is not None:
        value = attribute.default
    if value is _MISSING:
        raise ValueError(
            f"the Hugging Face config has no {attribute.name!r}; is it of another family?"
        )
    return value


def _resolve(hf_config: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _value(hf_config, value) for key, value in values.items()}


def _value(hf_config: Any, value: Any) -> Any:
    if isinstance(value, Attr):
        return _attribute(hf_config, value)
    if isinstance(value, Choice):
        chosen = _attribute(hf_config, Attr(value.attribute))
        for key, result in value.values.items():
            if chosen == key:
                return _value(hf_config, result)
        known = ", ".join(map(str, value.values))
        raise ValueError(
            f"{value.attribute} of the Hugging Face config is {chosen!r}; choose one of {known}"
        )
    return value


def _dtype(hf_config: Any) -> torch.dtype | None:
    """The dtype that the config states; None where it leaves that open."""
    value = _read(hf_config, "dtype")
    if value in (_MISSING, None) and isinstance(hf_config, Mapping):
        value = hf_config.get("torch_dtype")
    if value in (_MISSING, None, "auto"):
        return None
    named = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else value
    if not isinstance(named, torch.dtype):
        raise ValueError(
            f"dtype of the Hugging Face config is {value!r}, which torch does not have"
        )
    return named
