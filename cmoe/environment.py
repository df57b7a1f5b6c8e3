"""Every environment variable that cmoe reads.

CMOE_CACHE_DIR
    folder for compiled kernels (default: $XDG_CACHE_HOME/cmoe, else ~/.cache/cmoe)
CMOE_TRITON_PARAMETERS
    file of tuned parameters for the Triton kernels (default: triton-parameters.json in that folder)
CXX
    the C++ compiler with its arguments, if any (default: the first of g++, clang++, c++ on PATH)
TRITON_INTERPRET
    Triton's own variable: with 1 its interpreter runs the kernels, on the CPU
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


def triton_parameters_file() -> Path:
    """The file of tuned parameters for the Triton kernels; it may not exist."""
    explicit = os.environ.get("CMOE_TRITON_PARAMETERS")
    return Path(explicit) if explicit else cache_dir() / "triton-parameters.json"


def triton_is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


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
    """The environment for a child process: torch's compiled graphs in a folder, no network.

    Weights lie on pages of 2 MB, whoever allocates them.
    """
    return {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(compile_cache),
        "HF_HUB_OFFLINE": "1",
        "THP_MEM_ALLOC_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
