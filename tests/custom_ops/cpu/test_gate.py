"""The C++ gate against float64, in every kernel set."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.gate import SCHEMA

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def call(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.cmoe_cpu.gate(x, weight, bias)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


def check(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = call(x, weight, bias)
    assert (y.dtype, y.shape) == (torch.float32, (x.shape[0], weight.shape[0]))
    assert y.is_contiguous()
    # A sum of H products in sixteen or fewer lanes, H / 4 rounding steps at most; the terms are of
    # order 1 / sqrt(H).
    torch.testing.assert_close(y.double(), exact(x, weight, bias), rtol=1e-5, atol=1e-5)
    return y


def test_the_schema_is_that_of_every_backend(cpu_kernels: Kernels) -> None:
    assert str(cpu_kernels.gate._schema) == f"cmoe_cpu::gate{SCHEMA}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(7, 13, 77), (1, 1, 1), (4, 4, 16), (9, 128, 300), (0, 3, 5)])
def test_sizes(sizes: tuple[int, int, int], dtype: torch.dtype, kernel_set: str) -> None:
    T, E, H = sizes
    weight = (torch.randn(E, H) / H**0.5).to(dtype)
    check(torch.randn(T, H).to(dtype), weight, torch.randn(E).to(dtype))


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_has_the_same_logits_in_every_batch(
    dtype: torch.dtype, weight_dtype: torch.dtype, threads: int, kernel_set: str
) -> None:
    x, weight = torch.randn(257, 2048).to(dtype), torch.randn(61, 2048).to(weight_dtype)
    whole = call(x, weight)
    torch.set_num_threads(threads)
    for T in (1, 2, 3, 7, 64):
        assert torch.equal(call(x[:T], weight), whole[:T])
        assert torch.equal(call(x[-T:], weight), whole[-T:])


@pytest.mark.usefixtures("cpu_kernels")
def test_strides_with_mixed_dtypes() -> None:
    x, weight = torch.randn(6, 32).bfloat16(), torch.randn(5, 32).bfloat16() / 6
    expected = check(x, weight)
    assert torch.equal(call(x.t().contiguous().t(), weight.t().contiguous().t()), expected)
    assert torch.equal(call(x.repeat(1, 2)[:, :32], weight), expected)
    torch.testing.assert_close(call(x, weight.float()), expected)
    assert call(x.double(), weight).dtype == torch.float64


@pytest.mark.usefixtures("cpu_kernels")
def test_a_token_of_nan_leaves_the_others_alone() -> None:
    x, weight = torch.randn(7, 40), torch.randn(5, 40)
    expected = call(x, weight)
    x[3] = float("nan")
    y = call(x, weight)
    assert y[3].isnan().all()
    keep = [0, 1, 2, 4, 5, 6]
    assert torch.equal(y[keep], expected[keep])


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("num_tokens", [0, 3])
def test_opcheck(num_tokens: int) -> None:
    arguments = (torch.randn(num_tokens, 7), torch.randn(5, 7), torch.randn(5))
    torch.library.opcheck(torch.ops.cmoe_cpu.gate.default, arguments)


@pytest.mark.usefixtures("cpu_kernels")
def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gate needs x \[T, H\], weight \[E, H\]; got \[3, 7\]"):
        call(torch.randn(3, 7), torch.randn(5, 8))
    with pytest.raises(ValueError, match=r"the gate's bias must be \[5\]; got \[4\]"):
        call(torch.randn(3, 7), torch.randn(5, 7), torch.randn(4))
