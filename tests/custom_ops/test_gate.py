"""The router's product against float64, each token for itself."""

from __future__ import annotations

import pytest
import torch

from cmoe.custom_ops.gate import gate_fake, gate_reference


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_reference_is_the_product(dtype: torch.dtype, bias: bool, num_tokens: int) -> None:
    x, weight = torch.randn(num_tokens, 64).to(dtype), torch.randn(5, 64).to(dtype)
    b = torch.randn(5).to(dtype) if bias else None
    logits = gate_reference(x, weight, b)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    # Products of 64 numbers of order one: some dozens of rounding steps of float32 of their size.
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    fake = gate_fake(x, weight, b)
    assert (logits.shape, logits.dtype) == (fake.shape, fake.dtype)
