"""Small layers with their checkpoints, beside what a whole block computes step by step.

T tokens, H = 16 hidden, I = 8 intermediate, E = 5 experts, K = 2 experts per token.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import Tensor, nn

import cmoe
from tests.oracle import assert_within_budget, naive_experts, naive_route

NUM_EXPERTS, HIDDEN, INTERMEDIATE = 5, 16, 8


def config_of(**changes: Any) -> cmoe.MoEConfig:
    sizes = {
        "num_experts": NUM_EXPERTS,
        "top_k": 2,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
    }
    return cmoe.MoEConfig(**{**sizes, **changes})


def layer_of(
    config: cmoe.MoEConfig | None = None, prefix: str = "mlp", **parts: Any
) -> cmoe.MoERunner:
    """A layer whose weights matter: outputs of the size of the inputs, no zero biases."""
    layer = cmoe.FusedMoE(config or config_of(), prefix, **parts)
    fill(layer)
    return layer


def through_torch_save(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@torch.no_grad()
def fill(layer: cmoe.MoERunner) -> None:
    for parameter in layer.routed_experts.parameters():
        parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    layer.routed_experts.zero_padding()
    if (bias := layer.router.correction_bias()) is not None:
        bias.uniform_(0.0, 0.5)


def x_of(*lead: int, width: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*lead, width, dtype=dtype)


def logits_of(*lead: int, width: int = NUM_EXPERTS) -> Tensor:
    return torch.randn(*lead, width)


def expert_tensors(
    config: cmoe.MoEConfig, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Tensor]:
    """A per-expert checkpoint: `experts.{e}.gate_proj.weight`, ...; [I, H], [I, H], [H, I]."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shapes = dict.fromkeys(names[:2], (intermediate, hidden)) | {names[2]: (hidden, intermediate)}
    tensors = {}
    for expert in range(config.num_experts):
        for name, shape in shapes.items():
            tensors[f"experts.{expert}.{name}.weight"] = torch.randn(shape)
            if config.has_bias:
                tensors[f"experts.{expert}.{name}.bias"] = torch.randn(shape[0])
    return tensors


def poison(layer: nn.Module) -> None:
    """NaN in every parameter, so that what a load leaves out shows."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(float("nan"))


def has_nan(layer: nn.Module) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in layer.state_dict().values())


def logical_weights(layer: cmoe.MoERunner) -> dict[str, Tensor | None]:
    """The expert weights without their padding, as arguments of naive_experts."""
    config, experts = layer.config, layer.routed_experts
    hidden, intermediate = config.hidden_size, config.intermediate_size
    parts = experts.w13_weight.split(config.padded_intermediate_size(), dim=1)
    weights: dict[str, Tensor | None] = {
        "w13": torch.cat([part[:, :intermediate, :hidden] for part in parts], 1),
        "w2": experts.w2_weight[:, :hidden, :intermediate],
    }
    if config.has_bias:
        parts = experts.w13_bias.split(config.padded_intermediate_size(), dim=1)
        weights["w13_bias"] = torch.cat([part[:, :intermediate] for part in parts], 1)
        weights["w2_bias"] = experts.w2_bias[:, :hidden]
    return weights


def routed_by_formula(layer: cmoe.MoERunner, logits: Tensor) -> tuple[Tensor, Tensor]:
    """What a TopKRouter gives, in fp64."""
    router = layer.config.router
    return naive_route(
        logits,
        layer.config.top_k,
        bias=layer.router.correction_bias(),
        scoring_func=router.scoring_func,
        softmax_after_topk=router.softmax_after_topk,
        renormalize=router.renormalize,
        num_expert_group=router.num_expert_group,
        topk_group=router.topk_group,
        scaling=1.0 if router.apply_routed_scale_to_output else router.routed_scaling_factor,
    )


def block(
    layer: cmoe.MoERunner,
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """The block of x [T, H] under a given routing, every step in `dtype`."""

    def apply(module: nn.Module | None, tensor: Tensor) -> Tensor:
        return tensor if module is None else copy.deepcopy(module).to(dtype)(tensor).to(dtype)

    with torch.no_grad():
        x = x.to(dtype)
        config, activation = layer.config, layer.config.activation
        y = naive_experts(
            apply(layer.input_transform, x),
            topk_weights=weights,
            topk_ids=ids,
            activation=activation.name,
            alpha=activation.alpha,
            limit=activation.limit,
            apply_router_weight_on_input=config.router.apply_router_weight_on_input,
            dtype=dtype,
            **logical_weights(layer),
        )
        if config.router.apply_routed_scale_to_output:
            y = y * config.router.routed_scaling_factor
        y = apply(layer.output_transform, y)
        return y if layer.shared_experts is None else y + apply(layer.shared_experts, x)


def assert_exact(layer: cmoe.MoERunner, y: Tensor, x: Tensor, logits: Tensor) -> None:
    """y is the block of x [T, H], within the budget of the layer's dtype."""
    assert_follows(layer, y, x, *routed_by_formula(layer, logits))


def assert_follows(
    layer: cmoe.MoERunner, y: Tensor, x: Tensor, weights: Tensor, ids: Tensor
) -> None:
    """As assert_exact, with the routing given."""
    assert y.dtype == x.dtype
    exact = block(layer, x, weights, ids)
    if x.dtype == torch.float64:
        # The oracle computes in fp64 too: no error of its own to measure by, a few sums' rounding.
        torch.testing.assert_close(y, exact, rtol=1e-12, atol=1e-12)
        return
    assert_within_budget(y, exact, block(layer, x, weights, ids, x.dtype))
