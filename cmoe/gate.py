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
    weight: [E, H]; bias: [E] or None. Like the experts, they ask for no gradient until
    `requires_grad_()`.
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
        self.requires_grad_(False)

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
        x, weight = hidden_states.to(wide), self.weight.to(wide)
        bias = None if self.bias is None else self.bias.to(wide)
        if torch.compiler.is_compiling() and _is_one_token(x):
            # For one token the compiler fuses this sum with the conversion of the weights; ahead of
            # a matrix product it would write all of them out in float32.
            logits = (x.unsqueeze(-2) * weight).sum(-1)
            return logits if bias is None else logits + bias
        # Autocast would round the product that this class exists to keep.
        with without_autocast(hidden_states.device):
            return F.linear(x, weight, bias)


def _is_one_token(x: Tensor) -> bool:
    """Whether the graph that is being traced is for one token alone; never adds a guard."""
    # Loads sympy, which takes longer than all of `import cmoe`.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(x.numel() == x.shape[-1]))
