"""The sparse blocks of a checkpoint, each tensor with the place that it would go to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from cmoe.checkpoint import Checkpoint
from cmoe.checkpoint.header import TensorInfo
from cmoe.checkpoint.load import judge_runner
from cmoe.checkpoint.resemblance import block_of
from cmoe.checkpoint.translate import Names
from cmoe.config import MoEConfig
from cmoe.context import static_context
from cmoe.errors import LoadError
from cmoe.families import Family
from cmoe.gate import GateLinear
from cmoe.layer import FusedMoE
from cmoe.loading.report import LoadReport
from cmoe.runner import MoERunner

_MAX_EXPERTS = 1 << 20
_MAX_PARAMETERS = 1 << 50  # of one projection in one layer


class Mapped(NamedTuple):
    """Tensors that are alike, with the places that they go to; numbers in names are `#`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    places: str
    number: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """Blocks that have the same tensors.

    paths: in the checkpoint's model, in its order. keys: the checkpoint's names of all their
    tensors. mapped: of one of them. report: what loading one would do; None where `fault` says why
    it cannot be loaded.
    """

    paths: tuple[str, ...]
    keys: frozenset[str]
    expert_bytes: int  # of one block's routed experts
    block_bytes: int  # of all the block's tensors
    mapped: tuple[Mapped, ...]
    report: LoadReport | None
    fault: str = ""


def check_sizes(config: MoEConfig) -> None:
    """ValueError for sizes beyond those of any model, which would take for ever to judge."""
    sizes = (config.num_experts, config.hidden_size, config.intermediate_size)
    if config.num_experts > _MAX_EXPERTS or math.prod(sizes) > _MAX_PARAMETERS:
        raise ValueError(
            f"config.json says {sizes[0]} experts of {sizes[1]} x {sizes[2]} a layer; "
            "is it damaged?"
        )


def kinds_of(checkpoint: Checkpoint, config: MoEConfig, family: Family) -> list[Kind]:
    """The blocks of the checkpoint, those that are alike judged once."""
    names = Names(family)
    blocks = blocks_of(checkpoint, names)
    alike: dict[frozenset[tuple[object, ...]], list[str]] = {}
    for path, keys in blocks.items():
        content = frozenset(
            (name, checkpoint.tensors[key].shape, checkpoint.tensors[key].dtype)
            for name, key in keys.items()
        )
        alike.setdefault(content, []).append(path)
    return [
        _judged(checkpoint, config, [(p, blocks[p]) for p in paths]) for paths in alike.values()
    ]


def blocks_of(checkpoint: Checkpoint, names: Names) -> dict[str, dict[str, str]]:
    """The keys of each block, by the names that a runner is given."""
    renamed = {names.in_model(key): key for key in checkpoint.tensors}
    starts = dict.fromkeys(start for start in map(block_of, renamed) if start is not None)
    blocks: dict[str, dict[str, str]] = {start: {} for start in starts}
    for name, key in renamed.items():
        dots = [0, *(match.end() for match in re.finditer(r"\.", name))]
        start = next((name[:dot] for dot in reversed(dots) if name[:dot] in blocks), None)
        if start is not None:
            blocks[start][names.in_runner(name.removeprefix(start))] = key
    return {start.removesuffix("."): keys for start, keys in blocks.items()}


def _judged(
    checkpoint: Checkpoint, config: MoEConfig, alike: Sequence[tuple[str, Mapping[str, str]]]
) -> Kind:
    """alike: paths of blocks, each with its keys."""
    first, keys = alike[0]
    infos = {name: checkpoint.tensors[key] for name, key in keys.items()}
    runner = _runner(config, first, infos)
    report, fault = None, ""
    try:
        report = judge_runner(runner, checkpoint, keys)
    except LoadError as error:
        fault = str(error)
    experts = [i for n, i in infos.items() if n.startswith(("experts.", "routed_experts."))]
    return Kind(
        paths=tuple(path for path, _ in alike),
        keys=frozenset(key for _, given in alike for key in given.values()),
        expert_bytes=sum(info.stop - info.start for info in experts),
        block_bytes=sum(info.stop - info.start for info in infos.values()),
        mapped=tuple(_mapped(runner, keys, infos)),
        report=report,
        fault=fault,
    )


def _runner(config: MoEConfig, path: str, infos: Mapping[str, TensorInfo]) -> MoERunner:
    """A runner without storage; parts that the config says nothing of are as they are stored."""
    parts = {
        name: _as_stored(infos, name)
        for name in ("input_transform", "output_transform")
        if any(other.startswith(f"{name}.") for other in infos)
    }
    # Behind an input transform the experts are narrower than the block.
    gate = infos.get("gate.weight") if "input_transform" in parts else None
    width = config.hidden_size if gate is None else gate.shape[-1]
    shared = [name for name in infos if name.startswith("shared_experts.mlp.")]
    gate_of_shared = [name for name in infos if name.startswith("shared_experts.gate.")]
    with torch.device("meta"), static_context():
        return FusedMoE(
            config,
            path or "block",
            gate=GateLinear(width, config.num_experts, bias="gate.bias" in infos),
            shared_experts=_as_stored(infos, "shared_experts.mlp") if shared else None,
            shared_expert_gate=_as_stored(infos, "shared_experts.gate") if gate_of_shared else None,
            input_transform=parts.get("input_transform"),
            output_transform=parts.get("output_transform"),
        )


def _as_stored(infos: Mapping[str, TensorInfo], prefix: str) -> nn.Module:
    """A module with the parameters that the checkpoint has under the prefix."""
    root = nn.Module()
    for name, info in infos.items():
        if not name.startswith(f"{prefix}."):
            continue
        *path, leaf = name.removeprefix(f"{prefix}.").split(".")
        module = root
        for step in path:
            if step not in module._modules:
                module.add_module(step, nn.Module())
            module = module.get_submodule(step)
        empty = torch.empty(info.shape, dtype=info.dtype, device="meta")
        module.register_parameter(leaf, nn.Parameter(empty, requires_grad=False))
    return root


def _mapped(
    runner: MoERunner, keys: Mapping[str, str], infos: Mapping[str, TensorInfo]
) -> Iterator[Mapped]:
    home_of = runner.homes().home_of
    groups: dict[tuple[str, tuple[int, ...], torch.dtype, str], int] = {}
    for name, info in infos.items():
        try:
            writes = home_of(name, torch.empty(info.shape, dtype=info.dtype, device="meta"))
        except LoadError:
            places = "does not fit"
        else:
            slots = [slot for write in writes or () for slot in write.slots]
            places = ", ".join(dict.fromkeys(numberless(slot) for slot in slots)) or "unused"
        group = (numberless(keys[name]), info.shape, info.dtype, places)
        groups[group] = groups.get(group, 0) + 1
    for (pattern, shape, dtype, places), number in groups.items():
        yield Mapped(pattern, shape, dtype, places, number)


def numberless(name: str) -> str:
    """The name with `#` for each number that is a part of it."""
    return re.sub(r"(?<=[.\[])\d+(?=[.\]])", "#", name)
