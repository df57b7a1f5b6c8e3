"""Whether a block of a transformers model is what its family's row says, or why not.

E experts, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn

from cmoe.config import MoEConfig
from cmoe.integrations.transformers.blocks import Block

_PLAIN = (bool, int, float, str, list, tuple, type(None), FunctionType, BuiltinFunctionType)
_OF_TRANSFORMERS = "transformers.utils.output_capturing"


def faults_of(block: Block, sharers: Mapping[str, str]) -> tuple[str, ...]:
    """Why the block cannot be taken over; empty when it can.

    sharers: names of the model's parameters that share memory, each with one that it shares it
    with.
    """
    missing = [name for name in ("experts", block.family.modules.gate) if block.part(name) is None]
    if missing:
        return (f"has no module {', '.join(missing)}",)
    try:
        MoEConfig.from_hf(block.hf_config)
    except ValueError as error:
        return (str(error),)
    built = block._replace(module=block.as_built())
    return (
        *block.family.departures(vars(block.hf_config)),
        *_faults_of_calls(block),
        *_faults_of_attributes(block, built),
        *_faults_of_experts(block, built, sharers),
        *_faults_of_gate(block, built),
    )


def _faults_of_calls(block: Block) -> Iterator[str]:
    """What changes a call from outside, and would be lost with the block."""
    parts = {"the block": block.module, "its experts module": block.part("experts")}
    for name, module in {**parts, "its gate": block.part(block.family.modules.gate)}.items():
        if "forward" in module.__dict__:
            yield f"{name} has a forward of its own (expert parallelism, offloading, a kernel hub)"
        forward = [h for h in module._forward_hooks.values() if h.__module__ != _OF_TRANSFORMERS]
        if forward or module._forward_pre_hooks or module._backward_hooks:
            yield f"{name} has hooks; remove them before, add them to the new block after"
        if "parametrizations" in module._modules:
            yield f"{name} has parametrizations (an adapter); merge them first"


def _faults_of_attributes(block: Block, built: Block) -> Iterator[str]:
    """What was changed on the modules that a replaced block does without."""
    for name, expected in _computing_modules(built):
        module = block.part(name) if name else block.module
        if type(module) is not type(expected):
            yield f"{name} is a {type(module).__name__}, by the config a {type(expected).__name__}"
            continue
        values, actual = _plain(expected), _plain(module)
        for key, value in values.items():
            if actual.get(key) != value:
                where = f"{name}.{key}" if name else key
                yield f"{where} is {actual.get(key)}, by the config {value}"
        own = sorted(key for key in actual if key not in values and callable(actual[key]))
        if own and own != ["forward"]:
            yield f"{name or 'the block'} has functions of its own: {', '.join(own)}"


def _computing_modules(block: Block) -> Iterator[tuple[str, nn.Module]]:
    """The block with the modules of its router, of its experts, by name."""
    yield "", block.module
    for top in ("experts", block.family.modules.gate.partition(".")[0]):
        yield from block.part(top).named_modules(prefix=top)


def _plain(module: nn.Module) -> dict[str, Any]:
    """The module's attributes that are neither modules nor tensors nor torch's own."""
    return {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, _PLAIN)
        and key != "training"
        and (not key.startswith("_") or key in ("_is_expert_parallel", "_apply_gate"))
    }


def _faults_of_experts(block: Block, built: Block, sharers: Mapping[str, str]) -> Iterator[str]:
    present = _tensors(block.part("experts"))
    shapes = {name: tuple(t.shape) for name, t in _tensors(built.part("experts")).items()}
    if set(present) != set(shapes):
        yield (
            f"its experts have the tensors {', '.join(sorted(present)) or 'none'}, "
            f"not {', '.join(shapes)} (quantised?)"
        )
        return
    for name, tensor in present.items():
        if type(tensor) is not nn.Parameter or not _is_plain_float(tensor):
            yield f"{name} is a {type(tensor).__name__} of {tensor.dtype}, no plain float parameter"
        elif tuple(tensor.shape) != shapes[name]:
            yield f"{name} is {tuple(tensor.shape)}, by the config {shapes[name]}"
        if tensor.is_meta:
            yield f"{name} is on the meta device: load the weights first"
        full = f"{block.path}.experts.{name}".removeprefix(".")
        if full in sharers:
            yield f"{name} shares its memory with {sharers[full]}"
        if tensor.grad is not None:
            yield f"{name} has a gradient: set it to None first"
    for what, values in (
        ("dtypes", {str(t.dtype).removeprefix("torch.") for t in present.values()}),
        ("devices", {str(t.device) for t in present.values()}),
    ):
        if len(values) > 1:
            yield f"its experts' weights have several {what}: {', '.join(sorted(values))}"


def _faults_of_gate(block: Block, built: Block) -> Iterator[str]:
    modules = block.family.modules
    weight = _tensors(block.part(modules.gate)).get("weight")
    shape = tuple(_tensors(built.part(modules.gate))["weight"].shape)
    if type(weight) is not nn.Parameter or not _is_plain_float(weight):
        yield f"{modules.gate}.weight is no plain float parameter"
    elif tuple(weight.shape) != shape:
        yield f"{modules.gate}.weight is {tuple(weight.shape)}, by the config {shape}"
    if correction_bias(built) is not None:
        bias = correction_bias(block)
        if bias is None or bias.is_meta:
            yield f"{modules.correction_bias} is missing or on the meta device"


def correction_bias(block: Block) -> Tensor | None:
    """The block's bias in the choice of experts, as it lies there."""
    owner, _, name = (block.family.modules.correction_bias or "").rpartition(".")
    module = block.part(owner) if owner else block.module
    return None if module is None else _tensors(module).get(name)


def _tensors(module: Any) -> dict[str, Tensor]:
    every = [*module._parameters.items(), *module._buffers.items()]
    return {name: tensor for name, tensor in every if tensor is not None}


def _is_plain_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.element_size() > 1
