"""The kernels in a bare program with guard pages around every tensor, under the sanitizers too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cmoe.custom_ops.cpu import build
from cmoe.environment import cxx_compiler
from tests.custom_ops.cpu.driver import compile_objects, link

CALLS = 30


def sanitized(sanitizer: str) -> list[str]:
    return ["-g1", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]


# As shipped too: which instruction a masked access becomes is the optimizer's choice, and some of
# them touch what the mask leaves out.
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="as_shipped"),
        pytest.param(sanitized("address,undefined"), id="address"),
        pytest.param(sanitized("thread"), id="thread"),
    ],
)
def test_random_calls(flags: list[str], tmp_path: Path) -> None:
    compiler = cxx_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    objects = compile_objects(compiler, build._kernel_sets(), flags, tmp_path)
    program = link(compiler, objects, flags, tmp_path)
    run = subprocess.run([program, str(CALLS)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(f"{CALLS} calls") >= 1
