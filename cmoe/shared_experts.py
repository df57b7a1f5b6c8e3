"""The experts that every token goes through.   T tokens, S their width."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cmoe.overlap import RoutedFunction, SharedFunction, in_order
from cmoe.pluggable import PluggableLayer


@PluggableLayer.register("shared_experts")
class SharedExperts(PluggableLayer):
    """mlp(x), or sigmoid(gate(x)) * mlp(x) with a scalar gate (Qwen2-MoE).

    mlp: any module, [T, S] -> [T, S]; gate: any module, [T, S] -> [T, 1]. What they read must be
    parameters or buffers, as for every module. The result has the input's dtype, whatever theirs
    (GateLinear gives float32). ValueError for another width.
    overlap: how they run beside the routed experts, a function of `cmoe.overlap`.
    """

    def __init__(
        self,
        mlp: nn.Module,
        gate: nn.Module | None = None,
        *,
        overlap: Callable[
            [SharedFunction, Tensor, RoutedFunction], tuple[Tensor, Tensor]
        ] = in_order,
    ) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate = gate
        self.overlap = overlap

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

    def beside(self, x: Tensor, routed: RoutedFunction) -> tuple[Tensor, Tensor]:
        """(their output [T, S], routed()), ordered by `overlap`; x: [T, S]."""
        return self.overlap(self, x, routed)
