"""Where each tensor of a checkpoint goes in a whole model: into a runner, or a place of its own."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor, nn

from cmoe.checkpoint.translate import Names
from cmoe.errors import LoadError
from cmoe.loading.report import Homes
from cmoe.loading.write import Write
from cmoe.runner_interface import MoERunnerInterface


class ModelHomes:
    """The runners of a model, beside the tensors of its state_dict outside of them."""

    def __init__(self, model: nn.Module, names: Names) -> None:
        if isinstance(model, MoERunnerInterface):
            raise ValueError("the model is one layer itself; load it with load_layer")
        self.runners: Mapping[str, MoERunnerInterface] = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, MoERunnerInterface)
        }
        self._names = names
        kept = model.state_dict(keep_vars=True)
        places = {name: tensor for name, tensor in kept.items() if not self._runner_of(name)}
        self._places = {name: tensor.detach() for name, tensor in places.items()}
        self._identities = {name: _identity(tensor) for name, tensor in places.items()}

    def by_runner(self, keys: list[str]) -> tuple[list[str], dict[str, dict[str, str]]]:
        """The keys outside of all runners; for each runner its keys by the names it is given."""
        of_runner: dict[str | None, list[str]] = {None: [], **{name: [] for name in self.runners}}
        for key in keys:
            of_runner[self._runner_of(self._names.in_model(key))].append(key)
        inside = {name: self._names.inside(of_runner[name], name) for name in self.runners}
        return of_runner[None], inside

    def own(self, keys: list[str]) -> Homes:
        """Of the keys outside of all runners.

        A place that shares its storage with a filled one, as tied embeddings do, is filled by it.
        """
        filled = {self._names.in_model(key) for key in keys} & set(self._places)
        written = {self._identities[name] for name in filled}
        slots = [n for n in self._places if n in filled or self._identities[n] not in written]
        return Homes(self._own_home, slots)

    def whole(self, keys: list[str]) -> Homes:
        """Of all keys."""
        own, inside = self.by_runner(keys)
        own_homes = self.own(own)
        of_runner = {runner: self.runners[runner].homes() for runner in self.runners}
        names = {key: (r, name) for r, given in inside.items() for name, key in given.items()}

        def home_of(key: str, tensor: Tensor) -> list[Write] | None:
            if key not in names:
                return own_homes.home_of(key, tensor)
            runner, name = names[key]
            writes = of_runner[runner].home_of(name, tensor)
            return writes and [w._replace(slots=_under(runner, w.slots)) for w in writes]

        inner = (_under(runner, homes.slots) for runner, homes in of_runner.items())
        return Homes(home_of, [*own_homes.slots, *itertools.chain(*inner)])

    def _own_home(self, key: str, tensor: Tensor) -> list[Write] | None:
        place = self._names.in_model(key)
        if place not in self._places:
            return None
        target = self._places[place]
        if tensor.shape != target.shape:
            shapes = f"shape {tuple(tensor.shape)} should be {tuple(target.shape)}"
            raise LoadError(f"{key}: {shapes}")
        return [Write(target, tensor, (place,))]

    def _runner_of(self, name: str) -> str | None:
        """The runner that the tensor belongs to; it is one of the name's own prefixes."""
        dots = (match.start() for match in re.finditer(r"\.", name))
        return next((name[:dot] for dot in dots if name[:dot] in self.runners), None)


def _under(prefix: str, slots: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{prefix}.{slot}" for slot in slots)


def _identity(tensor: Tensor) -> Hashable:
    """What two tensors have in common when one is the other; without storage, the object."""
    if tensor.is_meta:
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride())
