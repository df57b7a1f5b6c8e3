"""Where the tests of Triton kernels run: on a GPU, or in the interpreter.

Triton reads TRITON_INTERPRET when it is imported, so that one process is either the one or the
other. Without a GPU `test_interpreter.py` runs the tests that ask for `kernel_device` in a process
of their own.
"""

from __future__ import annotations

import pytest
import torch

from cmoe.environment import triton_is_interpreted

INTERPRETER_WARNINGS = (
    "ignore:.* encountered in:RuntimeWarning",  # numpy met an infinity, a NaN
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # Triton 3.6, numpy 2.3
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "kernel_device" in item.fixturenames:
            for warning in INTERPRETER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture
def kernel_device() -> torch.device:
    """The device that kernels run on in this process; a test that asks for it needs one."""
    if triton_is_interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no GPU: test_interpreter.py runs this test in Triton's interpreter")
    return torch.device("cuda")
