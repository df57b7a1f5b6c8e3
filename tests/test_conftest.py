"""The fixtures that other tests lean on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", FLOATS)
def test_fresh_floats_are_nan(dtype: torch.dtype) -> None:
    x = torch.zeros(1, dtype=dtype)
    for fresh in (torch.empty(64, dtype=dtype), x.new_empty(64), torch.empty_like(x), x.resize_(2)):
        assert fresh[-1].float().isnan()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_fresh_integers_are_out_of_any_range(dtype: torch.dtype) -> None:
    assert (torch.empty(64, dtype=dtype) == torch.iinfo(dtype).max).all()


def test_memory_inside_kernels_of_torch_is_poisoned() -> None:
    assert torch.nn.Linear(3, 3, device="meta").to_empty(device="cpu").weight.isnan().all()


@pytest.mark.parametrize("again", [False, True])
def test_every_test_starts_with_the_same_seed(again: bool) -> None:
    seeded = torch.Generator().manual_seed(20260)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=seeded))


@pytest.mark.parametrize("again", [False, True])
def test_defaults_are_restored(again: bool) -> None:
    assert torch.get_num_threads() == 2
    assert torch.get_default_dtype() == torch.float32
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)


def _double(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize("again", [False, True])
def test_compilations_are_counted_from_zero(again: bool, count_compiles: Callable[[], int]) -> None:
    compiled = torch.compile(_double, fullgraph=True, backend="aot_eager", dynamic=False)
    assert count_compiles() == 0
    for num_tokens, graphs in ((3, 1), (3, 1), (5, 2), (7, 3), (5, 3)):
        compiled(torch.ones(num_tokens))
        assert count_compiles() == graphs


def test_each_graph_of_a_broken_function_counts(count_compiles: Callable[[], int]) -> None:
    def broken(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    torch.compile(broken, backend="aot_eager")(torch.ones(3))
    assert count_compiles() == 2
