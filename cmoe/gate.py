"""The router's linear layer.   T tokens, H hidden, E experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmoe.autocast import without_autocast


class GateLinear(nn.Module):
    """logits = x @ weight.T + bias, in float32 whatever the dtype of x.

    Rounding logits to bfloat16 changes which experts a token goes to: 5 % of the tokens' top-16
    sets in one public report on Kimi-K3, so the product leaves this layer unrounded.
    weight: [E, H]; bias: [E] or None.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(num_experts, dtype=dtype)) if bias else None
        nn.init.normal_(self.weight, std=hidden_size**-0.5)

    @classmethod
    def of(cls, weight: nn.Parameter, bias: nn.Parameter | None = None) -> GateLinear:
        """A gate that takes over existing parameters, without a copy."""
        gate = cls(weight.shape[1], weight.shape[0], dtype=weight.dtype)
        gate.weight, gate.bias = weight, bias
        return gate

    def extra_repr(self) -> str:
        """H, E, whether there is a bias."""
        num_experts, hidden = self.weight.shape
        return f"hidden_size={hidden}, num_experts={num_experts}, bias={self.bias is not None}"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [T, H] -> logits [T, E], float32 (float64 for float64)."""
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(wide)
        # Autocast would round the product that this class exists to keep.
        with without_autocast(hidden_states.device):
            return F.linear(hidden_states.to(wide), self.weight.to(wide), bias)
