"""The floor against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.floor import Work, floor_fma_ms, floor_ms, limited_by, with_floors, work_of
from bench.shapes import SHAPES
from tests.bench.conftest import KNOWN
from tests.bench.fakes import cell

QWEN = SHAPES["qwen3-30b-a3b"]


def test_work_counts_distinct_experts() -> None:
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 99]])
    work = work_of(QWEN, "bf16", ids)
    assert work.active_experts == 9
    assert work.bytes == 9 * 9_437_184
    assert work.flops == 6 * 16 * 2048 * 768


def test_bandwidth_decides_for_one_token() -> None:
    # 8 experts, 75,497,472 bytes at 10 GB/s; 75,497,472 flops at 0.2 TFLOP/s take 0.38 ms.
    work = work_of(QWEN, "bf16", torch.arange(8)[None])
    assert floor_ms(work, KNOWN, "bf16") == pytest.approx(7.5497472)
    assert limited_by(work, KNOWN, "bf16") == "bandwidth"


def test_the_peak_decides_for_many_tokens() -> None:
    # A flop a byte is 100 ns against 5 us (bf16 dot), 10 us (FMA).
    work = Work(active_experts=1, bytes=1_000_000, flops=1_000_000_000)
    assert floor_ms(work, KNOWN, "bf16") == pytest.approx(5.0)
    assert floor_ms(work, KNOWN, "fp32") == pytest.approx(10.0)
    assert floor_fma_ms(work, KNOWN) == pytest.approx(10.0)
    assert limited_by(work, KNOWN, "bf16") == "compute"


def test_torch_may_be_faster_than_both_instructions() -> None:
    limits = dataclasses.replace(KNOWN, matmul_bf16_tflops=4.0)
    assert limits.peak_tflops("bf16") == 4.0
    assert limits.peak_tflops("fp32") == 0.1


def test_a_cell_gets_the_floors_of_its_work() -> None:
    work = {"active_experts": 1, "bytes": 20_000_000, "flops": 1_000_000_000}
    done = with_floors(cell(**work), KNOWN)
    assert done.floor_ms == pytest.approx(5.0)
    assert done.floor_fma_ms == pytest.approx(10.0)
    assert done.limited_by == "compute"


def test_a_cell_without_work_stays_as_it_is() -> None:
    control = cell(impl="control:dense", flops=0, floor_ms=None)
    assert with_floors(control, KNOWN) == control


def test_the_read_rate_between_a_cells_calls_is_its_limit() -> None:
    work = {"active_experts": 1, "bytes": 20_000_000, "flops": 1_000}
    assert with_floors(cell(**work), KNOWN).floor_ms == pytest.approx(2.0)
    assert with_floors(cell(**work, read_gbps=40.0), KNOWN).floor_ms == pytest.approx(0.5)
