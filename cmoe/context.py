"""The static context: how the layer ops find a layer.

Two tables, both weak. Names are scoped (`static_context`), for people and for by-name calls of the
ops. Tokens are one-byte tensors that belong to one layer each; a compiled graph takes the token as
an input, like any parameter, so that no layer's identity is a constant of the graph.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor


class NamedLayer(Protocol):
    """What the context knows of a layer."""

    layer_name: str
    layer_token: Tensor

    def with_state(self, state: list[Tensor]) -> NamedLayer:
        """The layer around these tensors, see MoERunnerInterface."""

    def forward_impl(self, inputs: Any, shared_experts_input: Tensor | None) -> Any:
        """What the layer ops call, see MoERunnerInterface."""


_Names = weakref.WeakValueDictionary[str, NamedLayer]

_PROCESS_WIDE: _Names = weakref.WeakValueDictionary()
_NAMES: contextvars.ContextVar[_Names] = contextvars.ContextVar("names", default=_PROCESS_WIDE)
_REGISTERING = threading.Lock()
_BY_TOKEN: weakref.WeakValueDictionary[int, NamedLayer] = weakref.WeakValueDictionary()


@contextlib.contextmanager
def static_context() -> Iterator[None]:
    """A scope with no names of its own yet: layers built inside may repeat names used outside.

    Layers built inside work everywhere; only the lookup of their names ends with the scope. A
    thread started inside has the names of the whole process, unless it runs in a copy of the
    context (`contextvars.copy_context().run`).
    """
    reset = _NAMES.set(weakref.WeakValueDictionary())
    try:
        yield
    finally:
        _NAMES.reset(reset)


def register_layer_for_moe_forward_op(layer: NamedLayer) -> None:
    """Enters a layer under its name. ValueError when a living layer of this scope has the name."""
    names = _NAMES.get()
    if layer.layer_name in names:
        gc.collect()  # The holder of the name may be a deleted model that waits in a cycle.
    with _REGISTERING:
        if layer.layer_name in names:
            raise ValueError(
                f"a layer named {layer.layer_name!r} exists already; give each layer its own "
                "prefix, delete the other one, or build this model inside "
                "`with cmoe.static_context():`"
            )
        names[layer.layer_name] = layer


def register_copy_for_moe_forward_op(layer: NamedLayer, name: str) -> None:
    """Enters a layer under the first free form of `name`."""
    with _REGISTERING:
        layer.layer_name = free_name(name)
        _NAMES.get()[layer.layer_name] = layer


def free_name(name: str) -> str:
    """The name itself, or `name@1`, `name@2`, ... when a living layer of this scope has it."""
    names = _NAMES.get()
    candidate, copies = name, 0
    while candidate in names:
        copies += 1
        candidate = f"{name}@{copies}"
    return candidate


def get_layer_from_name(name: str) -> NamedLayer:
    """The living layer of this scope with the name; ValueError lists the known ones."""
    layer = _NAMES.get().get(name)
    if layer is None:
        known = ", ".join(sorted(_NAMES.get().keys())) or "none"
        raise ValueError(f"no layer is named {name!r} in this static context; known: {known}")
    return layer


def register_token(layer: NamedLayer, former_pointer: int = 0) -> None:
    """Makes the layer's token find the layer; `former_pointer` is where the token was before."""
    if _BY_TOKEN.get(former_pointer) is layer:
        del _BY_TOKEN[former_pointer]
    pointer = layer.layer_token.data_ptr()
    if pointer:  # A token on the meta device has no address.
        _BY_TOKEN[pointer] = layer


def get_layer_from_token(token: Tensor) -> NamedLayer:
    """The living layer that owns the token; RuntimeError for any other tensor, never a guess."""
    layer = _BY_TOKEN.get(token.data_ptr())
    if layer is None:
        raise RuntimeError(
            "this tensor is no living layer's token: the layer was deleted, its token was copied "
            "(graph freezing, an exported program), or the layer is on the meta device; export "
            "with transparent=True, or pass layer.layer_token of the layer itself"
        )
    return layer
