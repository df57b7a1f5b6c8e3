"""cmoe's own experts, by backend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.inputs import Case, Weights
from bench.peers.base import Loaded, Peer, plain_arguments
from bench.shapes import DTYPES, Shape
from bench.verify import SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT


class CmoeExperts(Peer):
    """The functional `fused_experts` op of one backend; "auto" takes the name of what it chose.

    packed: with weights in the layout of `cmoe.pack_weights`.
    """

    def __init__(self, backend: str, *, packed: bool = False) -> None:
        self.impl = f"cmoe:{backend}{'_packed' if packed else ''}"
        self._requested = backend
        self._packed = packed

    def version(self) -> str:
        import cmoe

        return str(cmoe.__version__)

    def unsupported(self, case: Case, mode: str) -> str | None:
        from cmoe.custom_ops.backends import (
            choose_backend,
            explain_backends,
            reasons_against_packing,
        )

        if self._requested == "auto":
            return None
        spec = layer_spec(case.shape, case.dtype)
        reasons = explain_backends(spec)
        if self._requested not in reasons:
            return f"no backend {self._requested!r}, there are {', '.join(reasons)}"
        against = reasons[self._requested]
        if self._packed and not against:
            against = reasons_against_packing(choose_backend(spec, self._requested), spec)
        return "; ".join(against) or None

    def num_own_layouts(self, shape: Shape) -> int:
        return 1 if self._packed else 0

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        from cmoe.custom_ops.backends import choose_backend, select_kernels
        from cmoe.custom_ops.packing import pack

        dtype = next(
            name for name, torch_dtype in DTYPES.items() if torch_dtype == weights.w2.dtype
        )
        spec = layer_spec(shape, dtype)
        if self._requested == "auto":
            self.impl = f"cmoe:{choose_backend(spec).name}"
        w13, w2 = map(pack, weights[:2]) if self._packed else weights[:2]
        fused_experts = select_kernels(spec, self._requested).fused_experts

        def experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            return fused_experts(
                x,
                w13,
                w2,
                topk_weights,
                topk_ids,
                weights.w13_bias,
                weights.w2_bias,
                None,
                *activation_arguments(shape),
                False,
                False,
            )

        return Loaded(experts, plain_arguments)


def activation_arguments(shape: Shape) -> tuple[str, float, float | None]:
    """The op's activation, alpha, limit."""
    limit = SWIGLUOAI_LIMIT if shape.activation == "swigluoai" else None
    return shape.activation, SWIGLUOAI_ALPHA, limit


def layer_spec(shape: Shape, dtype: str) -> Any:
    """The LayerSpec that cmoe judges backends by."""
    from cmoe.custom_ops.backends import LayerSpec

    return LayerSpec(
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        dtype=DTYPES[dtype],
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        activation=shape.activation,
    )
