"""Triton's kernels, where triton is installed; without a GPU its interpreter runs them."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]
