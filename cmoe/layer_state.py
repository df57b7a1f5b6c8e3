"""The tensors of a layer as one flat list, as the layer ops take them.

A graph that writes a parameter, or `torch.func.functional_call`, hands other tensors to the op than
the layer owns; a twin of the layer around these gives their result and leaves the layer alone.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

Layer = TypeVar("Layer", bound=nn.Module)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Parameters, then buffers of every module, outer modules first; tied ones at every place."""
    tensors: list[Tensor] = []
    _collect(module, tensors)
    return tensors


def _collect(module: nn.Module, tensors: list[Tensor]) -> None:
    # Every call of a compiled layer comes through here, hence the plain loops.
    for parameter in module._parameters.values():
        if parameter is not None:
            tensors.append(parameter)
    for buffer in module._buffers.values():
        if buffer is not None:
            tensors.append(buffer)
    for child in module._modules.values():
        if child is not None:
            _collect(child, tensors)


def has_buffers(module: nn.Module) -> bool:
    """Whether a module in the tree has a buffer."""
    return any(
        any(buffer is not None for buffer in inner._buffers.values()) for inner in module.modules()
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether a module in the tree calls more than its forward."""
    return _has_any_global_hook() or any(
        bool(
            inner._forward_hooks
            or inner._forward_pre_hooks
            or inner._backward_hooks
            or inner._backward_pre_hooks
        )
        for inner in module.modules()
    )


def runs_only(module: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a call of the module is this forward, with nothing around it."""
    is_plain = type(module).__call__ is nn.Module.__call__ and is_method(module.forward, forward)
    return is_plain and not has_hooks(module)


def is_method(bound: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Whether `bound` is the method `function` of its object, not what was set in its place.

    function: kept from before anybody could set another on its class. Asked in this way the
    compiler sees what is set later.
    """
    return isinstance(bound, types.MethodType) and bound.__func__ is function


def with_tensors(module: Layer, tensors: list[Tensor]) -> Layer:
    """The module itself when `tensors` are its own, else a twin that has them in their place.

    tensors: in the order of `tensors_of`. RuntimeError for another number of them; for a twin of a
    module with a forward of its own (offloading), which would go on with the module's tensors.
    """
    own = tensors_of(module)
    if len(own) != len(tensors):
        raise RuntimeError(
            f"{type(module).__name__} has {len(own)} tensors, the graph was compiled for "
            f"{len(tensors)}; compile it again"
        )
    if all(map(_is_same, own, tensors)):
        return module
    return _twin(module, iter(tensors))


def _is_same(own: Tensor, given: Tensor) -> bool:
    if own is given:
        return True
    return (
        own.data_ptr() == given.data_ptr()
        and own.dtype == given.dtype
        and own.shape == given.shape
        and own.stride() == given.stride()
    )


def _twin(module: Layer, tensors: Iterator[Tensor]) -> Layer:
    if "forward" in module.__dict__:
        raise RuntimeError(
            f"a {type(module).__name__} has a forward of its own, which cannot be given other "
            "tensors: let no graph write the layer's weights, or build it with transparent=True"
        )
    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers"):
        given = {
            name: None if tensor is None else next(tensors)
            for name, tensor in module.__dict__[table].items()
        }
        twin.__dict__[table] = given
    children = module._modules.items()
    twin.__dict__["_modules"] = {
        name: None if child is None else _twin(child, tensors) for name, child in children
    }
    return twin
