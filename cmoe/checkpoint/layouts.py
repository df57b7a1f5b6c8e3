"""What the routed experts of a checkpoint are called in its other layout.

E experts, H hidden, I intermediate; N = 2I for gated experts, I for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from cmoe.checkpoint.translate import Names
from cmoe.families import Family, Layout
from cmoe.loading.expert_names import parse_expert_name

Shape = tuple[int, ...]

_PROJECTIONS: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
# Families whose files name the projections of an expert as Mixtral does.
_NUMBERED = ("mixtral", "minimax", "minimax_m2", "mistral_large4_text", "kimi_linear", "lfm2_moe")


class _Experts(NamedTuple):
    """The routed experts of one block."""

    stem: str  # their names up to and including "experts."
    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_bias: bool


def with_layout(
    shapes: Mapping[str, Shape], layout: Literal["per_expert", "fused"], family: Family
) -> dict[str, Shape]:
    """Names with shapes, those of the routed experts in the layout; other names stay.

    "fused": the names of transformers' parameters, in the family's layout; "per_expert": those of
    its files, or `experts.{e}.gate_proj.weight` where the family has none.
    """
    names = Names(family)
    blocks: dict[str, dict[str, Shape]] = {}
    changed: dict[str, Shape] = {}
    for key, shape in shapes.items():
        stem = _stem(key, names)
        if stem is None:
            changed[key] = shape
        else:
            blocks.setdefault(stem, {})[key] = shape
    file_layout = family.file_layout or family.layout
    for stem, block in blocks.items():
        experts = _measured(stem, block, names, file_layout)
        if layout == "fused":
            changed.update(_fused(experts, family.gated, file_layout))
        else:
            changed.update(_per_expert(experts, family))
    return changed


def _stem(key: str, names: Names) -> str | None:
    """What the names of a block's experts begin with; None for other tensors."""
    for name in (key, names.in_model(key)):
        if parse_expert_name(name) is not None:
            return name[: name.rindex("experts.") + len("experts.")]
    return None


def _measured(stem: str, block: Mapping[str, Shape], names: Names, file_layout: Layout) -> _Experts:
    """The sizes of a block, from its tensors in either layout."""
    num_experts, has_bias = 0, False
    matrices: dict[str, Shape] = {}
    for key, shape in block.items():
        parsed = parse_expert_name(key) or parse_expert_name(names.in_model(key))
        assert parsed is not None
        has_bias = has_bias or parsed.is_bias
        num_experts = max(num_experts, shape[0] if parsed.expert is None else parsed.expert + 1)
        if not parsed.is_bias:
            matrices["w2" if parsed.part == "w2" else "w13"] = shape
    is_turned = len(matrices["w2"]) == 3 and file_layout.transposed
    if is_turned is None:  # Both have H, at the ends that meet.
        is_turned = matrices["w2"][-2] != matrices["w13"][-1]
    *_, hidden, intermediate = matrices["w2"]
    if is_turned:
        hidden, intermediate = intermediate, hidden
    return _Experts(stem, num_experts, hidden, intermediate, has_bias)


def _fused(experts: _Experts, gated: bool, layout: Layout) -> Iterator[tuple[str, Shape]]:
    hidden, intermediate = experts.hidden_size, experts.intermediate_size
    matrices = {
        "gate_up_proj" if gated else "up_proj": ((1 + gated) * intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    for name, (rows, columns) in matrices.items():
        matrix = (columns, rows) if layout.transposed else (rows, columns)
        yield f"{experts.stem}{name}", (experts.num_experts, *matrix)
        if experts.has_bias:
            yield f"{experts.stem}{name}_bias", (experts.num_experts, rows)


def _per_expert(experts: _Experts, family: Family) -> Iterator[tuple[str, Shape]]:
    hidden, intermediate = experts.hidden_size, experts.intermediate_size
    matrices = {"w1": (intermediate, hidden), "w3": (intermediate, hidden)}
    if not family.gated:
        del matrices["w1"]
    matrices["w2"] = (hidden, intermediate)
    for expert in range(experts.num_experts):
        for part, (rows, columns) in matrices.items():
            name = part if family.model_type in _NUMBERED else _PROJECTIONS[part]
            yield f"{experts.stem}{expert}.{name}.weight", (rows, columns)
            if experts.has_bias:
                yield f"{experts.stem}{expert}.{name}.bias", (rows,)
