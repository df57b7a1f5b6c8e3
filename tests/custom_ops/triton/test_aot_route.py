"""The router's kernel, compiled without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from cmoe.environment import triton_is_interpreted

pytest.importorskip("triton", reason="Triton is not installed")

from cmoe.custom_ops.triton import route
from tests.custom_ops.triton.aot import TARGETS, launches_of, resources_of

pytestmark = pytest.mark.skipif(
    triton_is_interpreted(), reason="TRITON_INTERPRET=1: this process has no Triton compiler"
)

# 65,536 registers of a multiprocessor leave 128 to each of 16 warps' threads.
MOST_REGISTERS = 128
SOFTMAX = ("softmax", False, True, 1e-20, 1, 1, 1.0)
# E, K, dtype, whether there is a bias, the arguments behind top_k.
ROUTERS: Mapping[str, tuple[int, int, torch.dtype, bool, tuple[Any, ...]]] = {
    "qwen3-moe": (128, 8, torch.bfloat16, False, SOFTMAX),
    "gpt-oss": (32, 4, torch.bfloat16, False, ("softmax", True, False, 1e-20, 1, 1, 1.0)),
    "deepseek-v2": (160, 6, torch.bfloat16, False, ("softmax", False, False, 1e-20, 8, 3, 16.0)),
    "deepseek-v3": (256, 8, torch.float32, True, ("sigmoid", False, True, 1e-20, 8, 4, 2.5)),
    "sqrtsoftplus": (512, 32, torch.float32, True, ("sqrtsoftplus", False, True, 1e-20, 1, 1, 1.0)),
    "prime": (4093, 8, torch.float16, False, SOFTMAX),
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled(target: str, router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_experts, top_k, dtype, has_bias, options = ROUTERS[router]
    logits = torch.empty(7, num_experts, dtype=dtype, device="meta")
    bias = torch.empty(num_experts, device="meta") if has_bias else None
    (launch,) = launches_of(lambda: route._route(logits, bias, top_k, *options), monkeypatch)
    taken = resources_of(launch.compile_for(target))
    assert taken.spilled_bytes == 0
    assert 0 < taken.registers <= MOST_REGISTERS
