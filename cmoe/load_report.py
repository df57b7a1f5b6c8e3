"""The load of weights: every key has a home, every slot is written once, a report says so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from cmoe.errors import LoadError
from cmoe.load_write import Write, WrittenMemory

_SHOWN = 12
_LONGEST = 200

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class LoadReport(NamedTuple):
    """Keys are names in the checkpoint, slots are places in the layer (`w13_weight[3].w1`).

    keys_overflowed: used keys with finite values that are infinite in the layer's dtype.
    """

    keys_used: tuple[str, ...]
    slots_written: tuple[str, ...]
    keys_without_home: tuple[str, ...] = ()
    slots_unwritten: tuple[str, ...] = ()
    keys_overflowed: tuple[str, ...] = ()

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
            problems.append(f"nothing for {listed(self.slots_unwritten)}")
        if self.keys_overflowed:
            problems.append(
                f"finite values became infinite in {listed(self.keys_overflowed)}: "
                "load into a layer of bfloat16 or float32"
            )
        return problems

    def check(self, what: str) -> LoadReport:
        """The report itself; LoadError when it has problems."""
        if problems := self.problems():
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
    it written. LoadError for a slot that two keys fill, for a tensor without values, of a dtype
    that is not converted, or in the layer's own memory; with `strict` also for a key with no home,
    a slot left unwritten, a value that became infinite. The last is seen while writing only: to
    look before would read every tensor twice.
    """
    judge = _Judge(home_of, slots)
    if isinstance(named_tensors, Mapping):
        judged: Iterable[tuple[str, Write]] = list(judge.writes(named_tensors.items()))
        if strict:
            judge.report().check(what)
        for key, write in judged:
            judge.check_memory(key, write)
    else:
        judged = judge.writes(named_tensors)
    for key, write in judged:
        judge.copy(key, write)
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
        self._memory = WrittenMemory()
        self._overflowed: dict[str, None] = {}

    def writes(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Write]]:
        """The writes of every tensor with its key, each judged."""
        for key, tensor in named_tensors:
            writes = self._home_of(key, tensor)
            if writes is None:
                self._homeless.append(key)
                continue
            self._used.append(key)
            for write in writes:
                for slot in write.slots:
                    if slot in self._filled_by:
                        other = self._filled_by[slot]
                        raise LoadError(f"{key}: {slot} is filled by {other} already")
                    self._filled_by[slot] = key
                write.check(key)
                self._memory.enter(write.target)
                yield key, write

    def check_memory(self, key: str, write: Write) -> None:
        """LoadError for a source that lies where one of the writes so far goes."""
        self._memory.check(key, write)

    def copy(self, key: str, write: Write) -> None:
        """Writes, remembers what did not fit."""
        self.check_memory(key, write)
        if write.copy():
            self._overflowed[key] = None

    def report(self) -> LoadReport:
        """What has been judged so far."""
        return LoadReport(
            keys_used=tuple(self._used),
            slots_written=tuple(self._filled_by),
            keys_without_home=tuple(self._homeless),
            slots_unwritten=tuple(slot for slot in self._slots if slot not in self._filled_by),
            keys_overflowed=tuple(self._overflowed),
        )


def listed(names: Iterable[str]) -> str:
    """Names in order, the first ones of many; each cut where it is absurdly long."""
    names = sorted(names)
    more = f" with {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = (name if len(name) <= _LONGEST else f"{name[:_LONGEST]}..." for name in names[:_SHOWN])
    return ", ".join(shown) + more
