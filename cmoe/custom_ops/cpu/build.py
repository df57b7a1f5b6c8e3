"""The CPU kernels as a cached shared library, compiled at first use."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from cmoe.environment import cache_dir, cxx_compiler

logger = logging.getLogger("cmoe")

SOURCES = Path(__file__).parent

_AVX512: Sequence[str] = [
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx2",
    "-mfma",
    "-mf16c",
]
# One kernel set for each instruction set; which of them runs is decided by the processor at run
# time, so a library built on one machine is safe on another.
_KERNEL_SETS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "x86_64": {
        "avx512_bf16": [*_AVX512, "-mavx512bf16"],
        "avx512": _AVX512,
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
    },
}
_KERNEL_SETS_ANYWHERE: Mapping[str, Sequence[str]] = {"generic": []}
_OPS = ("cmoe_cpu::fused_experts", "cmoe_cpu::route", "cmoe_cpu::fused_moe", "cmoe_cpu::gate")
# The last ones in one unit: reading torch's headers takes longer than compiling any of them.
_OP_UNITS = (("ops",), ("fused_experts", "route", "gate", "kernel_choice"))

# No contraction: every tile shape has to round alike, so a fused multiply-add is always written.
_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w")


class BuildError(RuntimeError):
    """The library could not be compiled or loaded; the message says why and what to do."""


def library(extra_flags: Sequence[str] = ()) -> Path:
    """The compiled library, from the cache or built now. BuildError.

    Its name is the digest of its bytes, so that a damaged or a foreign file is never loaded: a
    truncated library would end the process with SIGBUS. Two processes may build at once: each
    works in a folder of its own, then moves its library into place in one step.
    """
    compiler = cxx_compiler()
    if platform.system() not in ("Linux", "Darwin"):
        raise BuildError(f"the CPU kernels are not built on {platform.system()}")
    if compiler is None:
        raise BuildError("no C++ compiler found; install g++ or point CXX at one")
    flags = (*_FLAGS, *extra_flags)
    folder = cache_dir() / f"cpu-{_key(compiler, flags)}"
    try:
        cached = _intact(folder)
        if cached is not None:
            return cached
        logger.warning(
            "compiling the CPU kernels with %s, once, into %s", " ".join(compiler), folder
        )
        start = time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = _build(compiler, flags, Path(scratch))
            target = built.replace(folder / f"{_digest(built)}.so")
    except OSError as error:
        raise BuildError(f"the CPU kernels could not be built: {error}") from error
    logger.info("compiled the CPU kernels in %.1f s", time.perf_counter() - start)
    return target


def _intact(folder: Path) -> Path | None:
    """A library of the folder that is what its name says; those that are not are removed."""
    for path in sorted(folder.glob("*.so")):
        if path.stem == _digest(path):
            return path
        path.unlink(missing_ok=True)
    return None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _kernel_sets(machine: str | None = None) -> dict[str, Sequence[str]]:
    """The flags of each kernel set of a kind of machine, named as `platform` does; of this one."""
    return {**_KERNEL_SETS.get(machine or platform.machine(), {}), **_KERNEL_SETS_ANYWHERE}


def _torch_flags() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-isystem", str(include)]


def _key(compiler: Sequence[str], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.machine(), *compiler, *flags, str(_kernel_sets())):
        digest.update(part.encode() + b"\0")
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _build(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> Path:
    kernel_sets = _kernel_sets()
    have = [f"-DCMOE_HAVE_{name.upper()}" for name in kernel_sets]
    jobs = {f"kernels_{name}": [*flags, *own] for name, own in kernel_sets.items()}
    for name, *beside in _OP_UNITS:
        included = [f"-include{SOURCES / source}.cpp" for source in beside]
        jobs[name] = [*flags, *have, *_torch_flags(), *included]

    def compile_one(name: str) -> str:
        output = str(folder / f"{name}.o")
        _run([*compiler, *jobs[name], "-c", str(SOURCES / f"{name}.cpp"), "-o", output])
        return output

    # Threads only wait for the compiler here.
    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, jobs))
    linked = folder / "cmoe_cpu.so"
    torch_lib = Path(torch.__file__).parent / "lib"
    libraries = [f"-L{torch_lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch_lib}"]
    _run([*compiler, *flags, "-shared", *objects, "-o", str(linked), *libraries])
    return linked


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        errors = [line for line in result.stderr.splitlines() if "error" in line]
        reason = (errors or result.stderr.splitlines() or ["no message"])[0]
        raise BuildError(f"{command[0]} failed: {reason}")


@functools.cache
def load() -> str | None:
    """Registers the ops of the namespace cmoe_cpu; returns why that cannot be done, or None."""
    try:
        path = library()
        torch.ops.load_library(str(path))
    except BuildError as error:
        return str(error)
    except (OSError, RuntimeError) as error:
        return f"the compiled CPU kernels do not load: {error}"
    missing = [name for name in _OPS if not torch._C._dispatch_has_kernel(name)]
    if missing:
        return f"{path} does not register {', '.join(missing)}; remove it"
    return None
