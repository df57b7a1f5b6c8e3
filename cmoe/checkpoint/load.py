"""Checkpoint tensors into a model's own storage, planned whole from the headers first."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Hashable, Mapping

from torch import Tensor, nn

from cmoe.checkpoint.folder import Checkpoint
from cmoe.checkpoint.mapped import MappedTensor
from cmoe.errors import LoadError
from cmoe.families import Family, family_of
from cmoe.load_report import Homes, LoadReport, judge_tensors, load_tensors
from cmoe.load_write import Write
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
    family_in(checkpoint)
    start = f"{prefix}." if prefix else ""
    keys = {name.removeprefix(start): name for name in checkpoint.tensors if name.startswith(start)}
    if not keys:
        raise LoadError(f"{checkpoint.folder} has no tensor under {prefix!r}{_blocks(checkpoint)}")
    report = judge_runner(runner, checkpoint, keys)
    if strict:
        report.check(prefix)
    report = load_runner(runner, checkpoint, keys)
    return report.check(prefix) if strict else report


def load_model(
    model: nn.Module, checkpoint: Checkpoint, *, strict: bool = True, ignore: Collection[str] = ()
) -> LoadReport:
    """Loads a whole model, runners among its modules; the rest by the names of its state_dict.

    ignore: regular expressions of checkpoint names that the model does without. Otherwise as
    load_layer: everything is judged, from the headers, before anything is written.
    """
    for name, tensor in model.state_dict().items():
        if tensor.is_meta:
            raise LoadError(
                f"{name} is on the meta device; give the model storage with to_empty first"
            )
    homes = _Homes(model, checkpoint, ignore)
    report = homes.plan()
    if strict:
        report.check(str(checkpoint.folder))
    report = homes.write()
    return report.check(str(checkpoint.folder)) if strict else report


def family_in(checkpoint: Checkpoint) -> Family:
    """The checkpoint's family; LoadError names the known ones when it is none of them."""
    try:
        return family_of(checkpoint.config.get("model_type", ""))
    except ValueError as error:
        raise LoadError(f"{checkpoint.folder}: {error}") from error


class _Homes:
    """Where each tensor of a checkpoint goes in a model: to a runner, or to a place of its own."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, ignore: Collection[str]) -> None:
        self._checkpoint = checkpoint
        self._runners = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, MoERunnerInterface)
        }
        kept = model.state_dict(keep_vars=True)
        self._places = {name: t.detach() for name, t in kept.items() if not self._runner_of(name)}
        self._identities = {name: _identity(kept[name]) for name in self._places}
        rename = _renaming(family_in(checkpoint))
        self._keys_of: dict[str, dict[str, str]] = {name: {} for name in self._runners}
        self._place_of: dict[str, str] = {}
        for key in checkpoint.tensors:
            if not any(re.search(pattern, key) for pattern in ignore):
                name = rename(key)
                runner = self._runner_of(name)
                if runner is None:
                    self._place_of[key] = name
                else:
                    self._keys_of[runner][name.removeprefix(f"{runner}.")] = key

    def plan(self) -> LoadReport:
        """What write() will do. LoadError for a shape or a dtype that does not fit."""
        reports = [judge_tensors(self._own_tensors(), self._own_homes())]
        for name, runner in self._runners.items():
            report = judge_runner(runner, self._checkpoint, self._keys_of[name])
            reports.append(report.under(name))
        return _joined(reports)

    def write(self) -> LoadReport:
        """Copies every tensor to its home."""
        own = self._own_tensors(), self._own_homes()
        reports = [load_tensors(*own, what="the model", strict=False)]
        for name, runner in self._runners.items():
            report = load_runner(runner, self._checkpoint, self._keys_of[name])
            reports.append(report.under(name))
        return _joined(reports)

    def _own_tensors(self) -> dict[str, MappedTensor]:
        return {key: self._checkpoint.stored(key) for key in self._place_of}

    def _own_homes(self) -> Homes:
        """Of the tensors outside of the runners."""

        def home_of(key: str, tensor: Tensor) -> list[Write] | None:
            place = self._place_of[key]
            if place not in self._places:
                return None
            target = self._places[place]
            if tensor.shape != target.shape:
                shapes = f"shape {tuple(tensor.shape)} should be {tuple(target.shape)}"
                raise LoadError(f"{key}: {shapes}")
            return [Write(target, tensor, (place,))]

        return Homes(home_of, self._own_slots())

    def _runner_of(self, name: str) -> str | None:
        """The runner that the tensor belongs to; it is one of the name's own prefixes."""
        dots = (match.start() for match in re.finditer(r"\.", name))
        return next((name[:dot] for dot in dots if name[:dot] in self._runners), None)

    def _own_slots(self) -> list[str]:
        """Places to fill; what shares its storage with one of these, as tied embeddings do, is."""
        filled = set(self._place_of.values())
        written = {self._identities[name] for name in filled if name in self._places}
        return [n for n in self._places if n in filled or self._identities[n] not in written]


def _identity(tensor: Tensor) -> Hashable:
    """What two tensors have in common when one is the other; without storage, the object."""
    if tensor.is_meta:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride())


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
    return LoadReport(*(tuple(itertools.chain(*field)) for field in zip(*reports, strict=True)))


def _renaming(family: Family) -> Callable[[str], str]:
    def rename(key: str) -> str:
        for theirs, ours in family.renames:
            key = key.replace(theirs, ours)
        return key

    return rename


def _blocks(checkpoint: Checkpoint) -> str:
    """Where the checkpoint does have experts."""
    found = (re.match(r"(.+)\.experts\.", name) for name in checkpoint.tensors)
    prefixes = sorted({match[1] for match in found if match})
    return f"; it has experts under {prefixes[0]!r}, ..." if prefixes else "; it has no experts"
