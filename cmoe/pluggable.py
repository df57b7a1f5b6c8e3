"""Classes whose place an out-of-tree class can take."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

_Class = TypeVar("_Class", bound="type[PluggableLayer]")

_LATER = object()
"""Stands for the class that a decorator with parentheses is given in its second call."""

_NAMED: dict[str, type[PluggableLayer]] = {}
_REPLACEMENTS: dict[str, type[PluggableLayer]] = {}


class _ReplaceableMeta(ABCMeta):
    """Calling a class builds what stands in its place."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return ABCMeta.__call__(_in_place_of(cls), *args, **kwargs)

    @property
    def __signature__(cls) -> inspect.Signature:
        """What `help` shows: that of `__init__`, not of the call above."""
        built = _in_place_of(cls)
        init = next(vars(base)["__init__"] for base in built.__mro__ if "__init__" in vars(base))
        whole = inspect.signature(init)
        return whole.replace(parameters=list(whole.parameters.values())[1:])


def _in_place_of(cls: type) -> type:
    for base in cls.__mro__:
        for name, named in _NAMED.items():
            if base is named and name in _REPLACEMENTS:
                replacement = _REPLACEMENTS[name]
                return cls if issubclass(cls, replacement) else replacement
    return cls


class PluggableLayer(nn.Module, metaclass=_ReplaceableMeta):
    """A module class that can be replaced by registration.

    `register` names a class of this package; `register_oot` puts another class in its place, for
    the class itself with all its subclasses, wherever its name was imported to, from the next
    construction on. A replacement derives from the named class's contract: the first class under
    PluggableLayer in its bases (MoERunnerInterface for MoERunner).
    """

    @staticmethod
    def register(name: str) -> Callable[[_Class], _Class]:
        """Class decorator: makes the class replaceable under `name`."""

        def decorate(cls: _Class) -> _Class:
            _require_pluggable(cls)
            if name in _NAMED:
                raise ValueError(f"{name!r} already names {_path(_NAMED[name])}")
            _NAMED[name] = cls
            return cls

        return decorate

    @classmethod
    def register_oot(cls, replacement: Any = _LATER, *, name: str | None = None) -> Any:
        """Puts a class in the place of this one, or of the one called `name`.

        A decorator with or without parentheses, or a plain call. ValueError for an unknown name, a
        place already taken, something that is not a class, does not derive from the contract, or
        leaves some of the contract's methods abstract.
        """
        if replacement is _LATER:
            return lambda later: cls.register_oot(later, name=name)
        place = name if name is not None else cls._own_name()
        if place not in _NAMED:
            raise ValueError(f"no replaceable layer is called {place!r}; known: {_known()}")
        contract = _contract(_NAMED[place])
        if not isinstance(replacement, type) or not issubclass(replacement, contract):
            raise ValueError(
                f"a replacement for {place!r} must derive from {_path(contract)}; "
                f"got {replacement!r}"
            )
        if inspect.isabstract(replacement):
            missing = ", ".join(sorted(replacement.__abstractmethods__))
            raise ValueError(f"{_path(replacement)} cannot be built: it does not define {missing}")
        if place in _REPLACEMENTS:
            raise ValueError(
                f"{place!r} is already replaced by {_path(_REPLACEMENTS[place])}; "
                f"call PluggableLayer.unregister_oot({place!r}) first"
            )
        _REPLACEMENTS[place] = replacement
        return replacement

    @staticmethod
    def unregister_oot(name: str) -> None:
        """Gives a place back to its own class; layers already built stay as they are."""
        if name not in _REPLACEMENTS:
            active = ", ".join(_REPLACEMENTS) or "none"
            raise ValueError(f"{name!r} is not replaced; replaced: {active}")
        del _REPLACEMENTS[name]

    @classmethod
    @contextlib.contextmanager
    def replaced_by(cls, replacement: type[PluggableLayer]) -> Iterator[None]:
        """`register_oot` for the length of a with block."""
        cls.register_oot(replacement)
        try:
            yield
        finally:
            PluggableLayer.unregister_oot(cls._own_name())

    @staticmethod
    def active() -> dict[str, type[PluggableLayer]]:
        """Every replaceable name with the class that is built for it now."""
        return {name: _REPLACEMENTS.get(name, cls) for name, cls in _NAMED.items()}

    @classmethod
    def _own_name(cls) -> str:
        for name, named in _NAMED.items():
            if named is cls:
                return name
        raise ValueError(f"{_path(cls)} is not a replaceable layer itself; known: {_known()}")


def _require_pluggable(cls: Any) -> None:
    if not isinstance(cls, type) or not issubclass(cls, PluggableLayer):
        raise ValueError(f"a replaceable layer must derive from PluggableLayer; got {cls!r}")


def _contract(cls: type[PluggableLayer]) -> type[PluggableLayer]:
    """The class of cls's bases that stands right under PluggableLayer."""
    return next(
        base
        for base in reversed(cls.__mro__)
        if issubclass(base, PluggableLayer) and base is not PluggableLayer
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _known() -> str:
    return ", ".join(f"{name} ({cls.__name__})" for name, cls in _NAMED.items())
