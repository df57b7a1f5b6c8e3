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
    """The functional `fused_experts` op of one backend; "auto" takes the name of what it chose."""

    def __init__(self, backend: str) -> None:
        self.impl = f"cmoe:{backend}"
        self._requested = backend

    def version(self) -> str:
        import cmoe

        return str(cmoe.__version__)

    def unsupported(self, case: Case, mode: str) -> str | None:
        from cmoe.custom_ops.backends import explain_backends

        if self._requested == "auto":
            return None
        reasons = explain_backends(layer_spec(case.shape, case.dtype))
        if self._requested not in reasons:
            return f"no backend {self._requested!r}, there are {', '.join(reasons)}"
        return "; ".join(reasons[self._requested]) or None

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        from cmoe.custom_ops.backends import choose_backend, select_kernels

        dtype = next(
            name for name, torch_dtype in DTYPES.items() if torch_dtype == weights.w2.dtype
        )
        spec = layer_spec(shape, dtype)
        self.impl = f"cmoe:{choose_backend(spec, self._requested).name}"
        fused_experts = select_kernels(spec, self._requested).fused_experts

        def experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            return fused_experts(
                x,
                weights.w13,
                weights.w2,
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
