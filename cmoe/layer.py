"""The factory: a config in, a whole MoE block out."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from cmoe.config import MoEConfig
from cmoe.distributed.dispatch import LocalDispatcher
from cmoe.errors import UnsupportedError
from cmoe.routed_experts import RoutedExperts
from cmoe.router.base import FusedMoERouter
from cmoe.router.topk import TopKRouter
from cmoe.runner import MoERunner
from cmoe.shared_experts import SharedExperts


def FusedMoE(
    config: MoEConfig,
    prefix: str,
    *,
    router: FusedMoERouter | None = None,
    gate: nn.Module | None = None,
    shared_experts: nn.Module | None = None,
    shared_expert_gate: nn.Module | None = None,
    input_transform: nn.Module | None = None,
    output_transform: nn.Module | None = None,
    transparent: bool = False,
) -> MoERunner:
    """A ready MoERunner for one layer; its weights are random until `load_weights` fills them.

    prefix: the block's name in the model and in the checkpoint ("model.layers.0.mlp"); unique among
        living layers.
    router: default TopKRouter(config).
    gate: module [T, H] -> logits [T, E] that the layer owns, GateLinear for one; without it the
        caller passes router_logits.
    shared_experts: module [T, S] -> [T, S], or a SharedExperts.
    shared_expert_gate: module [T, S] -> [T, 1].
    input_transform, output_transform: modules around the routed experts.
    transparent: see MoERunner.
    ValueError for what cannot be; UnsupportedError when no backend can run the layer.
    """
    parts = {
        "gate": gate,
        "shared_experts": shared_experts,
        "shared_expert_gate": shared_expert_gate,
        "input_transform": input_transform,
        "output_transform": output_transform,
    }
    _check_types(config, prefix, router, parts)
    _check_one_rank(config)
    if shared_expert_gate is not None and shared_experts is None:
        raise ValueError("shared_expert_gate needs shared_experts")
    if shared_expert_gate is not None and isinstance(shared_experts, SharedExperts):
        raise ValueError("shared_expert_gate belongs into the SharedExperts that are given")
    if shared_experts is not None and not isinstance(shared_experts, SharedExperts):
        shared_experts = SharedExperts(shared_experts, shared_expert_gate)
    return MoERunner(
        prefix,
        config,
        TopKRouter(config) if router is None else router,
        RoutedExperts(config),
        LocalDispatcher(),
        gate=gate,
        shared_experts=shared_experts,
        input_transform=input_transform,
        output_transform=output_transform,
        transparent=transparent,
    )


def _check_types(
    config: object, prefix: object, router: object, parts: Mapping[str, object]
) -> None:
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config must be a MoEConfig, got {config!r}")
    if not isinstance(prefix, str) or not prefix:
        raise ValueError(f"prefix must be the block's name, such as 'mlp'; got {prefix!r}")
    if router is not None and not isinstance(router, FusedMoERouter):
        raise ValueError(
            f"router must be an instance of a FusedMoERouter, got {router!r}; "
            "wrap a function in CustomRouter(config, function)"
        )
    for name, part in parts.items():
        if part is not None and not isinstance(part, nn.Module):
            raise ValueError(f"{name} must be a module, got {part!r}")


def _check_one_rank(config: MoEConfig) -> None:
    parallel = config.parallel
    sizes = {axis: getattr(parallel, f"{axis}_size") for axis in ("tp", "ep", "dp", "sp")}
    larger = [f"{axis}_size={size}" for axis, size in sizes.items() if size > 1]
    if parallel.num_redundant_experts:
        larger.append(f"num_redundant_experts={parallel.num_redundant_experts}")
    if larger:
        raise UnsupportedError(f"layers run on one rank so far; got {', '.join(larger)}")
