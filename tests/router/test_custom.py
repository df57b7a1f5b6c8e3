"""The router that calls a function of the user's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cmoe import CustomRouter, RouterConfig, RouterInputs
from tests.layers import config_of


def llama4(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    values, ids = logits.topk(top_k, dim=-1)
    return values.sigmoid(), ids


def test_the_function_gets_what_vllms_gets() -> None:
    seen = []

    def function(*arguments: object) -> tuple[Tensor, Tensor]:
        seen.append(arguments)
        return torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64)

    x, logits = torch.randn(3, 16), torch.randn(3, 5)
    config = config_of(router=RouterConfig(renormalize=False))
    CustomRouter(config, function)(RouterInputs(x, logits))
    ((got_x, got_logits, top_k, renormalize),) = seen
    assert got_x is x
    assert got_logits is logits
    assert (top_k, renormalize) == (2, False)


def test_its_answer_is_scaled_in_float32() -> None:
    config = config_of(router=RouterConfig(routed_scaling_factor=3.0))
    logits = torch.randn(7, 5).bfloat16()
    routing = CustomRouter(config, llama4)(RouterInputs(torch.randn(7, 16), logits))
    weights, ids = llama4(None, logits, 2, True)
    assert torch.equal(routing.topk_weights, weights.float() * 3)
    assert torch.equal(routing.topk_ids, ids)


@pytest.mark.parametrize(
    ("weights", "ids"), [((3, 1), (3, 2)), ((3, 2), (2, 2)), ((6,), (6,)), ((3, 5), (3, 5))]
)
def test_an_answer_of_another_shape(weights: tuple, ids: tuple) -> None:
    router = CustomRouter(
        config_of(), lambda *_: (torch.ones(weights), torch.zeros(ids, dtype=torch.int32))
    )
    with pytest.raises(
        ValueError, match=r"must return weights, ids of shape \(3, 2\); got"
    ) as error:
        router(RouterInputs(torch.randn(3, 16), torch.randn(3, 5)))
    assert f"{weights}, {ids}" in str(error.value)
