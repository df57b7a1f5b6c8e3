"""The contract that every router keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cmoe import (
    CustomRouter,
    FusedMoERouter,
    GivenTopKRouter,
    HashRouter,
    RouterConfig,
    RouterInputs,
    SimulatedRouter,
    TopKRouter,
    ZeroExpertRouter,
)
from tests.layers import config_of

TABLE = torch.arange(22).view(11, 2) % 5
CONFIG = config_of()


def first_two(x: Tensor, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    ids = torch.arange(top_k, dtype=torch.int32).expand(x.shape[0], top_k)
    return logits[:, :top_k].sigmoid(), ids


ROUTERS: dict[str, Callable[[], FusedMoERouter]] = {
    "topk": lambda: TopKRouter(CONFIG),
    "custom": lambda: CustomRouter(CONFIG, first_two),
    "given": GivenTopKRouter,
    "hash": lambda: HashRouter(CONFIG, TABLE),
    "simulated": lambda: SimulatedRouter(CONFIG),
    "zero_expert": lambda: ZeroExpertRouter(CONFIG, 3),
}
NEEDS = {
    "topk": ({"router_logits"}, 5),
    "custom": ({"router_logits"}, 5),
    "given": ({"topk_weights", "topk_ids"}, None),
    "hash": ({"router_logits", "input_ids"}, 5),
    "simulated": (set(), None),
    "zero_expert": ({"router_logits"}, 8),
}
EVERY = pytest.mark.parametrize("name", ROUTERS)


def inputs_of(name: str, num_tokens: int, dtype: torch.dtype = torch.float32) -> RouterInputs:
    """No more than the router says it needs."""
    every = RouterInputs(
        hidden_states=torch.randn(num_tokens, 16),
        router_logits=torch.randn(num_tokens, NEEDS[name][1] or 5).to(dtype),
        topk_weights=torch.rand(num_tokens, 2).to(dtype),
        topk_ids=torch.randint(0, 5, (num_tokens, 2)),
        input_ids=torch.randint(0, 11, (num_tokens,)),
    )
    needed = NEEDS[name][0] | {"hidden_states"}
    return every._replace(**dict.fromkeys(set(RouterInputs._fields) - needed))


@EVERY
def test_what_it_reads(name: str) -> None:
    router = ROUTERS[name]()
    assert (set(router.requires), router.num_logits) == NEEDS[name]


@EVERY
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_with_dtypes(name: str, num_tokens: int, dtype: torch.dtype) -> None:
    routing = ROUTERS[name]()(inputs_of(name, num_tokens, dtype))
    assert routing.topk_weights.shape == routing.topk_ids.shape == (num_tokens, 2)
    assert routing.topk_weights.dtype == torch.float32
    assert routing.topk_ids.dtype in (torch.int32, torch.int64)
    assert ((routing.topk_ids >= -1) & (routing.topk_ids < 5)).all()
    if name == "zero_expert":
        assert routing.identity_weights.shape == (num_tokens,)
        assert routing.identity_weights.dtype == torch.float32
    else:
        assert routing.identity_weights is None


@EVERY
def test_inputs_stay_as_they_are(name: str) -> None:
    inputs = inputs_of(name, 7)
    before = [None if tensor is None else tensor.clone() for tensor in inputs]
    ROUTERS[name]()(inputs)
    for tensor, former in zip(inputs, before, strict=True):
        assert tensor is former is None or torch.equal(tensor, former)


@EVERY
def test_the_default_dtype_does_not_matter(name: str) -> None:
    inputs = inputs_of(name, 7)
    torch.manual_seed(3)
    expected = ROUTERS[name]()(inputs)
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(3)
    routing = ROUTERS[name]()(inputs)
    assert routing.topk_weights.dtype == torch.float32
    assert torch.equal(routing.topk_weights, expected.topk_weights)
    assert torch.equal(routing.topk_ids, expected.topk_ids)


@EVERY
def test_compiled(name: str) -> None:
    router = ROUTERS[name]()
    compiled = torch.compile(router, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (3, 17):
        inputs = inputs_of(name, num_tokens)
        torch.manual_seed(3)
        expected = router(inputs)
        torch.manual_seed(3)
        routing = compiled(inputs)
        assert torch.equal(routing.topk_weights, expected.topk_weights)
        assert torch.equal(routing.topk_ids, expected.topk_ids)


@pytest.mark.parametrize("name", ["topk", "hash", "zero_expert", "custom"])
def test_the_scaling_is_on_the_weights_or_left_to_the_output(name: str) -> None:
    def weights(**router: object) -> Tensor:
        config = config_of(router=RouterConfig(**router))
        made = {
            "topk": lambda: TopKRouter(config),
            "hash": lambda: HashRouter(config, TABLE),
            "zero_expert": lambda: ZeroExpertRouter(config, 3),
            "custom": lambda: CustomRouter(config, first_two),
        }[name]()
        return made(inputs).topk_weights

    inputs = inputs_of(name, 7)
    plain = weights()
    torch.testing.assert_close(weights(routed_scaling_factor=2.5), plain * 2.5)
    left = weights(routed_scaling_factor=2.5, apply_routed_scale_to_output=True)
    assert torch.equal(left, plain)


@pytest.mark.parametrize("name", ["topk", "zero_expert"])
def test_the_correction_bias(name: str) -> None:
    config = config_of(router=RouterConfig(e_score_correction_bias=True))
    router = TopKRouter(config) if name == "topk" else ZeroExpertRouter(config, 3)
    assert router.correction_bias().shape == (router.num_logits,)
    assert router.correction_bias().dtype == torch.float32


@EVERY
def test_most_have_no_correction_bias(name: str) -> None:
    assert ROUTERS[name]().correction_bias() is None


def test_the_contract_is_abstract() -> None:
    with pytest.raises(TypeError, match="abstract"):
        FusedMoERouter()
