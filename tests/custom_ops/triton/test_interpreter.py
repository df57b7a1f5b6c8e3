"""The tests of Triton kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cmoe.environment import triton_is_interpreted

FOLDER = Path(__file__).parent
MODULES = sorted(
    path.name
    for path in FOLDER.glob("test_*.py")
    if path != Path(__file__) and "kernel_device" in path.read_text()
)


@pytest.mark.slow
@pytest.mark.skipif(
    triton_is_interpreted(),
    reason="TRITON_INTERPRET=1: every module runs in the interpreter by itself",
)
@pytest.mark.parametrize("module", MODULES)
def test_in_the_interpreter(module: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER / module)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
