"""A family's names: from its checkpoints into a model of transformers, into a runner."""

from __future__ import annotations

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
