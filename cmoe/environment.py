"""Every environment variable that cmoe reads.

CMOE_CACHE_DIR  folder for compiled kernels (default: $XDG_CACHE_HOME/cmoe, else ~/.cache/cmoe)
CXX             the C++ compiler with its arguments, if any (default: the first of g++, clang++, c++
                on PATH)
"""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path


def cache_dir() -> Path:
    """The folder that compiled kernels are kept in; it may not exist yet."""
    explicit = os.environ.get("CMOE_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cmoe"


def cxx_compiler() -> tuple[str, ...] | None:
    """The command of the C++ compiler, its path first, or None where there is none."""
    explicit = shlex.split(os.environ.get("CXX", ""))
    candidates = [explicit] if explicit else [["g++"], ["clang++"], ["c++"]]
    for name, *arguments in candidates:
        path = shutil.which(name)
        if path is not None:
            return path, *arguments
    return None


def child_environment(compile_cache: Path) -> dict[str, str]:
    """The environment for a child process: torch's compiled graphs in a folder, no network."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
