"""The kernel sets of the cpu backend, each one a parameter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.cpu import BACKEND, build
from cmoe.environment import cxx_compiler

KERNEL_SETS = ("avx512_bf16", "avx512", "avx2", "generic")


@pytest.fixture(scope="session")
def cpu_kernels() -> Kernels:
    """The loaded kernels; the library is built where the cache has none."""
    if cxx_compiler() is None:
        pytest.skip("no C++ compiler")
    assert build.load() is None, build.load()
    return BACKEND.kernels()


@pytest.fixture(params=KERNEL_SETS)
def kernel_set(request: pytest.FixtureRequest, cpu_kernels: Kernels) -> Iterator[str]:
    """Every kernel set that this processor can run, in use for one test."""
    if request.param not in torch.ops.cmoe_cpu.kernel_sets():
        pytest.skip(f"this processor cannot run {request.param}")
    torch.ops.cmoe_cpu.use_kernel_set(request.param)
    yield request.param
    torch.ops.cmoe_cpu.use_kernel_set("auto")
