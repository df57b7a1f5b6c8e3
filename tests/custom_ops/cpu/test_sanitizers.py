"""The kernels in a bare program under the sanitizers, with guard pages around every tensor."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cmoe.custom_ops.cpu import build
from cmoe.environment import cxx_compiler

DRIVER = Path(__file__).with_name("sanitized_driver.cpp")
CALLS = 30


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_random_calls(sanitizer: str, tmp_path: Path) -> None:
    compiler = cxx_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    kernel_sets = build._kernel_sets()
    flags = [
        *build._FLAGS,
        "-g1",
        "-O1",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
        f"-I{build.SOURCES}",
        *(f"-DCMOE_HAVE_{name.upper()}" for name in kernel_sets),
    ]
    sources = {build.SOURCES / f"kernels_{name}.cpp": own for name, own in kernel_sets.items()}
    sources |= {build.SOURCES / "kernel_choice.cpp": [], DRIVER: []}

    def compile_one(source: Path) -> str:
        output = tmp_path / f"{source.stem}.o"
        build._run([*compiler, *flags, *sources[source], "-c", str(source), "-o", str(output)])
        return str(output)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = tmp_path / "driver"
    build._run([*compiler, *flags, *objects, "-pthread", "-o", str(program)])
    run = subprocess.run([program, str(CALLS)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.count(f"{CALLS} calls") >= 1
