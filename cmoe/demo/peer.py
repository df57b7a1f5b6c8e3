"""The choice of transformers' fastest way to run its experts here."""

from __future__ import annotations

from dataclasses import dataclass

from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from cmoe.demo.greedy import Generated, Greedy

IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
_CAN_COMPILE = ("grouped_mm", "batched_mm")
_TRIAL_STEPS = 5
_SLOW = 3.0
"""What is this many times slower at its first call is not called again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """One way to run transformers' model."""

    implementation: str
    compiled: bool

    def __str__(self) -> str:
        return f"{self.implementation} compiled" if self.compiled else self.implementation


class Peer:
    """transformers' model with a mode for prefill, another one for decode."""

    def __init__(self, model: PreTrainedModel, greedy: Greedy) -> None:
        self._model = model
        self._greedy = greedy
        self.trials: dict[str, str] = {}
        self.compilations: dict[Mode, tuple[float, int]] = {}  # seconds, graphs

    def use(self, mode: Mode) -> None:
        """Runs in this mode from now on."""
        self._model.set_experts_implementation(mode.implementation)
        if mode.compiled:
            self._greedy.run_compiled()
        else:
            self._greedy.run_eager()

    def choose(self) -> tuple[Mode, Mode]:
        """The fastest mode for prefill, the fastest for decode, of all that run.

        Every implementation is tried as it is, then compiled where it can be.
        """
        times: dict[Mode, tuple[float, float]] = {}
        for implementation in IMPLEMENTATIONS:
            self._try(Mode(implementation=implementation, compiled=False), times)
        for mode in tuple(times):
            if mode.implementation in _CAN_COMPILE:
                self._try(Mode(implementation=mode.implementation, compiled=True), times)
        if not times:
            raise RuntimeError(f"transformers could not run its model: {self.trials}")
        prefill, decode = (min(times, key=lambda mode: times[mode][phase]) for phase in (0, 1))
        return prefill, decode

    def _try(self, mode: Mode, times: dict[Mode, tuple[float, float]]) -> None:
        counters.clear()
        try:
            self.use(mode)
            first = self._greedy.compile() if mode.compiled else self._greedy.run(2)
            if mode.compiled:
                seconds = (first.prefill_ms + first.decode_ms[0]) / 1e3
                self.compilations[mode] = (seconds, counters["stats"]["unique_graphs"])
            fastest = min((prefill for prefill, _ in times.values()), default=float("inf"))
            is_slow = not mode.compiled and first.prefill_ms > _SLOW * fastest
            runs = [self._greedy.run(_TRIAL_STEPS)] if is_slow else self._repeat()
        except Exception as error:  # Left out, whatever it is: others remain.
            reason = str(error).strip().partition("\n")[0]
            self.trials[str(mode)] = f"left out: {type(error).__name__}: {reason}"
            return
        prefill_ms = min(run.prefill_ms for run in runs)
        decode_ms = min(ms for run in runs for ms in run.decode_ms)
        times[mode] = (prefill_ms, decode_ms)
        self.trials[str(mode)] = f"prefill {prefill_ms:.1f} ms, decode {decode_ms:.2f} ms a token"

    def _repeat(self) -> list[Generated]:
        return [self._greedy.run(_TRIAL_STEPS) for _ in range(2)]
