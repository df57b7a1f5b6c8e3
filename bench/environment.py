"""What a record says about where it was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from bench import cpu

_VARIABLES = ("OMP_NUM_THREADS", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "THP_MEM_ALLOC_ENABLE")


def describe(*, threads: int, command: str) -> dict[str, Any]:
    """Commit, versions, device, threads, load, the command: JSON data."""
    return {
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "commit": commit(),
        "device": device_name(),
        "cpu": cpu.model_name(),
        "cpu_flags": cpu.flags(),
        "cpus": cpu.num_cpus(),
        "threads": threads,
        "cache_bytes": cpu.last_level_cache_bytes(),
        "load_average": os.getloadavg()[0],
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **_installed("triton"),
            "system": platform.platform(),
        },
    }


def _installed(package: str) -> dict[str, str]:
    try:
        return {package: importlib.metadata.version(package)}
    except importlib.metadata.PackageNotFoundError:
        return {}


def device_name() -> str:
    """The accelerator's name, or the processor's."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu.model_name()


def commit(root: Path | None = None) -> str | None:
    """The checked-out commit, with `+changes` when the tree differs from it."""
    where = root or Path(__file__).resolve().parents[1]
    head = _git(where, "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    return head + ("+changes" if _git(where, "status", "--porcelain") else "")


def _git(where: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(where), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def command_line() -> str:
    """The command as it would be typed again."""
    return shlex.join(["python", "-m", "bench", *sys.argv[1:]])
