"""The routing of every row of the table, beside transformers' own router.

Both blocks get the same logits, by a gate that hands on the first E of the hidden states; what they
give to their experts is compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cmoe.families import SWITCH_ONLY
from cmoe.integrations.transformers import replace_moe
from cmoe.integrations.transformers.blocks import Block, find_blocks
from cmoe.integrations.transformers.judge import correction_bias
from tests.integrations.transformers.architectures import ARCHITECTURES, E, K, model_class, tiny

ROWS = tuple(
    name for name in ARCHITECTURES if model_class(name).config_class.model_type not in SWITCH_ONLY
)
rows = pytest.mark.parametrize("architecture", ROWS)

GROUPS = 3
T = 32
TOP_KS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")

# What a block multiplies into its experts' sum, which a runner has in its weights.
AFTER_THE_EXPERTS: Mapping[str, float] = {"openai_privacy_filter": K}


# Transformers divides by the sum of the weights, but by no less than config.moe_norm_min = 1e-12;
# the softmax of experts that a bias alone has chosen may be less than that.
BELOW_THE_LEAST_SUM = (("ernie4_5_moe", "far apart"),)


# Transformers rounds the scores to bfloat16 before it adds the bias.
CHOOSES_IN_BFLOAT16 = ("lfm2_moe",)


def permuted() -> Tensor:
    """No two logits of a token are near one another, in bfloat16 neither."""
    return torch.rand(T, E).argsort(dim=-1) * 0.75 - 2.0


def of_one_group() -> Tensor:
    logits = permuted() - 10
    logits[:, 2 * E // GROUPS :] += 20
    return logits


LOGITS: Mapping[str, Callable[[], Tensor]] = {
    "random": lambda: torch.randn(T, E) * 2,
    "negative": lambda: permuted() - 20,
    "one group": of_one_group,
    "far apart": lambda: permuted() * 20,
}
TIES: Mapping[str, Callable[[], Tensor]] = {
    "all equal": lambda: torch.full((T, E), -1.5),
    "groups equal": lambda: torch.randn(T, E // GROUPS).repeat(1, GROUPS),
}


@torch.no_grad()
def pair(architecture: str, **others: Any) -> tuple[Block, Any]:
    """A block of transformers, the runner that stands for it, with such a gate."""
    model = tiny(architecture, **others)
    block = next(find_blocks(model))
    gate = block.part(block.family.modules.gate)
    gate.weight.zero_()
    gate.weight[:, :E] = torch.eye(E)
    if gate._parameters.get("bias") is not None:
        gate.bias.zero_()
    replaced = copy.deepcopy(model)
    replace_moe(replaced)
    return block, replaced.get_submodule(block.path)


@torch.no_grad()
def routed(block: Any, experts: Any, logits: Tensor, width: int) -> tuple[Any, ...]:
    """What the block gives to its experts for tokens with such logits."""
    given: list[tuple[Any, ...]] = []
    hook = experts.register_forward_pre_hook(lambda _, args: given.append(args))
    x = torch.zeros(1, logits.shape[0], width, dtype=logits.dtype)
    x[0, :, :E] = logits
    block(x)
    hook.remove()
    return given[0][1:]


def both(
    architecture: str, block: Block, runner: Any, logits: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(weights, ids) of transformers, of cmoe, [T, K]; each row sorted by weight."""
    width = block.hf_config.hidden_size
    ids, weights = routed(block.module, block.module.experts, logits, width)
    weights = weights.float() * AFTER_THE_EXPERTS.get(architecture, 1)
    (routing,) = routed(runner, runner.routed_experts, logits, width)
    return _sorted(weights, ids), _sorted(routing.topk_weights, routing.topk_ids)


def _sorted(weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    by_id = ids.long().argsort(dim=-1)
    weights, ids = weights.gather(-1, by_id), ids.long().gather(-1, by_id)
    order = weights.argsort(dim=-1, descending=True, stable=True)
    return weights.gather(-1, order), ids.gather(-1, order)


def spread_bias(block: Block, runner: Any, mean: float) -> None:
    """A correction bias that changes the choice, where the family has one."""
    bias = correction_bias(block)
    if bias is not None:
        # The same in bfloat16, which a model that is cast as a whole gives it in transformers.
        bias.data.copy_((mean + torch.randn(bias.shape)).bfloat16())
        runner.router.e_score_correction_bias.copy_(bias.flatten())


@rows
def test_routing_is_transformers(architecture: str) -> None:
    block, runner = pair(architecture)
    for name, logits in LOGITS.items():
        if (architecture, name) in BELOW_THE_LEAST_SUM:
            continue
        for mean in (0.0, -4.0):  # with -4 every choice is negative
            spread_bias(block, runner, mean)
            theirs, ours = both(architecture, block, runner, logits())
            check(ours, theirs, f"{name}, bias around {mean}")


@rows
def test_ties_have_the_weights_of_transformers(architecture: str) -> None:
    """Which of equals is chosen is left open there; here it is the first."""
    block, runner = pair(architecture)
    if (bias := correction_bias(block)) is not None:
        bias.data.zero_()
        runner.router.e_score_correction_bias.zero_()
    for name, logits in TIES.items():
        theirs, ours = both(architecture, block, runner, logits())
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=0)
        if name == "all equal":
            assert torch.equal(ours[1], torch.arange(ours[1].shape[1]).expand_as(ours[1]))


def check(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], case: str) -> None:
    # Softmax and sigmoid of float32 differ by a few roundings from one library to another.
    torch.testing.assert_close(
        ours[0], theirs[0], rtol=1e-5, atol=1e-30, msg=lambda message: f"{case}: {message}"
    )
    # Weights that have underflowed to zero name no expert.
    assert torch.equal(ours[1][ours[0] > 0], theirs[1][theirs[0] > 0]), case


@rows
def test_one_expert_a_token(architecture: str) -> None:
    known = model_class(architecture).config_class().to_dict()
    block, runner = pair(architecture, **{name: 1 for name in TOP_KS if name in known})
    assert runner.config.top_k == 1
    spread_bias(block, runner, 0.0)
    theirs, ours = both("", block, runner, LOGITS["random"]())
    check(ours, theirs, "top_k = 1")


@rows
def test_bfloat16_logits(architecture: str) -> None:
    """transformers rounds the weights to bfloat16, some families the logits too; cmoe does not."""
    block, runner = pair(architecture)
    spread_bias(block, runner, 0.0)
    if architecture in CHOOSES_IN_BFLOAT16:  # By the bias alone, which no rounding reorders.
        apart = 2.0 * torch.randperm(E)
        correction_bias(block).copy_(apart)
        runner.router.e_score_correction_bias.copy_(apart)
    block.module.bfloat16()
    runner.bfloat16()
    theirs, ours = both(architecture, block, runner, permuted().bfloat16())
    # Two roundings of 2^-9, on a softmax of three logits each.
    torch.testing.assert_close(ours[0], theirs[0], rtol=2**-6, atol=0)
    assert torch.equal(ours[1], theirs[1])
