"""The triton backend: which layers its kernels take."""

from __future__ import annotations

import importlib.util

import torch

from cmoe.activation import ACTIVATIONS
from cmoe.custom_ops.backends import Backend, Kernels, LayerSpec
from cmoe.custom_ops.triton.parameters import THREADS, TMA, TMA_CAPABILITY, TMA_WARPS
from cmoe.custom_ops.triton.tuned import user_table
from cmoe.environment import triton_is_interpreted

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OLDEST_CAPABILITY = (8, 0)
"""bfloat16 on tensor cores, copies that do not wait."""


class TritonBackend(Backend):
    """Kernels for NVIDIA GPUs from Ampere on, for AMD GPUs; on a CPU in Triton's interpreter."""

    name = "triton"

    def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
        """Every reason; Triton itself is not imported."""
        reasons = []
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed (pip install triton)")
        if reason := _refuses_device(spec.device):
            reasons.append(reason)
        if spec.dtype not in DTYPES:
            reasons.append(f"takes bfloat16, float16, float32, not {spec.dtype}")
        if spec.activation not in ACTIVATIONS:
            reasons.append(f"has no activation {spec.activation!r}")
        return tuple(reasons)

    def kernels(self) -> Kernels:
        """The ops; ValueError where the user's file of parameters has a mistake."""
        from cmoe.custom_ops.triton.fused_experts import fused_experts
        from cmoe.custom_ops.triton.route import route

        user_table()
        return Kernels(fused_experts, route)

    def could_run(self) -> tuple[tuple[str, str], ...]:
        """Each kind of device, with how blocks can be copied there; Triton is not imported."""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return (
            (f"CUDA {_text(OLDEST_CAPABILITY)} up", f"{dtypes}; blocks copied by {THREADS}"),
            (f"CUDA {_text(TMA_CAPABILITY)} up", f"as above, or by {TMA} where tuned rows say so"),
            (f"CUDA {TMA_CAPABILITY[0]}.x", f"as above, or by {TMA_WARPS} where tuned rows say so"),
            ("ROCm", f"{dtypes}; blocks copied by {THREADS}"),
            ("CPU", "in Triton's interpreter, to try it out: TRITON_INTERPRET=1"),
        )


def _text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _refuses_device(device: torch.device) -> str | None:
    if device.type == "cpu" and triton_is_interpreted():
        return None
    oldest = _text(OLDEST_CAPABILITY)
    if device.type != "cuda":
        interpreter = " (unless TRITON_INTERPRET=1)" if device.type == "cpu" else ""
        return (
            f"runs on CUDA devices of compute capability {oldest} up and on ROCm devices, "
            f"not on {device.type}{interpreter}"
        )
    if not torch.cuda.is_available():
        return "torch finds no CUDA or ROCm device"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST_CAPABILITY:
        return f"needs compute capability {oldest} up, {device} has {_text(capability)}"
    return None


BACKEND = TritonBackend()
