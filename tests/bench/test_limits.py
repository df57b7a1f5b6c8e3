"""The machine's limits: how they are merged, what happens without a compiler."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from bench import limits
from tests.bench.conftest import KNOWN


def test_the_higher_rate_of_two_measurements_counts() -> None:
    busy = dataclasses.replace(KNOWN, read_gbps=5.0, fma_fp32_tflops=0.3)
    best = limits.best_of(KNOWN, busy)
    assert best.read_gbps == 10.0
    assert best.fma_fp32_tflops == 0.3


def test_without_a_compiler_torch_is_the_limit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert limits._native_library() is None
    assert "no C++ compiler (set CXX)" in capsys.readouterr().err
    measured = limits._measure_with_torch(1 << 20, 1, 1 << 20)
    assert measured.read_gbps > 0
    assert measured.fma_fp32_tflops > 0
    assert "no compiler" in measured.method


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_micro_kernels_give_rates_of_this_world() -> None:
    library = limits._native_library()
    assert library is not None
    with limits.ReadStream(1 << 24, 1, library) as stream:
        assert all(0.1 < stream.gbps(1) < 1e5 for _ in range(2))
    assert 1e-4 < library.fma_fp32_tflops(0.001, 1, 1) < 100
    assert library.dot_bf16_tflops(0.001, 1, 1) >= 0
