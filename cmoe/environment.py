"""Every environment variable that cmoe reads.

CMOE_CACHE_DIR  folder for compiled kernels (default: $XDG_CACHE_HOME/cmoe, else ~/.cache/cmoe)
CXX             the C++ compiler (default: the first of g++, clang++, c++ on PATH)
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def cache_dir() -> Path:
    """The folder that compiled kernels are kept in; it may not exist yet."""
    explicit = os.environ.get("CMOE_CACHE_DIR")
    if explicit:
        return Path(explicit)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "cmoe"


def cxx_compiler() -> str | None:
    """The path of the C++ compiler, or None where there is none."""
    explicit = os.environ.get("CXX")
    if explicit:
        return shutil.which(explicit)
    found = (shutil.which(name) for name in ("g++", "clang++", "c++"))
    return next((path for path in found if path), None)


def child_environment(compile_cache: Path) -> dict[str, str]:
    """The environment for a child process: torch's compiled graphs in a folder, no network."""
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
