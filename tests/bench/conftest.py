"""A machine with known limits, so that no test measures one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench import limits
from bench.limits import Limits

KNOWN = Limits(
    read_gbps=10.0,
    fma_fp32_tflops=0.1,
    dot_bf16_tflops=0.2,
    matmul_bf16_tflops=0.15,
    threads=2,
    cache_bytes=1 << 16,
    method="given by the test",
)


@pytest.fixture
def known_limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    monkeypatch.setattr(limits, "measure", lambda *, threads: KNOWN)
    monkeypatch.setattr(limits, "open_read_stream", lambda *, threads: None)
    return KNOWN


@pytest.fixture(autouse=True)
def gradients_on_again() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
