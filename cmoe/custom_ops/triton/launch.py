"""What surrounds the launches of one call: their device is current, their kernels may be loaded."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of cuda.h, hipStreamCaptureModeRelaxed of HIP."""


def launching(device: torch.device) -> AbstractContextManager[Any]:
    """For tensors of `device`, which Triton needs as the current one; nothing in the usual case."""
    if device.type != "cuda":
        return nullcontext()
    if torch.cuda.is_current_stream_capturing():
        return _while_capturing(device)
    if device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@contextlib.contextmanager
def _while_capturing(device: torch.device) -> Iterator[None]:
    """A kernel's first launch loads its module, which a capturing thread may do in relaxed mode.

    So a number of tokens that nobody warmed up can be captured too. torch allocates the graph's
    memory in the same way. Source: CUDA driver API, cuThreadExchangeStreamCaptureMode.
    """
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)
    exchange(ctypes.byref(mode))  # `mode` has the former one now
    try:
        with torch.cuda.device(device):
            yield
    finally:
        exchange(ctypes.byref(mode))


def with_scratch(launch: Callable[[], object]) -> None:
    """Runs `launch()`; kernels that describe blocks for themselves have memory from torch for it.

    So a captured graph has it in its own pool. Whoever else launches Triton kernels keeps the
    allocator that they set.
    """
    context = contextvars.copy_context()
    context.run(triton.set_allocator, _scratch)
    context.run(launch)


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Bytes on the current device, for its current stream; Triton asks to align them to 128."""
    return torch.empty(size, dtype=torch.uint8, device="cuda")


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int]:
    if torch.version.hip is not None:
        return ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
    return ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
