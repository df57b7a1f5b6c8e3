"""The cpu backend: which layers its kernels take."""

from __future__ import annotations

import functools

import torch

from cmoe.activation import ACTIVATIONS
from cmoe.custom_ops.backends import Backend, Kernels, LayerSpec
from cmoe.custom_ops.cpu import build
from cmoe.custom_ops.fused_experts import fused_experts_fake
from cmoe.custom_ops.fused_moe import fused_moe_fake
from cmoe.custom_ops.gate import gate_fake
from cmoe.custom_ops.route import route_fake

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CpuBackend(Backend):
    """C++ kernels that read checkpoint weights where they lie; bit-equal at every batch size."""

    name = "cpu"

    def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
        """Cheap reasons first: only a layer that passes them is worth a compilation."""
        reasons = []
        if spec.device.type != "cpu":
            reasons.append(f"runs on cpu, not on {spec.device.type}")
        if spec.dtype not in DTYPES:
            reasons.append(f"takes bfloat16, float16, float32, not {spec.dtype}")
        if spec.activation not in ACTIVATIONS:
            reasons.append(f"has no activation {spec.activation!r}")
        if not reasons and (reason := build.load()) is not None:
            reasons.append(reason)
        return tuple(reasons)

    def refuses_packed(self, spec: LayerSpec) -> tuple[str, ...]:
        """Outer products are there for bfloat16."""
        if spec.dtype == torch.bfloat16:
            return ()
        return (f"reads packed weights of bfloat16, not of {spec.dtype}",)

    def kernels(self) -> Kernels:
        """The ops of the loaded library, with their fakes."""
        return _kernels()


@functools.cache
def _kernels() -> Kernels:
    torch.library.register_fake("cmoe_cpu::fused_experts", fused_experts_fake)
    torch.library.register_fake("cmoe_cpu::route", route_fake)
    torch.library.register_fake("cmoe_cpu::fused_moe", fused_moe_fake)
    torch.library.register_fake("cmoe_cpu::gate", gate_fake)
    ops = torch.ops.cmoe_cpu
    return Kernels(
        ops.fused_experts.default, ops.route.default, ops.gate.default, ops.fused_moe.default
    )


BACKEND = CpuBackend()
