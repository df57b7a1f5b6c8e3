"""The text of `cmoe inspect`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cmoe.checkpoint import Checkpoint, open_checkpoint
from cmoe.checkpoint.load import family_in, likeness, model_type_of
from cmoe.config import MoEConfig, moe_part
from cmoe.custom_ops.backends import LayerSpec, explain_backends
from cmoe.errors import LoadError
from cmoe.families import SWITCH_ONLY, Family
from cmoe.inspection.bandwidth import read_gbps
from cmoe.inspection.blocks import Kind, check_sizes, kinds_of, numberless
from cmoe.inspection.defaults import described
from cmoe.inspection.routing import routing_in_words
from cmoe.loading.expert_names import parse_expert_name
from cmoe.loading.report import listed
from cmoe.machine import available_bytes, devices

_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|embeddings?|embed)\.weight$")


class Inspection(NamedTuple):
    """What was found: the text, whether all of it can be loaded."""

    text: str
    is_loadable: bool


def inspect_folder(folder: str | Path) -> Inspection:
    """Reads config.json, the index, the headers; no tensor. LoadError for a damaged folder."""
    checkpoint = open_checkpoint(folder)
    model_type = model_type_of(checkpoint)
    if model_type in SWITCH_ONLY:
        return Inspection(_text(_switch_only(checkpoint, model_type)), True)
    try:
        family = family_in(checkpoint)
        config, defaults = described(checkpoint.config, family)
        check_sizes(config)
    except ValueError as error:
        raise LoadError(f"{error}{likeness(checkpoint)}") from error
    kinds = kinds_of(checkpoint, config, family)
    lines = [
        ("family", f"{family.model_type} ({family.block} in transformers)"),
        *_by_default(defaults),
        *_departures(family, checkpoint),
        *_layer(config),
        *_blocks(kinds, checkpoint),
        *_tensors(kinds),
        *_problems(kinds, checkpoint),
        *_not_judged(kinds, checkpoint),
        *_backends(config),
        *_memory(checkpoint),
        *_speed(kinds, config, checkpoint),
    ]
    loadable = bool(kinds) and all(k.report and not k.report.problems() for k in kinds)
    return Inspection(_text(lines), loadable)


def _switch_only(checkpoint: Checkpoint, model_type: str) -> Iterator[tuple[str, str]]:
    experts = [i for n, i in checkpoint.tensors.items() if parse_expert_name(n) is not None]
    yield "family", f"{model_type}: {SWITCH_ONLY[model_type]}"
    yield "", "its experts run on cmoe by the switch of the transformers integration, nothing else"
    size, whole = sum(info.stop - info.start for info in experts), checkpoint.num_bytes()
    yield "bytes", f"{len(experts)} expert tensors, {_size(size)} of {_size(whole)}"
    yield "not judged", "all tensors: transformers loads them"
    yield from _memory(checkpoint)


def _by_default(defaults: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if defaults:
        entries = ", ".join(f"{name} = {value}" for name, value in defaults.items())
        yield "by default", f"{entries}: config.json has none, transformers' config class says so"


def _departures(family: Family, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    for fault in family.departures(moe_part(checkpoint.config)):
        yield "not replaced", f"{fault}: the switch of the transformers integration serves it"


def _layer(config: MoEConfig) -> Iterator[tuple[str, str]]:
    yield "routing", routing_in_words(config)
    bias = ", with biases" if config.has_bias else ""
    yield (
        "experts",
        f"{config.num_experts} of hidden size {config.hidden_size}, intermediate size "
        f"{config.intermediate_size}, {config.activation.name}{bias}, {_name(config.params_dtype)}",
    )


def _blocks(kinds: Sequence[Kind], checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    if not kinds:
        yield "blocks", "none found"
    layers = moe_part(checkpoint.config).get("num_hidden_layers")
    of_layers = f" (num_hidden_layers is {layers})" if isinstance(layers, int) else ""
    for kind in kinds:
        ends = dict.fromkeys((kind.paths[0], kind.paths[-1]))
        names = " ... ".join(path or "(no prefix)" for path in ends)
        yield "blocks", f"{len(kind.paths)}: {names}{of_layers}"
        rest = kind.block_bytes - kind.expert_bytes
        yield "", f"each: routed experts {_size(kind.expert_bytes)}, the rest {_size(rest)}"
    experts = sum(kind.expert_bytes * len(kind.paths) for kind in kinds)
    yield "bytes", f"routed experts {_size(experts)} of {_size(checkpoint.num_bytes())}"


def _tensors(kinds: Sequence[Kind]) -> Iterator[tuple[str, str]]:
    label = "tensors"
    for kind in kinds:
        for name, shape, dtype, places, number in kind.mapped:
            total = number * len(kind.paths)
            yield label, f"{total} x {name} {list(shape)} {_name(dtype)} -> {places}"
            label = ""


def _not_judged(kinds: Sequence[Kind], checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """What transformers alone knows the use of, alike names once."""
    judged = {key for kind in kinds for key in kind.keys}
    rest = {name: info for name, info in checkpoint.tensors.items() if name not in judged}
    size = _size(sum(info.stop - info.start for info in rest.values()))
    yield "not judged", f"{len(rest)} tensors outside of the blocks, {size}"
    if rest:
        alike = dict.fromkeys(numberless(name) for name in rest)
        yield (
            "",
            f"{listed(alike)}: whether the model needs these, and no others, transformers tells",
        )


def _problems(kinds: Sequence[Kind], checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    missing: Counter[str] = Counter()
    unused: list[str] = []
    faults = [(k.paths[0], k.fault) for k in kinds if k.fault]
    for kind in kinds:
        if kind.report is not None:
            unused += kind.report.keys_without_home
            for name in kind.report.missing():
                missing[f"{name} in {len(kind.paths)} blocks from {kind.paths[0]}"] += 1
    hint = likeness(checkpoint) if missing or unused or faults or not kinds else ""
    yield "missing", (listed(missing) or "nothing") + (hint if missing or not kinds else "")
    yield "unused", (listed(unused) or "nothing") + (hint if unused else "")
    for path, fault in faults:
        yield "does not fit", f"{path}: {fault}{hint}"


def _backends(config: MoEConfig) -> Iterator[tuple[str, str]]:
    for device in devices():
        spec = LayerSpec(
            device=device,
            dtype=config.params_dtype,
            num_experts=config.num_experts,
            top_k=config.top_k,
            hidden_size=config.padded_hidden_size(),
            intermediate_size=config.padded_intermediate_size(),
            activation=config.activation.name,
        )
        label = f"on {device}"
        for name, reasons in explain_backends(spec).items():
            yield label, f"{name}: {'no: ' + '; '.join(reasons) if reasons else 'can run'}"
            label = ""


def _memory(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    needed, available = checkpoint.num_bytes(), available_bytes()
    text = f"{_size(needed)} for the weights as stored, at most 1.05 times that while they load"
    if available is not None:
        fits = "enough" if 1.05 * needed < available else "not enough"
        text += f"; {_size(available)} are available here, {fits}"
    yield "memory", text


def _speed(
    kinds: Sequence[Kind], config: MoEConfig, checkpoint: Checkpoint
) -> Iterator[tuple[str, str]]:
    """bytes of one token's experts / rate of reading; then with all else that a token reads."""
    share = config.top_k / config.num_experts
    experts = share * sum(kind.expert_bytes * len(kind.paths) for kind in kinds)
    if not experts:
        return
    idle = (1 - share) * sum(kind.expert_bytes * len(kind.paths) for kind in kinds)
    tables = sum(i.stop - i.start for n, i in checkpoint.tensors.items() if _EMBEDDING.search(n))
    whole = checkpoint.num_bytes() - idle - tables
    device = devices()[-1]
    rate = read_gbps(device)
    yield "speed", f"{rate:.1f} GB/s are read from memory here ({device}, measured)"
    for bytes_, what in (
        (experts, f"the {config.top_k} experts of a token in every block"),
        (whole, "these with all other tensors but the embedding"),
    ):
        seconds = bytes_ / rate / 1e9
        yield "", f"{what}: {_size(int(bytes_))} / {rate:.1f} GB/s = {1e3 * seconds:.3g} ms a token"
        yield "", f"at the least, {1 / seconds:.3g} tokens/s at most, one sequence at a time"


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} bytes"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(lines: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{label:<13}{text}" for label, text in lines)
