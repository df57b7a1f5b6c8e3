"""Compiles a Triton kernel for a GPU that is not there, reads what it takes.

Runs in a process of its own without TRITON_INTERPRET, since that is read when triton is imported.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TARGETS: Mapping[str, GPUTarget] = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Resources(NamedTuple):
    """What one program of a compiled kernel takes."""

    registers: int  # of a thread
    spilled_bytes: int  # of a thread
    shared_bytes: int


def compile_for(
    target: str,
    kernel: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    **options: int,
) -> Resources:
    """arguments: name -> Triton type ("*bf16", "i32"), constants: name -> value."""
    signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(
        fn=kernel,
        signature={name: signature[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    read = _of_cubin if "cubin" in compiled.asm else _of_amdgcn
    return read(compiled.asm, compiled.metadata.shared)


def _of_cubin(asm: Mapping[str, Any], shared_bytes: int) -> Resources:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(_CUOBJDUMP), "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {name: int(value) for name, value in re.findall(r"([A-Z]+):(\d+)", done.stdout)}
    return Resources(found["REG"], found["STACK"] + found["LOCAL"], shared_bytes)


def _of_amdgcn(asm: Mapping[str, Any], shared_bytes: int) -> Resources:
    found = {name: int(n) for name, n in re.findall(r"\.(\w+):\s+(\d+)", asm["amdgcn"])}
    return Resources(found["vgpr_count"], found["private_segment_fixed_size"], shared_bytes)
