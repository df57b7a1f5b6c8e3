"""How an op of the library gets its schema, its fake, its kernel."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

logger = logging.getLogger("cmoe")

_LIBRARIES: dict[str, torch.library.Library] = {}


def _library(namespace: str) -> torch.library.Library:
    if namespace not in _LIBRARIES:
        _LIBRARIES[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _LIBRARIES[namespace]


def define_op(
    name: str,
    schema: str,
    *,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    draws: bool = False,
) -> torch._ops.OpOverload:
    """Defines the functional op `namespace::name[.overload]` and returns it.

    The kernel runs on every device, below autograd; inputs reach it with the strides they had when
    the call was traced. draws: two calls with equal arguments may differ (dropout), so the compiler
    must keep both. `Library.define` costs about half of what `torch.library.custom_op` adds to
    a call (pytorch issue 177109: 6.3 against 10.7 us for 14 inputs).
    """
    namespace, _, rest = name.partition("::")
    library = _library(namespace)
    tags = (torch.Tag.needs_exact_strides,)
    library.define(rest + schema, tags=(*tags, *(torch.Tag.nondeterministic_seeded,) * draws))
    library.impl(rest, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def of_real_calls_too(fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake, which refuses a tensor on meta beside a first one that is not.

    torch runs the fake of a real call as soon as one tensor is on meta; what it allocates would
    be taken for a result.
    """

    @functools.wraps(fake)
    def checked(x: Tensor, *arguments: Any) -> Any:
        if x.device.type != "meta":
            for place, argument in enumerate(arguments, start=2):
                if isinstance(argument, Tensor) and argument.device.type == "meta":
                    raise ValueError(
                        f"argument {place}, {tuple(argument.shape)}, is on meta, the first one on "
                        f"{x.device}: load what was left there"
                    )
        return fake(x, *arguments)

    return checked


def asks_for_derivatives(tensors: Iterable[Tensor]) -> bool:
    """Whether a call with these tensors must be differentiable, in reverse or in forward mode."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def differentiable(
    op: Callable[..., Any], reference: Callable[..., Any], *, backend: str | None = None
) -> Callable[..., Any]:
    """A callable that runs `op`, or `reference` where a derivative is asked of the call.

    The reference is ordinary traceable torch, so autograd differentiates it; both are the same
    function of their arguments. backend: whose op it is, where a line should say once that it is
    passed over.
    """

    def call(*arguments: Any) -> Any:
        if asks_for_derivatives(a for a in arguments if isinstance(a, Tensor)):
            if backend is not None:
                _say_reference_runs(backend)
            return reference(*arguments)
        return op(*arguments)

    return call


def _say_reference_runs(backend: str) -> None:
    _say_once(backend)


# Runs while a graph is traced, is no part of it: what `torch.compiler.assume_constant_result` sets,
# which would import the whole compiler with `import cmoe`.
_say_reference_runs._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _say_once(backend: str) -> None:
    """Once a process: training needs no more of it, inference may not know why it is slow."""
    logger.warning(
        "calls that gradients are asked of run the plain torch kernels, not those of the %s "
        "backend; for inference use torch.no_grad()",
        backend,
    )
