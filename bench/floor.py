"""The least time that a layer can take on this machine.

    bytes = A * bytes of one expert     A: distinct experts among the ids
    flops = 6 * T * K * H * I           three products of [H] x [I] a routed row, 2 flops each
    floor = max(bytes / read bandwidth, flops / peak)

Activations are left out: they stay in the caches at decode, and the peak decides elsewhere.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from torch import Tensor

from bench.limits import Limits
from bench.record import Cell
from bench.routing import num_active
from bench.shapes import Shape


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one call must at least do."""

    active_experts: int
    bytes: int
    flops: int


def work_of(shape: Shape, dtype: str, topk_ids: Tensor) -> Work:
    """The work of one call with these ids: [T, K]."""
    active = num_active(topk_ids)
    rows = topk_ids.numel()
    return Work(
        active_experts=active,
        bytes=active * shape.expert_bytes(dtype),
        flops=6 * rows * shape.hidden_size * shape.intermediate_size,
    )


def bandwidth_ms(work: Work, limits: Limits) -> float:
    """Milliseconds to read the weights once."""
    return work.bytes / (limits.read_gbps * 1e6)


def compute_ms(work: Work, peak_tflops: float) -> float:
    """Milliseconds to multiply at `peak_tflops`."""
    return work.flops / (peak_tflops * 1e9)


def floor_ms(work: Work, limits: Limits, dtype: str) -> float:
    """The larger of the two, at the fastest multiplication that the machine has for `dtype`."""
    return max(bandwidth_ms(work, limits), compute_ms(work, limits.peak_tflops(dtype)))


def floor_fma_ms(work: Work, limits: Limits) -> float:
    """The same with float32 FMA as the peak, whatever faster instruction there may be."""
    return max(bandwidth_ms(work, limits), compute_ms(work, limits.fma_fp32_tflops))


def with_floors(cell: Cell, limits: Limits) -> Cell:
    """The cell with its floors; as it is where it has no work of its own.

    At the read rate that was taken between its calls where there is one, else at that of `limits`.
    """
    if not cell.flops or cell.ms_median is None:
        return cell
    if cell.read_gbps is not None:
        limits = dataclasses.replace(limits, read_gbps=cell.read_gbps)
    work = Work(active_experts=cell.active_experts, bytes=cell.bytes, flops=cell.flops)
    return dataclasses.replace(
        cell,
        floor_ms=floor_ms(work, limits, cell.dtype),
        floor_fma_ms=floor_fma_ms(work, limits),
        limited_by=limited_by(work, limits, cell.dtype),
    )


def limited_by(work: Work, limits: Limits, dtype: str) -> str:
    """Which of the two is the larger: "bandwidth" or "compute"."""
    compute = compute_ms(work, limits.peak_tflops(dtype))
    return "compute" if compute > bandwidth_ms(work, limits) else "bandwidth"
