"""What a load of weights did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from cmoe.errors import LoadError

_SHOWN = 12


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


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" with {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
