"""The front door: each router end to end, what the factory refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmoe
from tests.layers import (
    HIDDEN,
    NUM_EXPERTS,
    assert_exact,
    assert_follows,
    block,
    config_of,
    layer_of,
    logits_of,
    x_of,
)
from tests.oracle import assert_within_budget, naive_route

COMPILED = pytest.mark.parametrize("compiled", [False, True])


def run(layer: cmoe.MoERunner, compiled: bool, *arguments: Any, **named: Any) -> Tensor:
    call = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    return call(*arguments, **named)


def test_the_ten_lines_of_the_readme() -> None:
    config = cmoe.MoEConfig(num_experts=8, top_k=2, hidden_size=64, intermediate_size=32)
    layer = cmoe.FusedMoE(config, prefix="model.layers.0.mlp")
    assert type(layer) is cmoe.MoERunner
    assert layer.layer_name == "model.layers.0.mlp"
    assert isinstance(layer.router, cmoe.TopKRouter)
    x, logits = x_of(7, width=64), logits_of(7, width=8)
    y = run(layer, True, x, logits)
    assert_exact(layer, y, x, logits)


ROUTERS = {
    "softmax": {},
    "without renormalisation": {"renormalize": False},
    "softmax after top-k": {"softmax_after_topk": True, "renormalize": False},
    "sigmoid": {"scoring_func": "sigmoid"},
    "sqrt-softplus": {"scoring_func": "sqrtsoftplus"},
    "bias": {"scoring_func": "sigmoid", "e_score_correction_bias": True},
    "groups": {"use_grouped_topk": True, "num_expert_group": 3, "topk_group": 2},
    "groups with bias": {
        "scoring_func": "sigmoid",
        "use_grouped_topk": True,
        "num_expert_group": 3,
        "topk_group": 2,
        "e_score_correction_bias": True,
        "routed_scaling_factor": 2.5,
    },
}


@COMPILED
@pytest.mark.parametrize("router", ROUTERS)
def test_top_k_routers(router: str, compiled: bool) -> None:
    config = config_of(num_experts=6, router=cmoe.RouterConfig(**ROUTERS[router]))
    layer = layer_of(config)
    x, logits = x_of(7), logits_of(7, width=6)
    assert_exact(layer, run(layer, compiled, x, logits), x, logits)


@COMPILED
def test_a_gate_of_its_own(compiled: bool) -> None:
    gate = cmoe.GateLinear(HIDDEN, NUM_EXPERTS).requires_grad_(False)
    layer = layer_of(gate=gate)
    x = x_of(7)
    assert_exact(layer, run(layer, compiled, x), x, gate(x))


@COMPILED
@pytest.mark.parametrize("scaled_on_output", [False, True])
def test_zero_experts(scaled_on_output: bool, compiled: bool) -> None:
    """A choice of a column past the experts gives the token back."""
    router = cmoe.RouterConfig(
        renormalize=False,
        routed_scaling_factor=3.0,
        apply_routed_scale_to_output=scaled_on_output,
    )
    config = config_of(router=router, quant=cmoe.QuantConfig(size_multiple=12))
    layer = layer_of(config, router=cmoe.ZeroExpertRouter(config, 3), shared_experts=nn.Identity())
    x, logits = x_of(7), logits_of(7, width=NUM_EXPERTS + 3)
    logits[0, 5:] += 20  # only zero experts
    logits[1, :5] += 20  # none of them
    weights, ids = naive_route(logits, 2)
    zero = ids >= NUM_EXPERTS
    assert zero[0].all()
    assert not zero[1].any()
    y = run(layer, compiled, x, logits)
    identity = 3.0 * torch.where(zero, weights, 0).sum(-1, keepdim=True) * x
    real = torch.where(zero, 0, weights) * (1.0 if scaled_on_output else 3.0)
    routing = real, torch.where(zero, -1, ids)
    exact = block(layer, x, *routing) + identity
    assert_within_budget(y, exact, block(layer, x, *routing, torch.float32) + identity.float())


@COMPILED
def test_hash_routing(compiled: bool) -> None:
    router = cmoe.RouterConfig(routed_scaling_factor=1.5)
    config = config_of(router=router)
    table = torch.stack([torch.randperm(NUM_EXPERTS)[:2] for _ in range(11)])
    layer = layer_of(config, router=cmoe.HashRouter(config, table))
    x, logits, tokens = x_of(2, 4), logits_of(2, 4), torch.randint(11, (2, 4))
    y = run(layer, compiled, x, logits, input_ids=tokens)
    ids = table[tokens.view(-1)]
    chosen = logits.view(-1, NUM_EXPERTS).double().gather(1, ids)
    scores = (1 + chosen.exp()).log().sqrt()
    weights = 1.5 * scores / scores.sum(-1, keepdim=True)
    assert_follows(layer, y.view(-1, HIDDEN), x.view(-1, HIDDEN), weights, ids)
    with pytest.raises(ValueError, match="HashRouter needs input_ids"):
        layer(x, logits)
    with pytest.raises(ValueError, match=r"input_ids has dtype torch\.float32"):
        layer(x, logits, input_ids=tokens.float())
    with pytest.raises(ValueError, match=r"input_ids \(8,\) must have the leading dimensions"):
        layer(x, logits, input_ids=tokens.view(-1))


@COMPILED
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_given_routing(top_k: int, dtype: torch.dtype, compiled: bool) -> None:
    """Ids of -1 contribute nothing, and K may differ from the config's."""
    layer = layer_of(router=cmoe.GivenTopKRouter())
    x, weights = x_of(7), torch.rand(7, top_k)
    ids = torch.rand(7, NUM_EXPERTS).topk(top_k).indices
    ids[::2, 0] = -1
    ids[3] = -1
    y = run(layer, compiled, x, topk_weights=weights, topk_ids=ids.to(dtype))
    assert_follows(layer, y, x, weights, ids)
    assert not y[3].any()


@COMPILED
def test_a_custom_router(compiled: bool) -> None:
    """Llama 4's: the best expert, weighed by the sigmoid of its logit on the input."""

    def function(
        hidden_states: Tensor, router_logits: Tensor, top_k: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        best, ids = router_logits.topk(top_k)
        return best.sigmoid(), ids

    config = config_of(top_k=1, router=cmoe.RouterConfig(apply_router_weight_on_input=True))
    layer = layer_of(config, router=cmoe.CustomRouter(config, function))
    x, logits = x_of(7), logits_of(7)
    y = run(layer, compiled, x, logits)
    best, ids = logits.double().max(-1, keepdim=True)
    assert_follows(layer, y, x, best.sigmoid(), ids)


@COMPILED
def test_a_simulated_load(compiled: bool) -> None:
    config = config_of(has_bias=True)
    layer = layer_of(config, router=cmoe.SimulatedRouter(config, "skewed"))
    with torch.no_grad():
        layer.routed_experts.w2_weight.zero_()
        layer.routed_experts.w2_bias.copy_(2.0 ** torch.arange(5)[:, None].expand(5, HIDDEN))
    y = run(layer, compiled, x_of(40))
    # Half the sum of two different powers of two: which experts were taken can be read off.
    pairs = {(2**i + 2**j) / 2 for i in range(5) for j in range(i)}
    assert set(y[:, 0].tolist()) <= pairs
    assert len(set(y[:, 0].tolist())) > 1
    with pytest.raises(ValueError, match="SimulatedRouter does not take router_logits"):
        layer(x_of(3), logits_of(3))


def test_a_shared_experts_object_is_taken_as_it_is() -> None:
    shared = cmoe.SharedExperts(nn.Identity(), nn.Linear(HIDDEN, 1))
    assert layer_of(shared_experts=shared).shared_experts is shared


def test_a_gate_beside_a_shared_experts_object_is_an_error() -> None:
    shared = cmoe.SharedExperts(nn.Identity())
    with pytest.raises(ValueError, match="shared_expert_gate belongs into the SharedExperts"):
        layer_of(shared_experts=shared, shared_expert_gate=nn.Linear(HIDDEN, 1))


def test_a_gate_for_no_shared_experts_is_an_error() -> None:
    with pytest.raises(ValueError, match="shared_expert_gate needs shared_experts"):
        layer_of(shared_expert_gate=nn.Linear(HIDDEN, 1))


@pytest.mark.parametrize(
    ("parallel", "got"),
    [
        ({"tp_size": 2}, "tp_size=2"),
        ({"ep_size": 2, "ep_rank": 1, "sp_size": 3}, "ep_size=2, sp_size=3"),
        ({"num_redundant_experts": 3}, "num_redundant_experts=3"),
    ],
)
def test_layers_on_more_than_one_rank_are_refused(parallel: dict[str, int], got: str) -> None:
    config = config_of(parallel=cmoe.ParallelConfig(**parallel))
    with pytest.raises(cmoe.UnsupportedError, match=f"run on one rank so far; got {got}$"):
        cmoe.FusedMoE(config, "mlp")


def test_a_refused_layer_leaves_its_name_free() -> None:
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        cmoe.FusedMoE(config_of(backend="fast"), "mlp")
    layer = cmoe.FusedMoE(config_of(), "mlp")
    assert cmoe.get_layer_from_name("mlp") is layer


def test_fresh_layers_give_small_finite_outputs() -> None:
    """As transformers initialises: normal with deviation 0.02."""
    layer = cmoe.FusedMoE(config_of(num_experts=64, hidden_size=64), "mlp")
    deviation = layer.routed_experts.w13_weight.std().item()
    assert math.isclose(deviation, 0.02, rel_tol=0.05)
    assert layer(x_of(7, width=64), logits_of(7, width=64)).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": None}, "config must be a MoEConfig, got None"),
        ({"prefix": ""}, "prefix must be the block's name, such as 'mlp'; got ''"),
        ({"prefix": 3}, "got 3"),
        ({"router": cmoe.TopKRouter}, "router must be an instance of a FusedMoERouter"),
        ({"router": lambda x, logits, top_k, renormalize: None}, r"CustomRouter\(config, function"),
        ({"gate": "x"}, "gate must be a module, got 'x'"),
        ({"gate": nn.Linear}, "gate must be a module"),
        ({"shared_experts": torch.relu}, "shared_experts must be a module"),
        ({"output_transform": torch.relu}, "output_transform must be a module"),
    ],
)
def test_arguments_of_the_wrong_kind(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cmoe.FusedMoE(**{"config": config_of(), "prefix": "mlp", **changes})
    layer_of(prefix="mlp")  # The name was not taken.
