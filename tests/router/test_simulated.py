"""The routers for benchmarks: how the load is spread."""

from __future__ import annotations

import math

import pytest
import torch

from cmoe import RouterInputs, Routing, SimulatedRouter
from tests.layers import config_of

NUM_EXPERTS, TOP_K, NUM_TOKENS = 16, 4, 20_000
# A count of n independent draws with chance p deviates by less than five standard deviations,
# sqrt(n p (1 - p)) each, but once in 1.7 million; choices of one token exclude each other, which
# only narrows it.
DEVIATIONS = 5


def routed(load: str, top_k: int = TOP_K, **options: float) -> Routing:
    config = config_of(num_experts=NUM_EXPERTS, top_k=top_k)
    router = SimulatedRouter(config, load, **options)
    return router(RouterInputs(torch.zeros(NUM_TOKENS, 16)))


def counts_of(routing: Routing) -> list[int]:
    return torch.bincount(routing.topk_ids.flatten(), minlength=NUM_EXPERTS).tolist()


def bound(chance: float) -> float:
    return DEVIATIONS * math.sqrt(NUM_TOKENS * chance * (1 - chance))


@pytest.mark.parametrize("load", ["uniform", "skewed"])
@pytest.mark.parametrize("top_k", [1, 4, NUM_EXPERTS])
def test_choices_of_a_token_are_distinct_with_equal_weights(load: str, top_k: int) -> None:
    weights, ids, _ = routed(load, top_k)
    assert ids.dtype == torch.int32
    assert ((ids >= 0) & (ids < NUM_EXPERTS)).all()
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    assert (weights == 1 / top_k).all()


def test_a_uniform_load() -> None:
    chance = TOP_K / NUM_EXPERTS
    for count in counts_of(routed("uniform")):
        assert abs(count - NUM_TOKENS * chance) < bound(chance)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_a_skewed_load_follows_its_law(exponent: float) -> None:
    # With one choice a token, expert e has exactly the chance of its Zipf weight.
    weights = [1 / (e + 1) ** exponent for e in range(NUM_EXPERTS)]
    counts = counts_of(routed("skewed", 1, exponent=exponent))
    for count, weight in zip(counts, weights, strict=True):
        chance = weight / sum(weights)
        assert abs(count - NUM_TOKENS * chance) < bound(chance)


def test_a_skewed_load_comes_in_order() -> None:
    counts = counts_of(routed("skewed"))
    assert counts[:8] == sorted(counts[:8], reverse=True)
    assert counts[0] > 3 * counts[-1]


def test_draws_are_fresh_but_seeded() -> None:
    router = SimulatedRouter(config_of(num_experts=NUM_EXPERTS, top_k=TOP_K))
    inputs = RouterInputs(torch.zeros(64, 16))
    torch.manual_seed(1)
    first, second = router(inputs).topk_ids, router(inputs).topk_ids
    torch.manual_seed(1)
    assert torch.equal(router(inputs).topk_ids, first)
    assert not torch.equal(first, second)


def test_it_has_no_state_to_lose() -> None:
    with torch.device("meta"):
        router = SimulatedRouter(config_of(num_experts=NUM_EXPERTS, top_k=TOP_K), "skewed")
    assert router.state_dict() == {}
    inputs = RouterInputs(torch.zeros(NUM_TOKENS, 16))
    counts = counts_of(router.to_empty(device="cpu").bfloat16()(inputs))
    assert counts[0] > 3 * counts[-1] > 0


def test_an_unknown_load() -> None:
    with pytest.raises(ValueError, match="unknown load 'normal'; choose uniform or skewed"):
        SimulatedRouter(config_of(), "normal")
