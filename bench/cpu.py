"""What the operating system says about the processor."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_FLAGS_THAT_MATTER = (
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "avx_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimdhp",
    "bf16",
    "i8mm",
    "sve",
)


def _cpuinfo(field: str, path: Path = Path("/proc/cpuinfo")) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == field:
            return value.strip()
    return ""


def model_name() -> str:
    """The processor's name, with family and model number where they are known."""
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    family, model = _cpuinfo("cpu family"), _cpuinfo("model")
    return f"{name} (family {family} model {model})" if family and model else name


def flags() -> list[str]:
    """The vector extensions that decide which kernels can run."""
    present = set((_cpuinfo("flags") or _cpuinfo("Features")).split())
    return [flag for flag in _FLAGS_THAT_MATTER if flag in present]


def num_cpus() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def last_level_cache_bytes(root: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Size of the largest cache; 32 MiB where the system does not tell."""
    sizes = []
    for path in root.glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * scale)
    return max(sizes, default=32 << 20)
