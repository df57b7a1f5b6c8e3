"""Compiles a Triton kernel for a GPU that is not there, reads what it takes.

Works in a process without TRITON_INTERPRET, since that is read when triton is imported.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.runtime.jit import JITFunction

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


def resources_of(compiled: CompiledKernel) -> Resources:
    """As the assembler reports them."""
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


class Launch(NamedTuple):
    """A kernel with the arguments of one launch."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]

    def source(self) -> ASTSource:
        """What Triton's launcher would compile: it fixes ones, None, what 16 divides."""
        names = self.kernel.arg_names
        values = dict(zip(names, self.arguments, strict=False)) | self.options
        signature, constants, attributes = {}, {}, {}
        for index, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if parameter.do_not_specialize:
                signature[parameter.name] = "i32"
                continue
            kind = "constexpr" if parameter.is_constexpr else _type_of(value)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[(index,)] = value
            # torch's allocator aligns what a pointer points at.
            elif isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)

    def compile_for(self, target: str) -> CompiledKernel:
        """The binary."""
        names = self.kernel.arg_names
        options = {name: value for name, value in self.options.items() if name not in names}
        return triton.compile(self.source(), target=TARGETS[target], options=options)


_POINTERS: Mapping[torch.dtype, str] = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def _type_of(value: Any) -> str:
    if value is None or (isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def launches_of(call: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What the call would launch; nothing runs, so that its tensors may be without memory."""
    launches = []

    def record(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(kernel, arguments, options))

    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "run", record)
        call()
    return launches
