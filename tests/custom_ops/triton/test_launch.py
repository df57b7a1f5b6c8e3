"""What surrounds the launches of one call."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.runtime import _allocation

from cmoe.custom_ops.triton import launch

GLOBAL, RELAXED = 0, 2  # of cuda.h


class FakeThread:
    """A thread with two devices, its capture mode as the driver exchanges it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, capturing: bool) -> None:
        self.mode, self.device = GLOBAL, 0
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.device)
        monkeypatch.setattr(torch.cuda, "device", self.use)
        monkeypatch.setattr(launch, "_exchange_capture_mode", lambda: self.exchange)

    def exchange(self, pointer: Any) -> int:
        held = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int)).contents
        held.value, self.mode = self.mode, held.value
        return 0

    @contextlib.contextmanager
    def use(self, device: torch.device):
        before, self.device = self.device, device.index
        yield
        self.device = before


def test_a_capture_may_load_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = FakeThread(monkeypatch, capturing=True)
    with launch.launching(torch.device("cuda", 1)):
        assert (thread.mode, thread.device) == (RELAXED, 1)
    assert (thread.mode, thread.device) == (GLOBAL, 0)


def test_the_former_mode_comes_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = FakeThread(monkeypatch, capturing=True)
    with pytest.raises(ValueError, match="bad"), launch.launching(torch.device("cuda", 0)):
        raise ValueError("bad")
    assert thread.mode == GLOBAL


def test_outside_a_capture_only_the_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = FakeThread(monkeypatch, capturing=False)
    for device, current in ((torch.device("cuda", 1), 1), (torch.device("cuda", 0), 0)):
        with launch.launching(device):
            assert (thread.mode, thread.device) == (GLOBAL, current)
    assert isinstance(launch.launching(torch.device("cuda", 0)), nullcontext)


def test_the_interpreter_needs_nothing() -> None:
    assert isinstance(launch.launching(torch.device("cpu")), nullcontext)


def test_scratch_comes_from_torch_for_these_launches_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's launcher asks the allocator of its context; others keep theirs."""
    asked: list[tuple[int, str]] = []

    def empty(size: int, dtype: torch.dtype, device: str) -> int:
        asked.append((size * dtype.itemsize, device))
        return size

    def theirs(size: int, alignment: int, stream: int | None) -> None:
        raise AssertionError("their allocator was asked")

    def launches() -> None:
        monkeypatch.setattr(torch, "empty", empty)
        launch.with_scratch(lambda: _allocation._allocator.get()(256, 128, None))
        assert _allocation._allocator.get() is theirs

    def in_a_context_of_its_own() -> None:
        triton.set_allocator(theirs)
        launches()

    contextvars.copy_context().run(in_a_context_of_its_own)
    assert asked == [(256, "cuda")]


@pytest.mark.gpu
def test_the_driver_exchanges_the_mode() -> None:
    exchange, mode = launch._exchange_capture_mode(), ctypes.c_int(RELAXED)
    assert exchange(ctypes.byref(mode)) == 0
    assert mode.value == GLOBAL
    assert exchange(ctypes.byref(mode)) == 0
    assert mode.value == RELAXED
