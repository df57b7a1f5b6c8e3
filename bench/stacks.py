"""Stacks of whole MoE layers, gate included: cmoe's, those of transformers.

E experts, K experts per token, H hidden, I intermediate, L layers, T tokens.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.inputs import Draw, Weights
from bench.shapes import DTYPES, Shape
from bench.verify import naive

_names = itertools.count()


class Stack(nn.Module):
    """L layers in a row, each added to its input; a forward of its own code for each stack.

    `torch.compile` keeps what it knows by code object: once one stack broke the graph inside the
    loop, no stack with the same code would be compiled as a whole any more.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        own = types.FunctionType(_through.__code__.replace(), _through.__globals__)
        self.forward = types.MethodType(own, self)


def _through(self: Stack, x: Tensor) -> Tensor:
    """x: [T, H] -> [T, H]."""
    for layer in self.layers:
        x = x + layer(x)
    return x


class Empty(nn.Module):
    """As little as a module can do."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return x + 1


class LayerTensors(NamedTuple):
    """The weights of one layer, the same for every maker."""

    gate: Tensor  # [E, H]
    w2: Tensor  # [E, H, I]
    w13: Tensor  # [E, 2I, H]


def layer_tensors(shape: Shape, dtype: str, seed: int) -> LayerTensors:
    """Weights that keep the size of what goes through them."""
    generator = torch.Generator().manual_seed(seed)
    experts, hidden, inner = shape.num_experts, shape.hidden_size, shape.intermediate_size
    sizes = ((experts, hidden), (experts, hidden, inner), (experts, 2 * inner, hidden))
    return LayerTensors(
        *(
            (torch.randn(size, generator=generator) * size[-1] ** -0.5).to(DTYPES[dtype])
            for size in sizes
        )
    )


def _fill(module: nn.Module, shape: Shape, dtype: str, seed: int) -> nn.Module:
    """Gives the module's parameters the layer's tensors; their sizes tell which is which."""
    own = sorted(module.parameters(), key=Tensor.numel)
    for parameter, tensor in zip(own, layer_tensors(shape, dtype, seed), strict=True):
        parameter.requires_grad_(False)
        parameter.copy_(tensor)
    return module.eval()


def plain_layer(shape: Shape, tensors: LayerTensors, x: Tensor, dtype: torch.dtype) -> Tensor:
    """What every maker's layer computes, token by token, each step in `dtype`: [T, H]."""
    scores = F.linear(x.to(dtype), tensors.gate.to(dtype)).softmax(-1)
    scales, ids = scores.topk(shape.top_k)
    draw = Draw(x, topk_weights=scales / scales.sum(-1, keepdim=True), topk_ids=ids)
    weights = Weights(tensors.w13, tensors.w2, None, None)
    return naive(shape, weights, draw, torch.arange(len(x)), dtype)


def plain_stack(
    shape: Shape, dtype: str, num_layers: int, x: Tensor, compute: torch.dtype
) -> Tensor:
    """What `stack` computes, each step in `compute`: [T, H]."""
    out = x.to(compute)
    for seed in range(num_layers):
        out = out + plain_layer(shape, layer_tensors(shape, dtype, seed), out, compute)
    return out


def cmoe_layer(shape: Shape, dtype: str, seed: int) -> nn.Module:
    """A FusedMoE that owns its gate."""
    import cmoe

    config = cmoe.MoEConfig(
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        params_dtype=DTYPES[dtype],
    )
    gate = cmoe.GateLinear(shape.hidden_size, shape.num_experts, dtype=DTYPES[dtype])
    layer = cmoe.FusedMoE(config, f"bench.layers.{next(_names)}.mlp", gate=gate)
    return _fill(layer, shape, dtype, seed)


class _TwoDimensional(nn.Module):
    """A transformers block, which wants [batch, T, H]."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        out: Tensor = self.block(x[None])[0]
        return out


def transformers_layer(implementation: str) -> Callable[[Shape, str, int], nn.Module]:
    """Makes Qwen3MoeSparseMoeBlock under one `experts_implementation`."""

    def layer(shape: Shape, dtype: str, seed: int) -> nn.Module:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.top_k,
            hidden_size=shape.hidden_size,
            moe_intermediate_size=shape.intermediate_size,
            norm_topk_prob=True,
        )
        config._experts_implementation = implementation
        block = Qwen3MoeSparseMoeBlock(config).to(DTYPES[dtype])
        return _fill(_TwoDimensional(block), shape, dtype, seed)

    return layer


LAYERS: dict[str, Callable[[Shape, str, int], nn.Module]] = {
    "cmoe": cmoe_layer,
    "transformers:eager": transformers_layer("eager"),
    "transformers:batched_mm": transformers_layer("batched_mm"),
    "transformers:grouped_mm": transformers_layer("grouped_mm"),
}
"""Whole layers by the name of who makes them."""


def stack(impl: str, shape: Shape, dtype: str, num_layers: int) -> Stack:
    """L layers with weights of their own. Raises ValueError for an unknown maker."""
    if impl not in LAYERS:
        raise ValueError(f"unknown layer {impl!r}; choose one of {', '.join(LAYERS)}")
    return Stack([LAYERS[impl](shape, dtype, seed) for seed in range(num_layers)])
