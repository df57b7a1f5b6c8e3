"""The backends of the kernel ops, with the choice among them.

A backend is a name, a judgement of a layer (`refuses`), the kernels. It is asked once, when a layer
is built or moved, never inside a call.
"""

from __future__ import annotations

import functools
import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cmoe.custom_ops.fused_experts import fused_experts, fused_experts_reference
from cmoe.custom_ops.fused_moe import fused_moe_reference
from cmoe.custom_ops.gate import gate_reference
from cmoe.custom_ops.packing import STRIP
from cmoe.custom_ops.registration import differentiable
from cmoe.custom_ops.route import route, route_reference
from cmoe.errors import UnsupportedError

logger = logging.getLogger("cmoe")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """What a backend needs to know of a layer to judge it."""

    device: torch.device
    dtype: torch.dtype
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str

    def __str__(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')} E{self.num_experts} K{self.top_k} "
            f"H{self.hidden_size} I{self.intermediate_size} {self.activation} on {self.device}"
        )


class Kernels(NamedTuple):
    """One callable for each op, with the arguments of its schema, in order."""

    fused_experts: Callable[..., Any]
    route: Callable[..., Any]
    gate: Callable[..., Any] = gate_reference
    fused_moe: Callable[..., Any] | None = None  # None: no single op does the work of the two


class Backend(ABC):
    """A set of kernels with the knowledge of where they run."""

    name: str = ""

    @abstractmethod
    def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
        """Why these kernels cannot run such a layer here; empty when they can."""

    @abstractmethod
    def kernels(self) -> Kernels:
        """The kernels; called only after `refuses` returned nothing."""

    def refuses_packed(self, spec: LayerSpec) -> tuple[str, ...]:
        """Why these kernels read no packed weights (`packing.py`) of such a layer; else empty.

        Asked only of a layer that `refuses` has nothing against.
        """
        return ("reads weights as checkpoints have them",)

    def could_run(self) -> tuple[tuple[str, str], ...]:
        """(kind of device, what runs there), on this machine or another; none: on any device."""
        return ()


class ReferenceBackend(Backend):
    """Plain torch: any device, any float dtype, any shape."""

    name = "reference"

    def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
        """Only what no expert layer can be."""
        return () if spec.dtype.is_floating_point else (f"{spec.dtype} is not a float dtype",)

    def kernels(self) -> Kernels:
        """The ops whose kernels are the references."""
        return Kernels(fused_experts, route)


_LAST = ReferenceBackend()
_BUILT_IN: tuple[str, ...] = ("cpu", "triton")
_REGISTERED: list[Backend] = []


@functools.cache
def _built_in() -> tuple[Backend, ...]:
    return tuple(importlib.import_module(f"cmoe.custom_ops.{name}").BACKEND for name in _BUILT_IN)


def list_backends() -> tuple[Backend, ...]:
    """Every backend in the order of preference; those from outside come first."""
    return (*_REGISTERED, *_built_in(), _LAST)


def register_backend(backend: Backend) -> None:
    """Adds a backend from outside, ahead of all others. ValueError for a name already taken."""
    if not isinstance(backend, Backend):
        raise ValueError(f"a backend must be an instance of Backend, got {backend!r}")
    if not backend.name:
        raise ValueError(f"a backend needs a name; set it on {type(backend).__name__}")
    if backend.name in {known.name for known in list_backends()} | {"auto"}:
        raise ValueError(f"backend {backend.name!r} is already registered; choose another name")
    _REGISTERED.insert(0, backend)


def unregister_backend(name: str) -> None:
    """Takes a backend from outside away again; layers that chose it keep it."""
    for backend in _REGISTERED:
        if backend.name == name:
            _REGISTERED.remove(backend)
            return
    known = ", ".join(backend.name for backend in _REGISTERED) or "none"
    raise ValueError(f"no backend {name!r} was registered from outside; registered: {known}")


def explain_backends(spec: LayerSpec) -> dict[str, tuple[str, ...]]:
    """Each backend's name with its reasons against such a layer, in the order of preference."""
    return {backend.name: _reasons(backend, spec) for backend in list_backends()}


def _reasons(backend: Backend, spec: LayerSpec) -> tuple[str, ...]:
    """What the backend refuses the layer for."""
    return _checked(backend, "refuses", backend.refuses(spec))


def reasons_against_packing(backend: Backend, spec: LayerSpec) -> tuple[str, ...]:
    """What the backend refuses packed weights of the layer for, and what nobody could pack."""
    reasons = _checked(backend, "refuses_packed", backend.refuses_packed(spec))
    # A strip must not reach from gate into up.
    sizes = {"hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size}
    odd = (
        f"packs by {STRIP}, of which {name} ({size}) is no multiple"
        for name, size in sizes.items()
        if size % STRIP
    )
    return (*reasons, *odd)


def _checked(backend: Backend, method: str, reasons: tuple[str, ...]) -> tuple[str, ...]:
    """The reasons, their type checked: a str would be spelled out."""
    if not isinstance(reasons, tuple):
        raise TypeError(
            f"{method}() of backend {backend.name!r} must give a tuple, not {reasons!r}"
        )
    return reasons


def choose_backend(spec: LayerSpec, requested: str = "auto") -> Backend:
    """The first backend that takes the layer, or the one that was asked for by name.

    Raises UnsupportedError with every candidate's reasons when the one asked for refuses,
    ValueError for a name that no backend has.
    """
    backends = {backend.name: backend for backend in list_backends()}
    if requested != "auto" and requested not in backends:
        raise ValueError(f"unknown backend {requested!r}; choose auto or {', '.join(backends)}")
    reasons: dict[str, tuple[str, ...]] = {}
    for backend in backends.values() if requested == "auto" else (backends[requested],):
        reasons[backend.name] = _reasons(backend, spec)
        if not reasons[backend.name]:
            _log_choice(backend.name, str(spec.device), tuple(reasons.items()))
            return backend
    what = f"the experts {spec}" + ("" if requested == "auto" else f" by backend {requested!r}")
    raise UnsupportedError.from_candidates(what, explain_backends(spec))


def select_kernels(spec: LayerSpec, requested: str = "auto") -> Kernels:
    """The kernels of the chosen backend, see `kernels_of`."""
    return kernels_of(choose_backend(spec, requested))


def kernels_of(backend: Backend) -> Kernels:
    """The backend's kernels; a call that needs gradients runs the reference instead."""
    kernels = backend.kernels()
    name = None if backend is _LAST else backend.name
    whole = kernels.fused_moe
    return Kernels(
        differentiable(kernels.fused_experts, fused_experts_reference, backend=name),
        differentiable(kernels.route, route_reference, backend=name),
        differentiable(kernels.gate, gate_reference, backend=name),
        None if whole is None else differentiable(whole, fused_moe_reference, backend=name),
    )


@functools.cache
def _log_choice(chosen: str, device: str, reasons: tuple[tuple[str, tuple[str, ...]], ...]) -> None:
    """Says once for each choice why other backends were passed over, loudly where all were."""
    passed = [f"{name}: {'; '.join(why)}" for name, why in reasons if why]
    if passed and device != "meta":
        level = logging.WARNING if chosen == _LAST.name else logging.INFO
        why = ", ".join(passed)
        logger.log(level, "experts on %s run by the %s backend (%s)", device, chosen, why)
