"""Checkpoint tensors into a model's own storage, planned whole from the headers first."""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from torch import nn

from cmoe.checkpoint.folder import Checkpoint
from cmoe.checkpoint.homes import ModelHomes
from cmoe.checkpoint.mapped import MappedTensor
from cmoe.checkpoint.resemblance import families_like
from cmoe.checkpoint.translate import Names
from cmoe.config import moe_part
from cmoe.errors import LoadError
from cmoe.families import Family, family_of
from cmoe.loading.report import LoadReport, judge_tensors, load_tensors
from cmoe.runner_interface import MoERunnerInterface


def load_layer(
    runner: MoERunnerInterface, checkpoint: Checkpoint, prefix: str, *, strict: bool = True
) -> LoadReport:
    """Loads the tensors whose names begin with `prefix` ("model.layers.0.mlp") into the runner.

    An empty prefix: all tensors of the checkpoint.
    Judged from the headers first: with `strict`, LoadError for a key with no home or a slot with no
    tensor, in any case for a shape or dtype that does not fit; nothing is written then. Tensors are
    mapped one at a time and copied into the parameters' storage, converted to their dtype.
    """
    if not isinstance(runner, MoERunnerInterface):
        raise ValueError(
            f"load_layer fills a MoERunner, got a {type(runner).__name__}; load_model fills a model"
        )
    names = Names(family_in(checkpoint))
    path = names.in_model(f"{prefix}.").removesuffix(".") if prefix else ""
    keys = names.inside(checkpoint.tensors, path)
    if not keys:
        raise LoadError(f"{checkpoint.folder} has no tensor under {prefix!r}{_blocks(checkpoint)}")
    report = judge_runner(runner, checkpoint, keys)
    if strict:
        _check(report, prefix, checkpoint)
    report = load_runner(runner, checkpoint, keys)
    return report.check(prefix) if strict else report


def load_model(
    model: nn.Module, checkpoint: Checkpoint, *, strict: bool = True, ignore: Collection[str] = ()
) -> LoadReport:
    """Loads a whole model, runners among its modules; the rest by the names of its state_dict.

    ignore: regular expressions of checkpoint names that the model does without. Otherwise as
    load_layer: everything is judged, from the headers, before anything is written.
    """
    # As they are: packed weights would be copied for their names.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_meta:
            raise LoadError(
                f"{name} is on the meta device; give the model storage with to_empty first"
            )
    report = judge_model(model, checkpoint, ignore=ignore)
    if strict:
        _check(report, str(checkpoint.folder), checkpoint)
    homes = ModelHomes(model, Names(family_in(checkpoint)))
    own, inside = homes.by_runner(keys_without(checkpoint, ignore))
    what = str(checkpoint.folder)
    reports = [load_tensors(_stored(checkpoint, own), homes.own(own), what=what, strict=False)]
    for name, runner in homes.runners.items():
        reports.append(load_runner(runner, checkpoint, inside[name]).under(name))
    report = _joined(reports)
    return report.check(what) if strict else report


def family_in(checkpoint: Checkpoint) -> Family:
    """The checkpoint's family; LoadError names the known ones when it is none of them."""
    if not isinstance(checkpoint, Checkpoint):
        raise ValueError(f"a checkpoint is what open_checkpoint(folder) gives, got {checkpoint!r}")
    try:
        return family_of(model_type_of(checkpoint))
    except LoadError:
        raise
    except ValueError as error:
        raise LoadError(f"{checkpoint.folder}: {error}") from error


def model_type_of(checkpoint: Checkpoint) -> str:
    """What config.json says of the part that has experts; LoadError where it is no name."""
    try:
        model_type = moe_part(checkpoint.config).get("model_type", "")
    except ValueError as error:
        raise LoadError(f"{checkpoint.folder}: {error}") from error
    if not isinstance(model_type, str) or len(model_type) > 100:
        raise LoadError(f"{checkpoint.folder}: model_type {model_type!r:.80} is no family's name")
    return model_type


def likeness(checkpoint: Checkpoint) -> str:
    """Which other families the tensors look like; empty where the checkpoint's own is one."""
    like, model_type = families_like(checkpoint.tensors), model_type_of(checkpoint)
    if not like or model_type in like:
        return ""
    return f"; config.json says {model_type}, the tensors look like {', '.join(like[:6])}"


def _check(report: LoadReport, what: str, checkpoint: Checkpoint) -> None:
    try:
        report.check(what)
    except LoadError as error:
        raise LoadError(f"{error}{likeness(checkpoint)}") from None


def judge_model(
    model: nn.Module, checkpoint: Checkpoint, *, ignore: Collection[str] = ()
) -> LoadReport:
    """What load_model would do, from the headers alone; the model may be on the meta device."""
    homes = ModelHomes(model, Names(family_in(checkpoint)))
    keys = keys_without(checkpoint, ignore)
    try:
        return judge_tensors(_stored(checkpoint, keys), homes.whole(keys))
    except LoadError as error:
        raise LoadError(f"{checkpoint.folder}: {error}") from error


def keys_without(checkpoint: Checkpoint, ignore: Collection[str]) -> list[str]:
    """The names that none of the regular expressions is found in; ValueError for what is none."""
    if isinstance(ignore, str):
        raise ValueError(f"ignore is a list of regular expressions, got {ignore!r} alone")
    try:
        patterns = [re.compile(pattern) for pattern in ignore]
    except re.error as error:
        raise ValueError(f"ignore: {error.pattern!r} is no regular expression ({error})") from error
    return [key for key in checkpoint.tensors if not any(p.search(key) for p in patterns)]


def _stored(checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, MappedTensor]:
    return {key: checkpoint.stored(key) for key in keys}


def judge_runner(
    runner: MoERunnerInterface, checkpoint: Checkpoint, keys: Mapping[str, str]
) -> LoadReport:
    """What load_runner would do, from the headers alone.

    keys: checkpoint names by the names that the runner is given.
    """
    stored = {name: checkpoint.stored(key) for name, key in keys.items()}
    try:
        return judge_tensors(stored, runner.homes()).renamed(keys)
    except LoadError as error:
        raise LoadError(f"{checkpoint.folder}: {error}") from error


def load_runner(
    runner: MoERunnerInterface, checkpoint: Checkpoint, keys: Mapping[str, str]
) -> LoadReport:
    """Loads what there is into the runner; see judge_runner."""
    stored = {name: checkpoint.stored(key) for name, key in keys.items()}
    return runner.load_weights(stored, strict=False).renamed(keys)


def _joined(reports: list[LoadReport]) -> LoadReport:
    *tuples, filled_by = zip(*reports, strict=True)
    names = (tuple(itertools.chain(*field)) for field in tuples)
    return LoadReport._make((*names, dict(collections.ChainMap(*filled_by))))


def _blocks(checkpoint: Checkpoint) -> str:
    """Where the checkpoint does have experts."""
    found = (re.match(r"(.+)\.experts\.", name) for name in checkpoint.tensors)
    prefixes = sorted({match[1] for match in found if match})
    return f"; it has experts under {prefixes[0]!r}, ..." if prefixes else "; it has no experts"
