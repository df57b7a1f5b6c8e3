"""The router for callers that have routed already."""

from __future__ import annotations

import pytest
import torch

from cmoe import GivenTopKRouter, RouterInputs


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_the_routing_passes_as_it_is(top_k: int, ids_dtype: torch.dtype) -> None:
    weights = torch.rand(7, top_k)
    ids = torch.randint(-1, 5, (7, top_k)).to(ids_dtype)
    inputs = RouterInputs(torch.randn(7, 16), topk_weights=weights, topk_ids=ids)
    routing = GivenTopKRouter()(inputs)
    assert torch.equal(routing.topk_weights, weights)
    assert routing.topk_ids is ids


@pytest.mark.parametrize(
    ("given", "used"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_dtype_of_the_weights(given: torch.dtype, used: torch.dtype) -> None:
    weights = torch.rand(3, 2).to(given)
    ids = torch.zeros(3, 2, dtype=torch.int32)
    inputs = RouterInputs(torch.randn(3, 16), topk_weights=weights, topk_ids=ids)
    assert torch.equal(GivenTopKRouter()(inputs).topk_weights, weights.to(used))
