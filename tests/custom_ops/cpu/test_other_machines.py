"""The kernels for machines that this one is not: clang for Arm, older processors emulated."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cmoe.custom_ops.cpu import build
from cmoe.environment import cxx_compiler
from tests.custom_ops.cpu.driver import compile_objects, link

CALLS = 30
CLANG = (sys.executable, "-m", "ziglang", "c++")
needs_clang = pytest.mark.skipif(
    importlib.util.find_spec("ziglang") is None, reason="no clang: pip install ziglang"
)


def emulator(machine: str) -> str:
    names = (f"qemu-{machine}-static", f"qemu-{machine}")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no {names[0]}: apt-get install qemu-user-static")
    return found


def kernel_sets_run(command: Sequence[str]) -> list[str]:
    """The kernel sets that the driver found runnable, by its answer."""
    run = subprocess.run([*command, str(CALLS)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return [line.split(":")[0] for line in run.stdout.splitlines() if f"{CALLS} calls" in line]


@needs_clang
@pytest.mark.parametrize(
    ("target", "machine"),
    [
        ("aarch64-linux-musl", "aarch64"),
        ("aarch64-macos", "arm64"),
        ("x86_64-linux-musl", "x86_64"),
    ],
)
def test_clang_compiles_every_kernel_set(target: str, machine: str, tmp_path: Path) -> None:
    kernel_sets = build._kernel_sets(machine)
    objects = compile_objects(CLANG, kernel_sets, ["-target", target], tmp_path)
    assert all(Path(path).stat().st_size > 0 for path in objects)


@needs_clang
@pytest.mark.slow
def test_arm_computes_what_a_plain_loop_does(tmp_path: Path) -> None:
    emulated = emulator("aarch64")
    flags = ["-target", "aarch64-linux-musl", "-static"]
    objects = compile_objects(CLANG, build._kernel_sets("aarch64"), flags, tmp_path)
    program = link(CLANG, objects, flags, tmp_path)
    assert kernel_sets_run([emulated, str(program)]) == ["generic"]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="no compiler for x86-64")
def test_a_processor_runs_the_kernel_sets_that_it_has(tmp_path: Path) -> None:
    compiler = cxx_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    emulated = emulator("x86_64")
    objects = compile_objects(compiler, build._kernel_sets(), [], tmp_path)
    program = str(link(compiler, objects, ["-static"], tmp_path))
    assert kernel_sets_run([emulated, "-cpu", "qemu64", program]) == ["generic"]
    assert kernel_sets_run([emulated, "-cpu", "Haswell", program]) == ["avx2", "generic"]
