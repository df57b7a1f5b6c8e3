"""The load of weights: every key has a home, every slot is written once, a report says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from cmoe.errors import LoadError

_SHOWN = 12

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class Write(NamedTuple):
    """A checkpoint tensor, or a part of one, on its way into a layer."""

    target: Tensor
    source: Tensor  # of target's shape
    slots: tuple[str, ...]  # the places that it fills


class LoadReport(NamedTuple):
    """Keys are names in the checkpoint, slots are places in the layer (`w13_weight[3].w1`)."""

    keys_used: tuple[str, ...]
    slots_written: tuple[str, ...]
    keys_without_home: tuple[str, ...] = ()
    slots_unwritten: tuple[str, ...] = ()

    def check(self, what: str) -> LoadReport:
        """The report itself; LoadError when a key has no home or a slot stayed unwritten."""
        problems = []
        if self.keys_without_home:
            problems.append(f"no home for {_listed(self.keys_without_home)}")
        if self.slots_unwritten:
            problems.append(f"nothing for {_listed(self.slots_unwritten)}")
        if problems:
            raise LoadError(f"{what}: {'; '.join(problems)}")
        return self


def load_tensors(
    named_tensors: NamedTensors,
    home_of: Callable[[str, Tensor], list[Write] | None],
    slots: Collection[str],
    *,
    what: str,
    strict: bool,
) -> LoadReport:
    """Copies every tensor to its home, in the storage and dtype that are there.

    home_of: a key with its tensor -> the writes, None when it has no home; LoadError when it does
    not fit. slots: all that a complete checkpoint fills. A mapping is judged whole before anything
    is written; an iterator is consumed once, so that a fault in its middle leaves what came before
    it written. LoadError for a slot that two keys fill, for a tensor without values, and, with
    `strict`, for a key with no home or a slot left unwritten.
    """
    judge = _Judge(home_of, slots)
    if isinstance(named_tensors, Mapping):
        writes: Iterable[Write] = list(judge.writes(named_tensors.items()))
        if strict:
            judge.report().check(what)
    else:
        writes = judge.writes(named_tensors)
    for write in writes:
        with torch.no_grad():
            write.target.copy_(write.source)
    report = judge.report()
    return report.check(what) if strict else report


class _Judge:
    """Finds the home of each key, remembers which key fills which slot."""

    def __init__(
        self, home_of: Callable[[str, Tensor], list[Write] | None], slots: Collection[str]
    ) -> None:
        self._home_of = home_of
        self._slots = slots
        self._used: list[str] = []
        self._homeless: list[str] = []
        self._filled_by: dict[str, str] = {}

    def writes(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Write]:
        """The writes of every tensor, each judged."""
        for key, tensor in named_tensors:
            writes = self._home_of(key, tensor)
            if writes is None:
                self._homeless.append(key)
                continue
            self._used.append(key)
            for write in writes:
                self._admit(key, write)
                yield write

    def report(self) -> LoadReport:
        """What has been judged so far."""
        return LoadReport(
            keys_used=tuple(self._used),
            slots_written=tuple(self._filled_by),
            keys_without_home=tuple(self._homeless),
            slots_unwritten=tuple(slot for slot in self._slots if slot not in self._filled_by),
        )

    def _admit(self, key: str, write: Write) -> None:
        for slot in write.slots:
            if slot in self._filled_by:
                raise LoadError(f"{key}: {slot} is filled by {self._filled_by[slot]} already")
            self._filled_by[slot] = key
        # Both on the meta device is a rehearsal.
        if write.target.is_meta and not write.source.is_meta:
            raise LoadError(
                f"{key}: the layer is on the meta device; call to_empty(device=...) first"
            )
        if write.source.is_meta and not write.target.is_meta:
            raise LoadError(f"{key}: a tensor on the meta device has no values to load")


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" with {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
