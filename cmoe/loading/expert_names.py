"""What the name of an expert tensor in a checkpoint says."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from torch import Tensor

_PARTS: Mapping[str, Literal["w1", "w3", "w2", "w13"]] = {
    "gate_proj": "w1",
    "w1": "w1",
    "up_proj": "w3",
    "w3": "w3",
    "down_proj": "w2",
    "w2": "w2",
    "gate_up_proj": "w13",
    "w13": "w13",
}
_PROJECTIONS: Mapping[str, str] = {
    "w1": "gate_proj",
    "w3": "up_proj",
    "w2": "down_proj",
    "w13": "gate_up_proj",
}
_NUMBERED: Mapping[str, str] = {part: part for part in _PROJECTIONS}
_BIASES: Mapping[str, str] = {".weight": ".bias", "_weight": "_bias", "": "_bias"}
_PATTERN = re.compile(
    r"(?:^|\.)(?:experts\.routed_experts|routed_experts|experts)\.(?:(?P<expert>\d+)\.)?"
    rf"(?P<part>{'|'.join(_PARTS)})(?P<kind>|\.weight|_weight|\.bias|_bias)$"
)


class ExpertTensorName(NamedTuple):
    """An expert tensor's name, taken apart."""

    expert: int | None  # None: the tensor holds all experts
    part: Literal["w1", "w3", "w2", "w13"]  # gate, up, down, gate with up
    is_bias: bool
    is_native: bool  # RoutedExperts' own parameter: always in its own layout


def parse_expert_name(name: str) -> ExpertTensorName | None:
    """The meaning of a checkpoint name at any prefix depth; None when it is no expert tensor.

    Understands `experts.{e}.gate_proj|up_proj|down_proj|w1|w3|w2.weight|bias`, the fused
    `experts.gate_up_proj|down_proj[.weight|_bias]`, RoutedExperts' own `w13_weight|w2_bias|...`.
    """
    match = _PATTERN.search(name)
    if match is None:
        return None
    expert = match["expert"]
    native = match["part"] in ("w13", "w2") and match["kind"] in ("_weight", "_bias")
    return ExpertTensorName(
        expert=None if expert is None else int(expert),
        part=_PARTS[match["part"]],
        is_bias=match["kind"].endswith("bias"),
        is_native=native and expert is None,
    )


def sibling_name(key: str, *, expert: int, part: str, is_bias: bool) -> str:
    """The name of another part of the same block's experts, in the manner of `key`.

    key: an expert tensor's name; where it holds all experts, so does the result. part: one of
    ExpertTensorName's.
    """
    match = _PATTERN.search(key)
    assert match is not None, key
    words = _NUMBERED if match["part"] in _NUMBERED.values() else _PROJECTIONS
    kind = match["kind"]
    if is_bias != kind.endswith("bias"):
        kind = _BIASES[kind] if is_bias else {b: w for w, b in _BIASES.items()}[kind]
    if match["expert"] is not None:
        return f"{key[: match.start('expert')]}{expert}.{words[part]}{kind}"
    return f"{key[: match.start('part')]}{words[part]}{kind}"


def maybe_remap_moe_expert_param_name(name: str, params: Container[str]) -> str:
    """`<prefix>experts.<p>` as `<prefix>experts.routed_experts.<p>`, when only that is in params.

    Any prefix depth, none included; a name that is right already, or that has no such home, is
    returned as it is.
    """
    if name in params:
        return name
    for match in re.finditer(r"(?<![^.])experts\.(?!routed_experts\.)", name):
        candidate = f"{name[: match.end()]}routed_experts.{name[match.end() :]}"
        if candidate in params:
            return candidate
    return name


def remap_moe_expert_weights(
    weights: Iterable[tuple[str, Tensor]], params: Container[str]
) -> Iterator[tuple[str, Tensor]]:
    """`maybe_remap_moe_expert_param_name` over (name, tensor) pairs."""
    for name, tensor in weights:
        yield maybe_remap_moe_expert_param_name(name, params), tensor
