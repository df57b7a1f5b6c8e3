"""The router that reads the experts from a table."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from cmoe import HashRouter, LoadError, RouterConfig, RouterInputs
from tests.layers import config_of, expert_tensors, layer_of

TABLE = torch.tensor([[0, 1], [4, 2], [3, 3], [2, 0]])


def router_of(table: torch.Tensor = TABLE, **router: Any) -> HashRouter:
    return HashRouter(config_of(router=RouterConfig(**router)), table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalize", [False, True])
def test_the_formula(renormalize: bool, dtype: torch.dtype) -> None:
    logits = torch.randn(6, 5).to(dtype)
    input_ids = torch.tensor([3, 0, 0, 2, 1, 3])
    router = router_of(
        renormalize=renormalize, renormalize_epsilon=0.125, routed_scaling_factor=1.5
    )
    routing = router(RouterInputs(torch.randn(6, 16), logits, input_ids=input_ids))
    for t, token in enumerate(input_ids.tolist()):
        chosen = TABLE[token].tolist()
        scores = [math.sqrt(math.log1p(math.exp(logits[t, e].item()))) for e in chosen]
        total = sum(scores) + 0.125 if renormalize else 1
        assert routing.topk_ids[t].tolist() == chosen
        expected = torch.tensor([1.5 * score / total for score in scores])
        torch.testing.assert_close(routing.topk_weights[t], expected)


@pytest.mark.parametrize("renormalize", [False, True])
def test_logits_that_are_not_finite(renormalize: bool) -> None:
    logits = torch.randn(4, 5)
    logits[0], logits[1], logits[2, 0] = torch.nan, -torch.inf, torch.inf
    logits.requires_grad_()
    inputs = RouterInputs(torch.randn(4, 16), logits, input_ids=torch.tensor([0, 1, 3, 2]))
    routing = router_of(renormalize=renormalize)(inputs)
    assert routing.topk_weights.isfinite().all()
    assert routing.topk_weights[:2].tolist() == [[0.0, 0.0]] * 2
    routing.topk_weights.sum().backward()
    assert logits.grad.isfinite().all()


def test_the_table_is_state_of_the_layer() -> None:
    router = router_of()
    assert router.hash_indices_table.dtype == torch.int32
    assert set(router.state_dict()) == {"hash_indices_table"}
    assert router.bfloat16().hash_indices_table.dtype == torch.int32
    assert torch.equal(copy.deepcopy(router).hash_indices_table.long(), TABLE)


def test_the_table_by_way_of_the_meta_device() -> None:
    router = router_of(torch.empty(4, 2, dtype=torch.int64, device="meta"))
    router.to_empty(device="cpu").load_state_dict(router_of().state_dict())
    assert torch.equal(router.hash_indices_table.long(), TABLE)


@pytest.mark.parametrize("name", ["gate.tid2eid", "router.hash_indices_table"])
def test_a_checkpoint_fills_the_table(name: str) -> None:
    layer = layer_of(router=router_of(torch.zeros_like(TABLE)))
    tensors = expert_tensors(layer.config)
    with pytest.raises(LoadError, match=r"^mlp: missing gate\.hash_indices_table$"):
        layer.load_weights(tensors)
    pointer = layer.router.hash_indices_table.data_ptr()
    layer.load_weights({**tensors, name: TABLE})
    assert torch.equal(layer.router.hash_indices_table.long(), TABLE)
    assert layer.router.hash_indices_table.data_ptr() == pointer


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (TABLE + 2, r"gate\.tid2eid: the hash table's ids must be in \[0, 5\); got 2 to 6"),
        (TABLE + (1 << 32), r"ids must be in \[0, 5\)"),
        (TABLE[:2], r"gate\.tid2eid: shape \(2, 2\) should be \(4, 2\)"),
        (TABLE.float(), r"gate\.tid2eid has dtype torch\.float32; its place has torch\.int32"),
    ],
)
def test_a_bad_table_in_a_checkpoint_is_not_written(table: torch.Tensor, message: str) -> None:
    layer = layer_of(router=router_of())
    with pytest.raises(LoadError, match=message):
        layer.load_weights({**expert_tensors(layer.config), "gate.tid2eid": table})
    assert torch.equal(layer.router.hash_indices_table.long(), TABLE)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (torch.zeros(4, 3).long(), r"ids \[vocabulary, 2\]; got torch.int64 \(4, 3\)"),
        (torch.zeros(8).long(), r"ids \[vocabulary, 2\]; got torch.int64 \(8,\)"),
        (torch.zeros(4, 2), r"ids \[vocabulary, 2\]; got torch.float32 \(4, 2\)"),
        (torch.tensor([[0, 5]]), r"ids must be in \[0, 5\); got 0 to 5"),
        (torch.tensor([[3, -1]]), r"ids must be in \[0, 5\); got -1 to 3"),
    ],
)
def test_a_bad_table(table: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router_of(table)


@pytest.mark.parametrize("bad", [-1, 4])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    inputs = RouterInputs(torch.randn(2, 16), torch.randn(2, 5), input_ids=torch.tensor([0, bad]))
    low, high = sorted((0, bad))
    with pytest.raises(ValueError, match=rf"input_ids must be in \[0, 4\); got {low} to {high}"):
        router_of()(inputs)
    compiled = torch.compile(router_of(), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"input_ids must be in \[0, 4\)"):
        compiled(inputs)
