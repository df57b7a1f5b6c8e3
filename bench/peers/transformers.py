"""The experts implementations of Hugging Face transformers.

E experts, K experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

from bench.inputs import Case, Draw, Weights
from bench.peers.base import Loaded, Peer
from bench.shapes import Shape

MAX_GATHER_BYTES = 1_500_000_000
"""batched_mm copies the weights of every routed row; above this a call takes seconds."""


class TransformersExperts(Peer):
    """MixtralExperts, GptOssExperts for biases, under one `experts_implementation`."""

    def __init__(self, implementation: str) -> None:
        self.impl = f"transformers:{implementation}"
        self._implementation = implementation

    def version(self) -> str:
        try:
            return importlib.metadata.version("transformers")
        except importlib.metadata.PackageNotFoundError as error:
            raise ImportError("transformers is not installed") from error

    def unsupported(self, case: Case, mode: str) -> str | None:
        if self._implementation == "batched_mm":
            rows = case.tokens * case.shape.top_k
            gathered = rows * case.shape.expert_bytes(case.dtype)
            if gathered > MAX_GATHER_BYTES:
                return (
                    f"batched_mm copies {gathered / 1e9:.1f} GB of weights "
                    f"({rows} routed rows), limit {MAX_GATHER_BYTES / 1e9:.1f} GB"
                )
        if self._implementation == "eager" and mode in ("reduce-overhead", "cudagraph"):
            return "the eager experts loop reads expert ids on the host"
        return None

    def num_own_layouts(self, shape: Shape) -> int:
        return 1 if shape.has_bias else 0

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        experts = _gpt_oss(shape, weights) if shape.has_bias else _mixtral(shape, weights)
        experts.config._experts_implementation = self._implementation  # type: ignore[union-attr]
        return Loaded(experts, _arguments)


def _arguments(draw: Draw) -> tuple[Tensor, ...]:
    """transformers indexes with int64, weighs in the model's dtype."""
    return draw.x, draw.topk_ids.long(), draw.topk_weights.to(draw.x.dtype)


def _parameter(tensor: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor, requires_grad=False)


def _mixtral(shape: Shape, weights: Weights) -> torch.nn.Module:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        hidden_act="silu",
    )
    with torch.device("meta"):
        experts = MixtralExperts(config)
    experts.gate_up_proj = _parameter(weights.w13)
    experts.down_proj = _parameter(weights.w2)
    return experts.eval()


def _gpt_oss(shape: Shape, weights: Weights) -> torch.nn.Module:
    """gpt-oss keeps [E, H, 2I] with gate columns, up columns alternating."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    assert weights.w13_bias is not None and weights.w2_bias is not None
    config = GptOssConfig(
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
    )
    with torch.device("meta"):
        experts = GptOssExperts(config)
    e, h, i = shape.num_experts, shape.hidden_size, shape.intermediate_size
    halves = weights.w13.view(e, 2, i, h)
    experts.gate_up_proj = _parameter(halves.permute(0, 3, 2, 1).reshape(e, h, 2 * i))
    bias = weights.w13_bias.view(e, 2, i).transpose(1, 2).reshape(e, 2 * i)
    experts.gate_up_proj_bias = _parameter(bias)
    experts.down_proj = _parameter(weights.w2.transpose(1, 2).contiguous())
    experts.down_proj_bias = _parameter(weights.w2_bias)
    return experts.eval()
