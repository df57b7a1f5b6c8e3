"""What this machine offers to cmoe, in words."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

import cmoe
from cmoe.custom_ops.backends import LayerSpec, explain_backends, list_backends
from cmoe.environment import cache_dir, cxx_compiler, triton_parameters_file

_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2"),
)
_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")


def describe() -> str:
    """Versions, processor, devices, compiler, every backend: its reasons, where it could run."""
    lines = [f"{name:<13}{text}" for name, text in _facts()]
    for device in devices():
        spec = typical_layer(device)
        lines += ["", f"backends for {spec}, in the order of preference:"]
        for name, reasons in explain_backends(spec).items():
            lines.append(f"  {name:<11}{'can run' if not reasons else 'no: ' + '; '.join(reasons)}")
    for backend in list_backends():
        if kinds := backend.could_run():
            width = max(len(kind) for kind, _ in kinds) + 2
            lines += ["", f"what {backend.name} could run on, here or elsewhere:"]
            lines += [f"  {kind:<{width}}{what}" for kind, what in kinds]
    return "\n".join(lines)


def typical_layer(device: torch.device) -> LayerSpec:
    """A layer of Qwen3-30B-A3B."""
    return LayerSpec(
        device=device,
        dtype=torch.bfloat16,
        num_experts=128,
        top_k=8,
        hidden_size=2048,
        intermediate_size=768,
        activation="silu",
    )


def cpu_flags(text: str) -> list[str]:
    """The vector extensions that decide which kernels can run, from the text of /proc/cpuinfo."""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    present = set(found[1].split()) if found else set()
    return [flag for flag in _FLAGS if flag in present]


def _facts() -> Iterator[tuple[str, str]]:
    yield "cmoe", cmoe.__version__
    yield "torch", torch.__version__
    for package in ("transformers", "triton", "safetensors"):
        yield package, _version(package)
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    cpuinfo = _read(_CPUINFO)
    model = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    yield "cpu", model[1] if model else platform.processor() or platform.machine()
    yield "cpu flags", " ".join(cpu_flags(cpuinfo)) or "unknown"
    yield "threads", f"{torch.get_num_threads()} (torch.set_num_threads)"
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read(_MEMINFO), re.MULTILINE)
    yield "memory", f"{int(memory[1]) * 1024 / 1e9:.1f} GB" if memory else "unknown"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    if not torch.cuda.is_available():
        yield "cuda", "no device"
    yield "compiler", _compiler()
    yield "kernel cache", str(cache_dir())
    tuned = triton_parameters_file()
    yield "triton file", f"{tuned}{'' if tuned.exists() else ' (none yet: python -m bench tune)'}"


def devices() -> list[torch.device]:
    """The CPU, then every GPU."""
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *gpus]


def available_bytes() -> int | None:
    """Memory that new processes can get; None where the system does not tell."""
    found = re.search(r"^MemAvailable:\s*(\d+) kB", _read(_MEMINFO), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _compiler() -> str:
    command = cxx_compiler()
    if command is None:
        return "none found (set CXX, or install g++ or clang++)"
    name = " ".join(command)
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{name}, which does not run ({error})"
    return f"{name}, {done.stdout.partition(chr(10))[0]}"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
