"""Whole models of the four families on cmoe, both ways, beside transformers' own eager run."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache

from tests.integrations.transformers.tiny_models import (
    LAYERS,
    MODELS,
    WAYS,
    blocks,
    hidden,
    on_cmoe,
    relative_error,
    tiny_model,
    token_ids,
)

both_ways = pytest.mark.parametrize("way", WAYS)
four_families = pytest.mark.parametrize("family", MODELS)


def pair(family: str, way: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(eager, on cmoe) with the same weights."""
    eager = tiny_model(family)
    return eager, on_cmoe(copy.deepcopy(eager), way)


def block_inputs(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """What each sparse block gets in a run of the model."""
    inputs: list[Tensor] = []
    hooks = [
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
        for block in blocks(model)
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return inputs


@both_ways
@four_families
@torch.no_grad()
def test_block_outputs_are_eagers(family: str, way: str) -> None:
    eager, model = pair(family, way)
    inputs = block_inputs(eager, token_ids(3, 7))
    for x, theirs, ours in zip(inputs, blocks(eager), blocks(model), strict=True):
        assert relative_error(hidden(ours(x)), hidden(theirs(x))) <= 1e-5
        assert type(ours(x)) is type(theirs(x))


@both_ways
@four_families
@torch.no_grad()
def test_logits_are_eagers(family: str, way: str) -> None:
    eager, model = pair(family, way)
    ids = token_ids()
    assert relative_error(model(ids).logits, eager(ids).logits) <= 1e-5


@both_ways
@four_families
@torch.no_grad()
def test_greedy_tokens_are_eagers(family: str, way: str) -> None:
    eager, model = pair(family, way)
    ids = token_ids(2, 4)
    arguments = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **arguments), eager.generate(ids, **arguments))


@both_ways
@four_families
@torch.no_grad()
def test_the_whole_model_compiles_to_one_graph(family: str, way: str, count_compiles) -> None:
    eager, model = pair(family, way)
    ids = token_ids()
    # Inductor takes seconds a model; it gets one family a way, the others stop before it.
    backend = "inductor" if (family, way) in INDUCTOR else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert relative_error(compiled(ids).logits, eager(ids).logits) <= 1e-5
    assert count_compiles() == 1


INDUCTOR = (("gpt_oss", "switch"), ("deepseek_v3", "replace"))


@both_ways
@four_families
@torch.no_grad()
def test_blocks_compile_to_one_graph(family: str, way: str, count_compiles) -> None:
    eager, model = pair(family, way)
    inputs = block_inputs(eager, token_ids(3, 7))
    for x, theirs, ours in zip(inputs, blocks(eager), blocks(model), strict=True):
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        assert relative_error(hidden(compiled(x)), hidden(theirs(x))) <= 1e-5
    assert len(inputs) == LAYERS
    assert count_compiles() == 1


@both_ways
@torch.no_grad()
def test_a_static_cache_decodes_compiled(way: str, count_compiles) -> None:
    eager, model = pair("qwen3_moe", way)
    ids = token_ids(1, 4)
    expected = eager.generate(
        ids, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = StaticCache(config=model.config, max_cache_len=16)
    tokens = ids
    last = model(ids, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
    for at in range(4, 10):
        tokens = torch.cat([tokens, last], 1)
        position = torch.tensor([[at]])
        output = step(last, cache=cache, use_cache=True, position_ids=position)
        last = output.logits[:, -1:].argmax(-1)
    assert torch.equal(tokens, expected)
    assert count_compiles() == 1


@both_ways
@four_families
def test_bfloat16_is_as_exact_as_eager(family: str, way: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    eager = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    oracle, model = copy.deepcopy(eager).double(), on_cmoe(copy.deepcopy(eager), way)
    inputs = block_inputs(eager, token_ids(4, 16))
    for x, exact, theirs, ours in zip(
        inputs, blocks(oracle), blocks(eager), blocks(model), strict=True
    ):
        with torch.no_grad():
            expected = hidden(exact(x.double()))
            their_error = (hidden(theirs(x)).double() - expected).norm()
            our_error = (hidden(ours(x)).double() - expected).norm()
        assert hidden(ours(x)).dtype == torch.bfloat16
        assert our_error <= 2 * their_error


@both_ways
@four_families
@torch.no_grad()
def test_autocast_is_as_exact_as_eager(family: str, way: str) -> None:
    eager, model = pair(family, way)
    ids = token_ids()
    exact = eager(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = eager(ids).logits, model(ids).logits
    assert ours.dtype == theirs.dtype
    assert (ours - exact).norm() <= 2 * (theirs - exact).norm()


def gradients(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embedded, labels=ids).loss
    loss.backward()
    of_parameters = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return embedded.grad, of_parameters


OUR_NAMES = {
    "experts.gate_up_proj": "routed_experts.w13_weight",
    "experts.down_proj": "routed_experts.w2_weight",
    "experts.gate_up_proj_bias": "routed_experts.w13_bias",
    "experts.down_proj_bias": "routed_experts.w2_bias",
    "router.weight": "gate.weight",
    "router.bias": "gate.bias",
}


def in_their_layout(name: str, grad: Tensor) -> Tensor:
    """gpt-oss: [E, 2I, H] gate rows, up rows -> [E, H, 2I] alternating."""
    if "w13" in name:
        grad = grad.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return grad.transpose(1, 2) if name.endswith("_weight") else grad


def gradient_of(name: str, family: str, way: str, ours: dict[str, Tensor]) -> Tensor:
    """The gradient of the parameter that transformers calls `name`, in its layout."""
    if way == "switch" or ".mlp." not in name:
        return ours[name]
    block, _, inner = name.partition(".mlp.")
    if inner.startswith("shared_experts."):
        inner = inner.replace("shared_experts.", "shared_experts.mlp.")
    inner = OUR_NAMES.get(inner, inner)
    grad = ours[f"{block}.mlp.{inner}"]
    is_gpt_oss_expert = family == "gpt_oss" and inner.startswith("routed_experts")
    return in_their_layout(inner, grad) if is_gpt_oss_expert else grad


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@both_ways
@four_families
def test_gradients_are_eagers(family: str, way: str, checkpointing: bool) -> None:
    eager, model = pair(family, way)
    for each in (eager, model):
        each.train()
        each.requires_grad_(True)
    if checkpointing:
        model.activation_checkpointing_enable()
    ids = token_ids()
    of_input, theirs = gradients(eager, ids)
    our_of_input, ours = gradients(model, ids)
    assert relative_error(our_of_input, of_input) <= 1e-5
    assert any("experts" in name for name in theirs)
    for name, expected in theirs.items():
        assert relative_error(gradient_of(name, family, way, ours), expected) <= 1e-5, name


@both_ways
def test_frozen_experts_cost_no_gradient(way: str) -> None:
    _, model = pair("qwen3_moe", way)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    _, ours = gradients(model, token_ids())
    assert not any("experts" in name for name in ours)
    assert any(".gate." in name for name in ours)


@four_families
@torch.no_grad()
def test_from_pretrained_takes_the_switch(family: str, tmp_path: Path) -> None:
    eager = tiny_model(family)
    eager.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="cmoe")
    assert loaded.get_experts_implementation()[""] == "cmoe"
    ids = token_ids()
    assert relative_error(loaded(ids).logits, eager(ids).logits) <= 1e-5


@torch.no_grad()
def test_the_switch_goes_back_and_forth() -> None:
    model, ids = tiny_model("gpt_oss"), token_ids()
    before = model(ids).logits
    model.set_experts_implementation("cmoe")
    on_cmoe_logits = model(ids).logits
    model.set_experts_implementation("eager")
    assert torch.equal(model(ids).logits, before)
    assert relative_error(on_cmoe_logits, before) <= 1e-5


@both_ways
@four_families
def test_router_logits_with_their_loss_are_eagers(family: str, way: str) -> None:
    eager, model = pair(family, way)
    ids = token_ids()
    expected = eager(ids, labels=ids, output_router_logits=True)
    output = model(ids, labels=ids, output_router_logits=True)
    assert len(output.router_logits) == LAYERS
    for ours, theirs in zip(output.router_logits, expected.router_logits, strict=True):
        assert relative_error(ours, theirs) <= 1e-5
    torch.testing.assert_close(output.loss, expected.loss)
