"""The kernels in a bare program, driver.cpp: compiled by any compiler, for any processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cmoe.custom_ops.cpu import build

SOURCE = Path(__file__).with_name("driver.cpp")


def compile_objects(
    compiler: Sequence[str],
    kernel_sets: Mapping[str, Sequence[str]],
    flags: Sequence[str],
    folder: Path,
) -> list[str]:
    """The object files of the driver with these kernel sets, each compiled with its own flags."""
    have = [f"-DCMOE_HAVE_{name.upper()}" for name in kernel_sets]
    sources = {build.SOURCES / f"kernels_{name}.cpp": own for name, own in kernel_sets.items()}
    sources |= {build.SOURCES / "kernel_choice.cpp": have, SOURCE: have}

    def compile_one(source: Path) -> str:
        output = str(folder / f"{source.stem}.o")
        own = [*sources[source], f"-I{build.SOURCES}", "-c", str(source), "-o", output]
        build._run([*compiler, *build._FLAGS, *flags, *own])
        return output

    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(compile_one, sources))


def link(
    compiler: Sequence[str], objects: Sequence[str], flags: Sequence[str], folder: Path
) -> Path:
    """The program. Called with a number, it makes so many random calls of each kernel set that
    the processor can run, prints their names, and fails if a result is not that of a plain loop.
    """
    program = folder / "driver"
    build._run([*compiler, *build._FLAGS, *flags, *objects, "-pthread", "-o", str(program)])
    return program
