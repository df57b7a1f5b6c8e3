"""The load of weights: every key has a home, every slot is written once, a report says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from cmoe.errors import LoadError
from cmoe.loading.expected_names import ExpectedNames
from cmoe.loading.stored_tensor import StoredTensor
from cmoe.loading.write import Write, WrittenMemory

_SHOWN = 12
_LONGEST = 200

Source = Tensor | StoredTensor
NamedTensors = Mapping[str, Source] | Iterable[tuple[str, Source]]


class Homes(NamedTuple):
    """What a module knows of its checkpoint.

    home_of: a key with its tensor, which may be on the meta device -> the writes, whose sources are
        views of the tensor; None when it has no home here; LoadError when it does not fit.
    slots: all that a complete checkpoint fills.
    """

    home_of: Callable[[str, Tensor], list[Write] | None]
    slots: Sequence[str]


class LoadReport(NamedTuple):
    """Keys are names in the checkpoint, slots are places in the layer (`w13_weight[3].w1`).

    keys_overflowed: used keys with finite values that are infinite in the layer's dtype.
    filled_by: the key of each slot written, as far as it is known: from these come the names of
    missing keys.
    """

    keys_used: tuple[str, ...]
    slots_written: tuple[str, ...]
    keys_without_home: tuple[str, ...] = ()
    slots_unwritten: tuple[str, ...] = ()
    keys_overflowed: tuple[str, ...] = ()
    filled_by: Mapping[str, str] = MappingProxyType({})

    def __repr__(self) -> str:
        """Numbers in place of thousands of names; names for what went wrong."""
        text = f"{len(self.keys_used)} keys used, {len(self.slots_written)} slots written"
        return f"LoadReport({'; '.join([text, *self.problems()])})"

    def problems(self) -> list[str]:
        """What went wrong, in words; empty when every key was used, every slot written."""
        problems = []
        if self.keys_without_home:
            problems.append(f"no home for {listed(self.keys_without_home)}")
        if self.slots_unwritten:
            problems.append(f"missing {listed(self.missing())}")
        if self.keys_overflowed:
            problems.append(
                f"finite values became infinite in {listed(self.keys_overflowed)}: "
                "load into a layer of bfloat16 or float32"
            )
        return problems

    def missing(self) -> list[str]:
        """The names that the checkpoint should have, each with the slots that it would fill."""
        names = ExpectedNames(self.filled_by, self.slots_unwritten)
        slots: dict[str, list[str]] = {}
        for slot in self.slots_unwritten:
            slots.setdefault(names.of(slot), []).append(slot)
        return [
            name if of_name == [name] else f"{name} (for {_first_of(of_name)})"
            for name, of_name in slots.items()
        ]

    def under(self, prefix: str) -> LoadReport:
        """The same report of a part of a model: slots get its name in front."""
        return self._replace(
            slots_written=tuple(f"{prefix}.{slot}" for slot in self.slots_written),
            slots_unwritten=tuple(f"{prefix}.{slot}" for slot in self.slots_unwritten),
            filled_by={f"{prefix}.{slot}": key for slot, key in self.filled_by.items()},
        )

    def renamed(self, names: Mapping[str, str]) -> LoadReport:
        """The same report with other names for the keys."""
        return self._replace(
            keys_used=tuple(names[key] for key in self.keys_used),
            filled_by={slot: names[key] for slot, key in self.filled_by.items()},
            keys_without_home=tuple(names[key] for key in self.keys_without_home),
            keys_overflowed=tuple(names[key] for key in self.keys_overflowed),
        )

    def check(self, what: str) -> LoadReport:
        """The report itself; LoadError when it has problems."""
        if problems := self.problems():
            raise LoadError(f"{what}: {'; '.join(problems)}")
        return self


def load_tensors(
    named_tensors: NamedTensors, homes: Homes, *, what: str, strict: bool
) -> LoadReport:
    """Copies every tensor to its home, in the storage and dtype that are there.

    A mapping is judged whole before anything is written; an iterator is consumed once, so that a
    fault in its middle leaves what came before it written. LoadError for a slot that two keys fill,
    for a tensor without values, of a dtype that is not converted, or in the layer's own memory;
    with `strict` also for a key with no home, a slot left unwritten, a value that became infinite.
    The last is seen while writing only: to look before would read every tensor twice.
    """
    judge = _Judge(homes)
    if not isinstance(named_tensors, Mapping):
        return _load_one_by_one(named_tensors, judge, what, strict)
    judged = list(judge.writes(named_tensors.items()))
    if strict:
        judge.report().check(what)
    for each in judged:
        judge.check_memory(each)
    for each in judged:
        judge.copy(each)
    report = judge.report()
    return report.check(what) if strict else report


def _load_one_by_one(
    named_tensors: Iterable[tuple[str, Source]], judge: _Judge, what: str, strict: bool
) -> LoadReport:
    try:
        for each in judge.writes(named_tensors):
            judge.copy(each)
        report = judge.report()
        return report.check(what) if strict else report
    except LoadError as error:
        if not judge.report().keys_used:
            raise
        raise LoadError(
            f"{error}. The tensors came one by one, so the layer is partly written: load again, "
            "or pass a dict, which is judged before the first write"
        ) from error


def judge_tensors(named_tensors: Mapping[str, Source], homes: Homes) -> LoadReport:
    """What `load_tensors` would report, as far as names, shapes, dtypes tell."""
    judge = _Judge(homes)
    for _ in judge.writes(named_tensors.items()):
        pass
    return judge.report()


class _Judged(NamedTuple):
    """A write that may be done."""

    key: str
    write: Write
    stored: StoredTensor | None  # where the write's source is still to be read


class _Judge:
    """Finds the home of each key, remembers which key fills which slot."""

    def __init__(self, homes: Homes) -> None:
        self._homes = homes
        self._used: list[str] = []
        self._homeless: list[str] = []
        self._filled_by: dict[str, str] = {}
        self._memory = WrittenMemory()
        self._overflowed: dict[str, None] = {}

    def writes(self, named_tensors: Iterable[tuple[str, Source]]) -> Iterator[_Judged]:
        """The writes of every tensor, each judged."""
        for key, source in named_tensors:
            stored = source if isinstance(source, StoredTensor) else None
            tensor = source.on_meta() if isinstance(source, StoredTensor) else source
            writes = self._homes.home_of(key, tensor)
            if writes is None:
                self._homeless.append(key)
                continue
            self._used.append(key)
            for write in writes:
                self._admit(key, write)
                write.check(key, is_stored=stored is not None)
                write.check_values(key)
                self._memory.enter(write.target)
                yield _Judged(key, write, stored)

    def check_memory(self, judged: _Judged) -> None:
        """LoadError for a source that lies where one of the writes so far goes."""
        self._memory.check(judged.key, judged.write)

    def copy(self, judged: _Judged) -> None:
        """Writes, remembers what did not fit."""
        if judged.stored is None:
            self.check_memory(judged)
            self._write(judged.key, judged.write)
        elif not judged.write.target.is_meta:
            for piece in judged.write.pieces():
                self._read(judged.key, piece, judged.stored)

    def _read(self, key: str, piece: Write, stored: StoredTensor) -> None:
        """The values live no longer than this call, so that two pieces never take memory."""
        piece = piece._replace(source=stored.read(piece.source))
        piece.check_values(key)
        self._write(key, piece)

    def _write(self, key: str, write: Write) -> None:
        if write.copy():
            self._overflowed[key] = None

    def _admit(self, key: str, write: Write) -> None:
        for slot in write.slots:
            if slot in self._filled_by:
                raise LoadError(f"{key}: {slot} is filled by {self._filled_by[slot]} already")
            self._filled_by[slot] = key

    def report(self) -> LoadReport:
        """What has been judged so far."""
        return LoadReport(
            keys_used=tuple(self._used),
            slots_written=tuple(self._filled_by),
            filled_by=dict(self._filled_by),
            keys_without_home=tuple(self._homeless),
            slots_unwritten=tuple(
                slot for slot in self._homes.slots if slot not in self._filled_by
            ),
            keys_overflowed=tuple(self._overflowed),
        )


def _first_of(slots: Sequence[str]) -> str:
    return slots[0] if len(slots) == 1 else f"{slots[0]} with {len(slots) - 1} more slots"


def listed(names: Iterable[str]) -> str:
    """Names in order, the first ones of many; each cut where it is absurdly long."""
    names = sorted(names)
    more = f" with {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = (name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[:_SHOWN])
    return ", ".join(shown) + more
