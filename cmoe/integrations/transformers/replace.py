"""`replace_moe`: a transformers model whose sparse blocks are MoERunners.

Every block is judged before the first one is changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from cmoe.config import MoEConfig
from cmoe.context import register_copy_for_moe_forward_op, static_context
from cmoe.errors import UnsupportedError
from cmoe.families import FAMILIES
from cmoe.gate import GateLinear
from cmoe.integrations.transformers.judge import HF_NAMES, Block, faults_of
from cmoe.integrations.transformers.take_over import take_over
from cmoe.layer import FusedMoE
from cmoe.runner import MoERunner

_USE_THE_SWITCH = (
    "cmoe.integrations.transformers.register() with "
    'model.set_experts_implementation("cmoe") runs every experts class of transformers'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaceReport:
    """What `replace_moe` did.

    replaced: path in the model of each new MoERunner. kept: path of each experts module that stayed
    as it was, outside of the table's blocks. num_bytes: size of the weights taken over.
    """

    replaced: tuple[str, ...]
    kept: tuple[str, ...]
    num_bytes: int


def replace_moe(model: nn.Module) -> ReplaceReport:
    """Puts a MoERunner in the place of every sparse block of a family in the table.

    model: a transformers model with its weights, on any device. The runners take over the storage
    of the experts' weights, the router's parameters, the shared experts: nothing is copied. Where a
    family alternates gate with up rows, these are put in order in place. Build optimisers and
    adapters after this call, which gives some parameters other objects and names.
    `output_router_logits` works as before, unless blocks are compiled one by one. `state_dict` goes
    with `load_state_dict` of a replaced model, while `save_pretrained` refuses.
    UnsupportedError, before any change, for a model without a block of the table, for blocks that
    are quantised, shared, hooked, on the meta device or otherwise not what their row says.
    """
    blocks = list(_blocks(model))
    paths = tuple(block.path for block in blocks)
    kept = tuple(
        name
        for name, module in model.named_modules()
        if hasattr(module, "_apply_gate") and name.rpartition(".")[0] not in paths
    )
    if not blocks:
        raise UnsupportedError(_nothing_to_replace(model, kept))
    _check(model, blocks)
    num_bytes = 0
    for block, runner in [(block, _empty_runner(block)) for block in blocks]:
        _take_weights(runner, block)
        num_bytes += sum(p.nbytes for p in runner.routed_experts.parameters())
        model.set_submodule(block.path, runner)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.save_pretrained = _refuse_to_save
    return ReplaceReport(replaced=paths, kept=kept, num_bytes=num_bytes)


def _blocks(model: nn.Module) -> Iterator[Block]:
    """The blocks of the table, each with the config of the innermost model around it."""
    configs = {
        path: module.config
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    rows = {(family.model_type, family.block): family for family in FAMILIES}
    for path, module in model.named_modules():
        around = max(
            (p for p in configs if f"{path}.".startswith(f"{p}." if p else "")), default=None
        )
        if around is None:
            continue
        family = rows.get((configs[around].model_type, type(module).__name__))
        if family is not None:
            yield Block(path, module, family, configs[around])


def _nothing_to_replace(model: nn.Module, experts: tuple[str, ...]) -> str:
    if not experts:
        return (
            f"{type(model).__name__} has no sparse block that replace_moe knows; pass a "
            "transformers model with mixture-of-experts layers, before its blocks are replaced"
        )
    known = ", ".join(family.model_type for family in FAMILIES)
    return (
        f"replace_moe has no row for the blocks of {type(model).__name__} "
        f"(experts at {experts[0]}); known families: {known}. {_USE_THE_SWITCH}"
    )


def _check(model: nn.Module, blocks: list[Block]) -> None:
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    shared = frozenset(parameter for parameter, number in places.items() if number > 1)
    judged = {block.path: faults_of(block, shared) for block in blocks}
    faults = [f"  {path} : {'; '.join(why)}" for path, why in judged.items() if why]
    if faults:
        raise UnsupportedError(
            "\n".join(
                [
                    "these blocks cannot be replaced (nothing was changed):",
                    *faults,
                    f"where that cannot be helped, {_USE_THE_SWITCH}",
                ]
            )
        )


def _empty_runner(block: Block) -> MoERunner:
    """A runner around the block's gate, its shared experts, with experts that have no memory."""
    family, module = block.family, block.module
    router = getattr(module, family.gate)
    shared = None if family.shared_experts is None else getattr(module, family.shared_experts)
    dtype = module.experts.down_proj.dtype
    with torch.device("meta"), static_context():
        gate = GateLinear.of(router.weight, router._parameters.get("bias"))
        runner = FusedMoE(
            replace(MoEConfig.from_hf(block.hf_config), params_dtype=dtype),
            block.path,
            gate=gate,
            shared_experts=shared,
        )
    gate.register_forward_hook(_record_router_logits)
    if family.returns_router_scores:
        runner.register_forward_hook(_with_scores)
    return runner.train(module.training)


@torch.no_grad()
def _take_weights(runner: MoERunner, block: Block) -> None:
    """Gives the runner the block's experts and its name in the model."""
    experts, router = block.module.experts, getattr(block.module, block.family.gate)
    device = experts.down_proj.device
    for name in runner.routed_experts._parameters:
        taken = take_over(block.family, name, getattr(experts, HF_NAMES[name]))
        setattr(runner.routed_experts, name, taken)
    if runner.config.router.e_score_correction_bias:
        bias = router.e_score_correction_bias.float()
        runner.router.register_buffer("e_score_correction_bias", bias)
    # What is on the meta device still is the runner's own bookkeeping.
    runner._apply(lambda t: torch.zeros_like(t, device=device) if t.is_meta else t)
    # Under another name where a model with the same paths is alive.
    register_copy_for_moe_forward_op(runner, block.path)


def _record_router_logits(gate: nn.Module, args: Any, logits: Tensor) -> None:
    """What transformers does at its own routers when `output_router_logits` is asked for.

    A block that is compiled by itself records nothing: only a graph of the whole model can ask.
    """
    if torch.compiler.is_compiling() and not _active_collector.compiling:
        return
    collected = _active_collector.get()
    if collected is not None and "router_logits" in collected:
        collected["router_logits"].append(logits)


def _with_scores(runner: nn.Module, args: Any, y: Tensor) -> tuple[Tensor, None]:
    """The pair that the decoder layers of some families take apart, without reading the scores."""
    return y, None


def _refuse_to_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise UnsupportedError(
        "save_pretrained after replace_moe would write names that transformers does not know; save "
        "model.state_dict() for a replaced model, or save before replacing"
    )
