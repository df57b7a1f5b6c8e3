"""Per-expert matrix products over rows sorted by expert.   R rows, E experts, K in, N out."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from cmoe.custom_ops.registration import define_op
from cmoe.errors import UnsupportedError


def _check(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    fits = x.dim() == 2 and weight.dim() == 3 and offsets.dim() == 1
    if not fits or x.shape[1] != weight.shape[2] or offsets.shape[0] != weight.shape[0]:
        raise ValueError(
            "grouped_mm needs x [R, K], weight [E, N, K], offsets [E]; got "
            f"{tuple(x.shape)}, {tuple(weight.shape)}, {tuple(offsets.shape)}"
        )


def _runs_in_one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's own grouped kernel takes these operands (16-byte strides, bf16, sm80 up)."""
    return (
        x.device.type == "cuda"
        and x.dtype == torch.bfloat16
        and x.shape[0] > 0
        and all(size % 8 == 0 for size in (x.shape[1], weight.shape[1]))
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )


def _kernel(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    _check(x, weight, offsets)
    if _runs_in_one_kernel(x, weight):
        y = F.grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=offsets)
        # The kernel leaves the rows past the last offset as they were in memory.
        used = torch.arange(x.shape[0], device=x.device) < offsets[-1]
        return torch.where(used[:, None], y, 0)
    y = x.new_zeros(x.shape[0], weight.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert].t(), out=y[start:end])
        start = end
    return y


def _fake(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    _check(x, weight, offsets)
    return x.new_empty(x.shape[0], weight.shape[1])


def _weight_grad_kernel(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    out = x.new_zeros(offsets.shape[0], grad.shape[1], x.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(grad[start:end].t(), x[start:end], out=out[expert])
        start = end
    return out


def _weight_grad_fake(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], grad.shape[1], x.shape[1])


_op = define_op(
    "cmoe::grouped_mm",
    "(Tensor x, Tensor weight, Tensor offsets) -> Tensor",
    kernel=_kernel,
    fake=_fake,
)
_weight_grad_op = define_op(
    "cmoe::grouped_mm_weight_grad",
    "(Tensor grad, Tensor x, Tensor offsets) -> Tensor",
    kernel=_weight_grad_kernel,
    fake=_weight_grad_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    grad = grad.contiguous()
    return (
        _op(grad, weight.transpose(1, 2), offsets) if needs_x else None,
        _weight_grad_op(grad, x, offsets) if needs_weight else None,
        None,
    )


def _weight_grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, x, offsets = ctx.saved_tensors
    needs_rows, needs_x, _ = ctx.needs_input_grad
    return (
        _op(x, grad, offsets) if needs_rows else None,
        _op(rows, grad.transpose(1, 2), offsets) if needs_x else None,
        None,
    )


torch.library.register_autograd("cmoe::grouped_mm", _backward, setup_context=_setup_context)
torch.library.register_autograd(
    "cmoe::grouped_mm_weight_grad", _weight_grad_backward, setup_context=_setup_context
)


def _by_expert(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The same function of plain torch ops, for transforms that a registered op does not know."""
    starts = [0, *offsets.tolist()]
    products = [
        x[start:end] @ weight[expert].t()
        for expert, (start, end) in enumerate(itertools.pairwise(starts))
    ]
    return torch.cat([*products, x.new_zeros(x.shape[0] - starts[-1], weight.shape[1])])


def _is_transformed() -> bool:
    """Whether the call stands inside forward-mode differentiation or a `torch.func` transform.

    UnsupportedError where a graph is traced inside forward mode: the op would drop the tangents.
    """
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            raise UnsupportedError(
                "forward-mode derivatives (torch.func.jvp) of the experts cannot be compiled; "
                "compute them without torch.compile, or use reverse mode"
            )
        return False
    interpreter: object = torch._C._functorch.peek_interpreter_stack()
    return forward_ad._current_level >= 0 or interpreter is not None


def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """y[r] = weight[e] @ x[r] for the rows r of expert e, offsets[e - 1] <= r < offsets[e].

    x: [R, K], rows sorted by expert; weight: [E, N, K], any strides; offsets: [E] int32, the end of
    each expert's rows. -> [R, N]; rows past offsets[-1] are zero. Differentiable twice in x and
    weight, forward mode and `torch.func.grad`, `jvp`, `jacrev`, `jacfwd`, `hessian` included (not
    compiled: UnsupportedError; not under `vmap`, for the rows of an expert are a number of the
    data); an expert without rows gets a zero gradient.
    """
    if _is_transformed():
        return _by_expert(x, weight, offsets)
    return _op(x, weight, offsets)
