"""Two calls of torch's grouped_mm with the least code around them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.inputs import Case, Weights
from bench.peers.base import Loaded, Peer, plain_arguments
from bench.shapes import Shape
from bench.verify import activate


class TorchGroupedMM(Peer):
    """Sort by expert, multiply, activate, multiply, put back, sum."""

    impl = "torch:grouped_mm"

    def version(self) -> str:
        return torch.__version__

    def unsupported(self, case: Case, mode: str) -> str | None:
        if case.dtype == "fp32" and mode != "eager":
            return "Inductor lowers grouped_mm for bf16 only"
        return None

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        w13, w2 = weights.w13.transpose(1, 2), weights.w2.transpose(1, 2)
        every_id = torch.arange(shape.num_experts, dtype=torch.int32, device=w2.device)

        def experts(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
            tokens, top_k = topk_ids.shape
            ids, order = topk_ids.reshape(-1).sort()
            rows = order // top_k
            # Not bincount: on a GPU the host waits for it, so no graph could be captured.
            offsets = torch.searchsorted(ids, every_id, right=True, out_int32=True)
            h = F.grouped_mm(x[rows], w13, offs=offsets)
            if weights.w13_bias is not None:
                h = h + weights.w13_bias[ids]
            y = F.grouped_mm(activate(h, shape.activation), w2, offs=offsets)
            if weights.w2_bias is not None:
                y = y + weights.w2_bias[ids]
            y = y * topk_weights.reshape(-1)[order, None]
            out = torch.empty_like(y).index_copy_(0, order, y)
            return out.view(tokens, top_k, -1).sum(1).to(x.dtype)

        return Loaded(experts, plain_arguments)
