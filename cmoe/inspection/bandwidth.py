"""How fast this machine reads memory, measured in about a second."""

from __future__ import annotations

import time

import torch

_BYTES = 1 << 30  # larger than the caches of most machines
_REPEATS = 4


def read_gbps(device: torch.device) -> float:
    """1e9 bytes a second: the best of several sums over 1 GB, on torch's own threads."""
    buffer = torch.ones(_BYTES // 8, dtype=torch.int64, device=device)
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        int(buffer.sum())  # Waits for the device.
        best = min(best, time.perf_counter() - start)
    return _BYTES / best / 1e9
