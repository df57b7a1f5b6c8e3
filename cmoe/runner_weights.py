"""How the checkpoint tensors of a whole block find their place in its modules."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from cmoe.errors import LoadError
from cmoe.loading.report import Homes
from cmoe.loading.write import Write
from cmoe.routed_experts import RoutedExperts
from cmoe.router.base import FusedMoERouter
from cmoe.shared_experts import SharedExperts


class BlockWeights:
    """The places of one block outside its routed experts, by checkpoint name.

    Some places have several names: `gate.*` is `router.*` in gpt-oss, `shared_experts.*` is
    `shared_expert.*` in Qwen2-MoE, `shared_experts.mlp.*` in the block's own state_dict. The first
    name given is the slot's name in reports.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = f"{prefix}."
        self._slots: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}
        self._checks: dict[str, Callable[[Tensor], None]] = {}

    def enter_router(self, router: FusedMoERouter, gate: nn.Module | None) -> None:
        """The gate's parameters, the router's buffers."""
        self.enter(gate, "gate", "router")
        for slot in router.checkpoint_slots():
            places = (f"{place}{name}" for place in ("gate.", "router.", "") for name in slot.names)
            names = tuple(places)
            self._enter_tensor(slot.tensor, names)
            self._checks[names[0]] = slot.check

    def enter_shared_experts(self, shared_experts: SharedExperts | None) -> None:
        """The shared experts' parameters, those of their gate."""
        if shared_experts is not None:
            self.enter(shared_experts.mlp, "shared_experts", "shared_expert", "shared_experts.mlp")
            self.enter(
                shared_experts.gate,
                "shared_expert_gate",
                "shared_experts_gate",
                "shared_experts.gate",
            )

    def enter(self, module: nn.Module | None, *names: str) -> None:
        """Every parameter of the module, under each of its names."""
        if module is not None:
            for suffix, parameter in module.named_parameters():
                self._enter_tensor(parameter, tuple(f"{name}.{suffix}" for name in names))

    def homes(self, experts: RoutedExperts) -> Homes:
        """The places of the block, those of its routed experts among them."""

        def home_of(key: str, tensor: Tensor) -> list[Write] | None:
            name = key.removeprefix(self._prefix)
            if name in self._names:
                return [self._write(key, tensor, self._names[name])]
            # What still has a prefix belongs to another layer.
            if not name.startswith(("experts.", "routed_experts.")):
                return None
            return experts.home_of(key, tensor)

        return Homes(home_of, [*self._slots, *experts.slots()])

    def _enter_tensor(self, tensor: Tensor, names: tuple[str, ...]) -> None:
        self._slots[names[0]] = tensor
        for name in names:
            self._names.setdefault(name, names[0])

    def _write(self, key: str, tensor: Tensor, slot: str) -> Write:
        target = self._slots[slot]
        if slot in self._checks and tensor.shape[:-1] == (1,):
            tensor = tensor[0]  # Some files have a router's bias as one row.
        if tensor.shape != target.shape:
            raise LoadError(f"{key}: shape {tuple(tensor.shape)} should be {tuple(target.shape)}")
        return Write(target, tensor, (slot,), self._checks.get(slot))
