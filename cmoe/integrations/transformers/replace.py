"""`replace_moe`: a transformers model whose sparse blocks are MoERunners.

Every block is judged before the first one is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from cmoe.config import MoEConfig
from cmoe.context import register_copy_for_moe_forward_op, static_context
from cmoe.errors import UnsupportedError
from cmoe.families import SWITCH_ONLY
from cmoe.gate import GateLinear
from cmoe.integrations.transformers.blocks import Block, find_blocks
from cmoe.integrations.transformers.judge import correction_bias, faults_of
from cmoe.integrations.transformers.shared_memory import sharers
from cmoe.integrations.transformers.state_names import TransformersNames
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

    replaced: path in the model of each new MoERunner. already: of each that stood there before.
    kept: path of each experts module that stayed as it was, outside of the table's blocks.
    num_bytes: size of the weights taken over.
    """

    replaced: tuple[str, ...]
    already: tuple[str, ...]
    kept: tuple[str, ...]
    num_bytes: int


def replace_moe(model: nn.Module) -> ReplaceReport:
    """Puts a MoERunner in the place of every sparse block of a family in the table.

    model: a transformers model with its weights, on any device. The runners take over the storage
    of the experts' weights, the router's parameters, the shared experts: nothing is copied. Where a
    family alternates gate with up rows, these are put in order in place. Build optimisers and
    adapters after this call, wrap the model for data-parallel training after it: parameters stay
    the same objects, under other names, some of another shape. `output_router_logits` works as
    before, unless blocks are compiled one by one. `state_dict`, `save_pretrained` speak as they did
    before the call, so what is saved is a checkpoint of transformers. Called again, it changes
    nothing.
    UnsupportedError, before any change, for a model without a block of the table, for one that is
    wrapped for data-parallel training, for blocks that are quantised, shared, hooked, changed after
    they were built, on the meta device or otherwise not what their row says.
    """
    _refuse_wrapped(model)
    blocks = list(find_blocks(model))
    paths = tuple(block.path for block in blocks)
    kept = tuple(
        name
        for name, module in model.named_modules()
        if hasattr(module, "_apply_gate") and name.rpartition(".")[0] not in paths
    )
    already = tuple(name for name, m in model.named_modules() if isinstance(m, MoERunner))
    if not blocks and not already:
        raise UnsupportedError(_nothing_to_replace(model, kept))
    _check(model, blocks)
    num_bytes = 0
    for block, runner in [(block, _empty_runner(block)) for block in blocks]:
        _take_weights(runner, block)
        num_bytes += sum(p.nbytes for p in runner.routed_experts.parameters())
        model.set_submodule(block.path, runner)
    return ReplaceReport(replaced=paths, already=already, kept=kept, num_bytes=num_bytes)


def _nothing_to_replace(model: nn.Module, experts: tuple[str, ...]) -> str:
    if not experts:
        return (
            f"{type(model).__name__} has no sparse block that replace_moe knows; pass a "
            "transformers model with mixture-of-experts layers"
        )
    types = {m.config.model_type for m in model.modules() if isinstance(m, PreTrainedModel)}
    reasons = [f"; {name}: {SWITCH_ONLY[name]}" for name in sorted(types) if name in SWITCH_ONLY]
    return (
        f"replace_moe has no row for the blocks of {type(model).__name__} "
        f"(experts at {experts[0]}){''.join(reasons)}. {_USE_THE_SWITCH}"
    )


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DataParallel | DistributedDataParallel):
            raise UnsupportedError(
                f"{name or 'the model'} is wrapped in {type(module).__name__}, which would go on "
                "with the parameters that it found; replace the blocks first, then wrap the model"
            )


def _check(model: nn.Module, blocks: list[Block]) -> None:
    shared = sharers(model)
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
    """A runner around the block's other modules, with experts that have no memory."""
    modules = block.family.modules
    router = block.part(modules.gate)
    config = replace(
        MoEConfig.from_hf(block.hf_config), params_dtype=block.module.experts.down_proj.dtype
    )
    with torch.device("meta"), static_context():
        gate = GateLinear.of(router.weight, router._parameters.get("bias"))
        runner = FusedMoE(
            config,
            block.path,
            gate=gate,
            shared_experts=block.part(modules.shared_experts),
            shared_expert_gate=block.part(modules.shared_expert_gate),
            input_transform=block.part(modules.input_transform),
            output_transform=block.part(modules.output_transform),
        )
    gate.register_forward_hook(_record_router_logits)
    if block.family.returns_router_scores:
        runner.register_forward_hook(_with_scores)
    return runner.train(block.module.training)


@torch.no_grad()
def _take_weights(runner: MoERunner, block: Block) -> None:
    """Gives the runner the block's experts, its correction bias, its name in the model."""
    family, experts = block.family, block.module.experts
    device = experts.down_proj.device
    places = {ours: theirs for theirs, ours in family.runner_names()}
    for name in runner.routed_experts.weights():
        theirs = places[f"routed_experts.{name}"].removeprefix("experts.")
        taken = take_over(family.layout, name, experts.get_parameter(theirs))
        setattr(runner.routed_experts, name, taken)
    names = TransformersNames(family=family)
    if (bias := correction_bias(block)) is not None:
        runner.router.register_buffer("e_score_correction_bias", bias.detach().float().flatten())
        names = replace(names, bias_shape=tuple(bias.shape), bias_dtype=bias.dtype)
    # What is on the meta device still is the runner's own bookkeeping.
    runner._apply(lambda t: torch.zeros_like(t, device=device) if t.is_meta else t)
    # Under another name where a model with the same paths is alive.
    register_copy_for_moe_forward_op(runner, block.path)
    names.attach(runner)


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
