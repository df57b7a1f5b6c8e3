"""A family's names: from its checkpoints into a model of transformers, into a runner."""

from __future__ import annotations

from collections.abc import Iterable

from cmoe.errors import LoadError
from cmoe.families import Family


class Names:
    """The names of one family."""

    def __init__(self, family: Family) -> None:
        self._renames = family.renames
        # The experts' own names say how their tensors lie, so they are left to the runner.
        self._inner = tuple(
            (theirs, ours)
            for theirs, ours in family.runner_names()
            if not theirs.startswith("experts.")
        )

    def in_model(self, key: str) -> str:
        """The name in transformers' model for a name, or its beginning, in a checkpoint."""
        name = f".{key}"  # What is to be renamed may begin with a dot.
        for theirs, ours in self._renames:
            name = name.replace(theirs, ours)
        return name.removeprefix(".")

    def in_runner(self, name: str) -> str:
        """The name in a runner's state_dict for a name in transformers' block."""
        for theirs, ours in self._inner:
            if name == theirs or (theirs.endswith(".") and name.startswith(theirs)):
                return ours + name.removeprefix(theirs)
        return name

    def inside(self, keys: Iterable[str], path: str) -> dict[str, str]:
        """The keys of the block at a path in the model, by their names in its runner.

        An empty path: all of them. LoadError for two keys that are one name.
        """
        start = f"{path}." if path else ""
        found: dict[str, str] = {}
        for key in keys:
            name = self.in_model(key)
            if name.startswith(start):
                name = self.in_runner(name.removeprefix(start))
                if name in found:
                    raise LoadError(f"{found[name]} is {key} under another name")
                found[name] = key
        return found
