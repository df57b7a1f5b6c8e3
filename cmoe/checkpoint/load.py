"""Checkpoint tensors into a model's own storage, planned whole from the headers first."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cmoe.checkpoint.folder import Checkpoint
from cmoe.checkpoint.header import TensorInfo
from cmoe.errors import LoadError
from cmoe.families import Family, family_of
from cmoe.load_report import LoadReport
from cmoe.load_write import Write
from cmoe.runner_interface import MoERunnerInterface


def load_layer(
    runner: MoERunnerInterface, checkpoint: Checkpoint, prefix: str, *, strict: bool = True
) -> LoadReport:
    """Loads the tensors whose names begin with `prefix` ("model.layers.0.mlp") into the runner.

    Judged from the headers first: with `strict`, LoadError for a key with no home or a slot with no
    tensor, in any case for a shape or dtype that does not fit; nothing is written then. Tensors are
    mapped one at a time and copied into the parameters' storage, converted to their dtype.
    """
    family_in(checkpoint)
    keys = {
        name.removeprefix(f"{prefix}."): name
        for name in checkpoint.tensors
        if name.startswith(f"{prefix}.")
    }
    if not keys:
        raise LoadError(f"{checkpoint.folder} has no tensor under {prefix!r}{_blocks(checkpoint)}")
    report = _plan(runner, checkpoint, keys)
    if strict:
        report.check(prefix)
    runner.load_weights(_streamed(checkpoint, keys), strict=False)
    return report


def load_model(
    model: nn.Module, checkpoint: Checkpoint, *, strict: bool = True, ignore: Collection[str] = ()
) -> LoadReport:
    """Loads a whole model, runners among its modules; the rest by the names of its state_dict.

    ignore: regular expressions of checkpoint names that the model does without. Otherwise as
    load_layer: everything is judged, from the headers, before anything is written.
    """
    homes = _Homes(model, checkpoint, ignore)
    report = homes.plan()
    if strict:
        report.check(str(checkpoint.folder))
    homes.write()
    return report


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
        self._places = {
            name: tensor.detach()
            for name, tensor in model.state_dict(keep_vars=True).items()
            if self._runner_of(name) is None
        }
        rename = _renaming(family_in(checkpoint))
        self._keys_of: dict[str, dict[str, str]] = {name: {} for name in self._runners}
        self._key_at: dict[str, str] = {}
        self._homeless: list[str] = []
        for key in checkpoint.tensors:
            if not any(re.search(pattern, key) for pattern in ignore):
                self._find_home(key, rename(key))

    def plan(self) -> LoadReport:
        """What write() will do. LoadError for a shape or a dtype that does not fit."""
        reports = []
        for name, runner in self._runners.items():
            report = _plan(runner, self._checkpoint, self._keys_of[name])
            reports.append(
                LoadReport(
                    report.keys_used,
                    tuple(f"{name}.{slot}" for slot in report.slots_written),
                    report.keys_without_home,
                    tuple(f"{name}.{slot}" for slot in report.slots_unwritten),
                )
            )
        for place, key in self._key_at.items():
            _check(place, key, self._checkpoint.tensors[key], self._places[place])
        own = LoadReport(
            tuple(self._key_at.values()),
            tuple(self._key_at),
            tuple(self._homeless),
            self._unwritten_places(),
        )
        fields = zip(own, *reports, strict=True)
        return LoadReport(*(tuple(itertools.chain(*field)) for field in fields))

    def write(self) -> None:
        """Copies every tensor to its home."""
        for place, key in self._key_at.items():
            with torch.no_grad():
                self._places[place].copy_(self._checkpoint.get(key))
        for name, runner in self._runners.items():
            runner.load_weights(_streamed(self._checkpoint, self._keys_of[name]), strict=False)

    def _runner_of(self, name: str) -> str | None:
        return next((runner for runner in self._runners if name.startswith(f"{runner}.")), None)

    def _find_home(self, key: str, name: str) -> None:
        runner = self._runner_of(name)
        if runner is not None:
            self._keys_of[runner][name.removeprefix(f"{runner}.")] = key
        elif name in self._places:
            self._key_at[name] = key
        else:
            self._homeless.append(key)

    def _unwritten_places(self) -> tuple[str, ...]:
        """A place that shares its storage with a written one, as tied embeddings do, is written."""
        written = {_storage(self._places[place]) for place in self._key_at}
        return tuple(
            name
            for name, tensor in self._places.items()
            if name not in self._key_at and _storage(tensor) not in written
        )


class _Storage(NamedTuple):
    """What two tensors have in common when one is the other."""

    pointer: int
    shape: torch.Size
    strides: tuple[int, ...]


def _storage(tensor: Tensor) -> _Storage:
    return _Storage(tensor.data_ptr(), tensor.shape, tensor.stride())


def _plan(
    runner: MoERunnerInterface, checkpoint: Checkpoint, keys: Mapping[str, str]
) -> LoadReport:
    """What loading would do, tried out on a copy of the runner that has no storage.

    keys: checkpoint names by the names that the runner is given.
    """
    shapes = {name: _without_storage(checkpoint.tensors[key]) for name, key in keys.items()}
    try:
        report = _copy_without_storage(runner).load_weights(shapes, strict=False)
    except LoadError as error:
        raise LoadError(f"{checkpoint.folder}: {error}") from error
    return report._replace(
        keys_used=tuple(keys[name] for name in report.keys_used),
        keys_without_home=tuple(keys[name] for name in report.keys_without_home),
    )


def _copy_without_storage(runner: MoERunnerInterface) -> MoERunnerInterface:
    """deepcopy takes what its memo holds for a copy already made."""
    memo: dict[int, Tensor] = {}
    for parameter in runner.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    for buffer in runner.buffers():
        memo[id(buffer)] = buffer.to("meta")
    return copy.deepcopy(runner, memo)


def _without_storage(info: TensorInfo) -> Tensor:
    return torch.empty(info.shape, dtype=info.dtype, device="meta")


def _streamed(checkpoint: Checkpoint, keys: Mapping[str, str]) -> Iterable[tuple[str, Tensor]]:
    """Each tensor is mapped when its turn comes; its memory goes with the next one."""
    return ((name, checkpoint.get(key)) for name, key in keys.items())


def _check(name: str, key: str, info: TensorInfo, place: Tensor) -> None:
    if place.is_meta:
        raise LoadError(f"{name} is on the meta device; give the model storage with to_empty first")
    if info.shape != tuple(place.shape):
        raise LoadError(f"{key}: shape {info.shape} should be {tuple(place.shape)}")
    Write(place.to("meta"), _without_storage(info), (name,)).check(key)


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
