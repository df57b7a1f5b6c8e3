"""The most memory that this process has held."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


def peak_bytes(device: torch.device) -> int | None:
    """Resident memory at its highest, or the device's; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _kilobytes(_STATUS, "VmHWM")


def reset_peak(device: torch.device) -> None:
    """Counts anew from here, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _CLEAR_REFS.exists():
        _CLEAR_REFS.write_text("5")


def _kilobytes(path: Path, field: str) -> int | None:
    if not path.exists():
        return None
    found = re.search(rf"^{field}:\s+(\d+) kB$", path.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None
