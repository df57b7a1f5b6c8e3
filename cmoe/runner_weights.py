"""How the checkpoint tensors of a whole block find their place in its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from cmoe.errors import LoadError
from cmoe.load_report import LoadReport
from cmoe.routed_experts import RoutedExperts
from cmoe.router.base import FusedMoERouter
from cmoe.shared_experts import SharedExperts

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class BlockWeights:
    """The places of one block outside its routed experts, by checkpoint name.

    Some places have several names: `gate.*` is `router.*` in gpt-oss, `shared_experts.*` is
    `shared_expert.*` in Qwen2-MoE. The first name given is the slot's name in reports.
    """

    def __init__(
        self,
        layer_name: str,
        router: FusedMoERouter,
        gate: nn.Module | None,
        shared_experts: SharedExperts | None,
    ) -> None:
        self._prefix = f"{layer_name}."
        self._slots: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}
        self._enter(gate, "gate", "router")
        if (bias := router.correction_bias()) is not None:
            self._enter_tensor(
                bias,
                "gate.e_score_correction_bias",
                "router.e_score_correction_bias",
                "e_score_correction_bias",
            )
        if shared_experts is not None:
            self._enter(shared_experts.mlp, "shared_experts", "shared_expert")
            self._enter(shared_experts.gate, "shared_expert_gate", "shared_experts_gate")

    def load(self, experts: RoutedExperts, named_tensors: NamedTensors, strict: bool) -> LoadReport:
        """Writes every tensor to its place; see MoERunner.load_weights."""
        written: dict[str, str] = {}
        if isinstance(named_tensors, Mapping):
            mine = {key: t for key, t in named_tensors.items() if self._slot(key) is not None}
            for key, tensor in mine.items():
                self._check(key, tensor)
            rest = {key: t for key, t in named_tensors.items() if key not in mine}
            report = experts.load_weights(rest, strict=False)
            for key, tensor in mine.items():
                self._write(key, tensor, written)
        else:
            report = experts.load_weights(self._write_mine(named_tensors, written), strict=False)
        merged = self._merged(report, written)
        return merged.check("weights") if strict else merged

    def _write_mine(
        self, named_tensors: Iterable[tuple[str, Tensor]], written: dict[str, str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Writes what has its place here, passes the others on."""
        for key, tensor in named_tensors:
            if self._slot(key) is None:
                yield key, tensor
            else:
                self._check(key, tensor)
                self._write(key, tensor, written)

    def _enter(self, module: nn.Module | None, *names: str) -> None:
        if module is None:
            return
        for suffix, parameter in module.named_parameters():
            self._enter_tensor(parameter, *(f"{name}.{suffix}" for name in names))

    def _enter_tensor(self, tensor: Tensor, *names: str) -> None:
        self._slots[names[0]] = tensor
        self._names.update(dict.fromkeys(names, names[0]))

    def _slot(self, key: str) -> str | None:
        return self._names.get(key.removeprefix(self._prefix))

    def _check(self, key: str, tensor: Tensor) -> None:
        target = self._slots[self._names[key.removeprefix(self._prefix)]]
        if tensor.shape != target.shape:
            raise LoadError(f"{key}: shape {tuple(tensor.shape)} should be {tuple(target.shape)}")

    def _write(self, key: str, tensor: Tensor, written: dict[str, str]) -> None:
        slot = self._names[key.removeprefix(self._prefix)]
        with torch.no_grad():
            self._slots[slot].copy_(tensor)
        written[slot] = key

    def _merged(self, experts: LoadReport, written: dict[str, str]) -> LoadReport:
        unwritten = tuple(slot for slot in self._slots if slot not in written)
        return LoadReport(
            keys_used=(*written.values(), *experts.keys_used),
            slots_written=(*written, *experts.slots_written),
            keys_without_home=experts.keys_without_home,
            slots_unwritten=(*unwritten, *experts.slots_unwritten),
        )
