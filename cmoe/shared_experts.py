"""The experts that every token goes through.   T tokens, S their width."""

from __future__ import annotations

from torch import Tensor, nn

from cmoe.pluggable import PluggableLayer


@PluggableLayer.register("shared_experts")
class SharedExperts(PluggableLayer):
    """mlp(x), or sigmoid(gate(x)) * mlp(x) with a scalar gate (Qwen2-MoE).

    mlp: any module, [T, S] -> [T, S]; gate: any module, [T, S] -> [T, 1]. The result has the
    input's dtype, whatever theirs (GateLinear gives float32). ValueError for another width.
    """

    def __init__(self, mlp: nn.Module, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate = gate

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [T, S] -> [T, S]."""
        y = self.mlp(hidden_states)
        if self.gate is not None:
            y = self.gate(hidden_states).sigmoid() * y
        if y.shape != hidden_states.shape:
            raise ValueError(
                f"shared experts must keep the shape {tuple(hidden_states.shape)} of their input; "
                f"got {tuple(y.shape)}"
            )
        return y.to(hidden_states.dtype)
