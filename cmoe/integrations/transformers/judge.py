"""Whether a block of a transformers model is what its family's row says, or why not.

E experts, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from cmoe.config import MoEConfig
from cmoe.families import Family

HF_NAMES: Mapping[str, str] = {
    "w13_weight": "gate_up_proj",
    "w2_weight": "down_proj",
    "w13_bias": "gate_up_proj_bias",
    "w2_bias": "down_proj_bias",
}
"""Parameters of RoutedExperts with their names in transformers' experts modules."""


class Block(NamedTuple):
    """A sparse block in a model."""

    path: str
    module: Any
    family: Family
    hf_config: Any  # of the innermost PreTrainedModel around the block


def faults_of(block: Block, shared: frozenset[int]) -> tuple[str, ...]:
    """Why the block cannot be taken over; empty when it can.

    shared: ids of the parameters that have several places in the model.
    """
    expected = ("experts", block.family.gate, block.family.shared_experts)
    missing = [name for name in expected if name and name not in block.module._modules]
    if missing:
        return (f"has no module {', '.join(missing)}",)
    try:
        config = MoEConfig.from_hf(block.hf_config)
    except ValueError as error:
        return (str(error),)
    return (
        *_faults_of_config(block),
        *_faults_of_calls(block),
        *_faults_of_weights(block, config, shared),
        *_faults_of_gate(block, config),
    )


def _faults_of_config(block: Block) -> Iterator[str]:
    for name, value in block.family.holds_when.items():
        actual = getattr(block.hf_config, name, value)
        if actual != value:
            yield f"config.{name} is {actual}, a replaced block does what {value} does"


def _faults_of_calls(block: Block) -> Iterator[str]:
    """What changes a call from outside, and would be lost with the block."""
    experts = block.module.experts
    for name, module in (("the block", block.module), ("its experts module", experts)):
        if "forward" in module.__dict__:
            yield f"{name} has a forward of its own (expert parallelism, offloading, a kernel hub)"
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            yield f"{name} has hooks; remove them before, add them to the new block after"
        if "parametrizations" in module._modules:
            yield f"{name} has parametrizations (an adapter); merge them first"


def _faults_of_weights(block: Block, config: MoEConfig, shared: frozenset[int]) -> Iterator[str]:
    experts = block.module.experts
    shapes = expected_shapes(block.family, config)
    present = {
        name
        for name, p in [*experts._parameters.items(), *experts._buffers.items()]
        if p is not None
    }
    if present != set(shapes):
        yield (
            f"its experts have the tensors {', '.join(sorted(present)) or 'none'}, "
            f"not {', '.join(shapes)} (quantised?)"
        )
        return
    tensors = {name: getattr(experts, name) for name in shapes}
    for name, tensor in tensors.items():
        if type(tensor) is not nn.Parameter or not _is_plain_float(tensor):
            yield f"{name} is a {type(tensor).__name__} of {tensor.dtype}, no plain float parameter"
        elif tuple(tensor.shape) != shapes[name]:
            yield f"{name} is {tuple(tensor.shape)}, by the config {shapes[name]}"
        if tensor.is_meta:
            yield f"{name} is on the meta device: load the weights first"
        if id(tensor) in shared:
            yield f"{name} is shared with another module of the model"
        if tensor.grad is not None:
            yield f"{name} has a gradient: set it to None first"
    for what, values in (
        ("dtypes", {str(t.dtype).removeprefix("torch.") for t in tensors.values()}),
        ("devices", {str(t.device) for t in tensors.values()}),
    ):
        if len(values) > 1:
            yield f"its experts' weights have several {what}: {', '.join(sorted(values))}"


def _faults_of_gate(block: Block, config: MoEConfig) -> Iterator[str]:
    gate = getattr(block.module, block.family.gate)
    weight = gate._parameters.get("weight")
    shape = (config.num_experts, config.hidden_size)
    if type(weight) is not nn.Parameter or not _is_plain_float(weight):
        yield f"{block.family.gate}.weight is no plain float parameter"
    elif tuple(weight.shape) != shape:
        yield f"{block.family.gate}.weight is {tuple(weight.shape)}, by the config {shape}"
    bias = gate._buffers.get("e_score_correction_bias")
    if config.router.e_score_correction_bias and (bias is None or bias.is_meta):
        yield f"{block.family.gate}.e_score_correction_bias is missing or on the meta device"


def expected_shapes(family: Family, config: MoEConfig) -> dict[str, tuple[int, ...]]:
    """The experts' parameters in transformers, by its names."""
    num_experts, hidden = config.num_experts, config.hidden_size
    rows_of = {"gate_up_proj": 2 * config.intermediate_size, "down_proj": hidden}
    columns_of = {"gate_up_proj": hidden, "down_proj": config.intermediate_size}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows in rows_of.items():
        matrix = (rows, columns_of[name])
        shapes[name] = (num_experts, *(reversed(matrix) if family.transposed else matrix))
        if config.has_bias:
            shapes[f"{name}_bias"] = (num_experts, rows)
    return shapes


def _is_plain_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point and tensor.element_size() > 1
