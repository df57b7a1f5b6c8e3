"""The check that ids lie in their range: at once on a CPU, deferred on a GPU or in a graph."""

from __future__ import annotations

import torch
from torch import Tensor


def check_ids(name: str, ids: Tensor, low: int, end: int) -> None:
    """ValueError for an id outside of [low, end); RuntimeError where a value cannot be read yet."""
    wanted = f"{name} must be in [{low}, {end})"
    if ids.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(((ids >= low) & (ids < end)).all(), wanted)
    elif ids.numel() and (ids.min() < low or ids.max() >= end):
        raise ValueError(f"{wanted}; got {ids.min()} to {ids.max()}")
