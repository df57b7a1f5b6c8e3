"""The control: a plain MLP that no change of an MoE layer can make slower or faster.

T tokens, H hidden, I intermediate.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.inputs import Case, Draw, Weights
from bench.peers.base import Loaded, Peer
from bench.shapes import Shape

INTERMEDIATE = 4096
MAX_TOKENS = 64


class DenseControl(Peer):
    """One dense gated MLP of the case's hidden size, I = 4096, on at most 64 tokens."""

    impl = "control:dense"

    def version(self) -> str:
        return torch.__version__

    def unsupported(self, case: Case, mode: str) -> str | None:
        return None if mode == "eager" else "the control runs eager"

    def load(self, shape: Shape, weights: Weights) -> Loaded:
        generator = torch.Generator().manual_seed(0)
        hidden, dtype = shape.hidden_size, weights.w2.dtype
        up = torch.randn(2 * INTERMEDIATE, hidden, generator=generator).mul_(hidden**-0.5)
        down = torch.randn(hidden, INTERMEDIATE, generator=generator).mul_(INTERMEDIATE**-0.5)
        device = weights.w2.device
        up, down = up.to(device, dtype), down.to(device, dtype)

        def mlp(x: Tensor) -> Tensor:
            gate, value = F.linear(x, up).chunk(2, dim=-1)
            return F.linear(F.silu(gate) * value, down)

        return Loaded(mlp, _arguments)


def _arguments(draw: Draw) -> tuple[Tensor, ...]:
    return (draw.x[:MAX_TOKENS],)
