"""The router's linear layer.   T tokens, H hidden, E experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cmoe.autocast import without_autocast
from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.gate import gate_reference


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
        self._gate: Callable[..., Tensor] = gate_reference

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

    def use_kernels(self, kernels: Kernels) -> None:
        """Takes the backend's `gate`; without one the product is plain torch."""
        self._gate = kernels.gate

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [..., H] -> logits [..., E], float32 (float64 for float64)."""
        x = hidden_states.flatten(0, -2)
        # Autocast would round the product that this class exists to keep.
        with without_autocast(hidden_states.device):
            logits = self._gate(x, self.weight, self.bias)
        return logits.view(*hidden_states.shape[:-1], logits.shape[-1])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_gate"]  # The runner hands in the kernels of the place where the copy lives.
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._gate = gate_reference
