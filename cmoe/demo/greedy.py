"""Greedy generation, one token a step.

V results at a token: logits, or hidden units of a model that predicts no tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel

from cmoe.demo.reading import predicts_tokens, reading_of


class Generated(NamedTuple):
    """One run of the model."""

    tokens: list[int]  # one a step: chosen greedily; of a model that predicts none, the prompt's
    logits: Tensor  # [steps, V], float32: what each was chosen from
    prefill_ms: float
    decode_ms: list[float]  # one a step after the first


class Greedy:
    """A model with its prompt [1, P] in front of it; prefill and decode call one step function."""

    def __init__(self, model: PreTrainedModel, prompt: Tensor, num_steps: int) -> None:
        self._prompt = prompt
        self._num_steps = num_steps
        self._reading = reading_of(model, prompt, num_steps)
        self._why_not_one_graph = ""
        self.predicts_tokens = predicts_tokens(model)
        self.run_eager()

    def legend(self) -> str:
        """What one call reads, what a graph holds."""
        graphs = "each is one graph of the whole model (fullgraph=True)"
        if self._why_not_one_graph:
            graphs = f"not as one graph: {self._why_not_one_graph}"
        return f"{self._reading.legend}; {graphs}."

    def run_eager(self) -> None:
        """From now on calls are not compiled."""
        self._call: Callable[[Tensor], Tensor] = self._reading.step

    def run_compiled(self) -> None:
        """From now on a phase is one graph, or what `compile` found possible."""
        is_one_graph = not self._why_not_one_graph
        self._call = torch.compile(self._reading.step, fullgraph=is_one_graph)

    def compile(self) -> Generated:
        """A prefill with a decode step, compiled; in parts where the model is not one graph."""
        self.run_compiled()
        try:
            return self.run(2)
        except TorchDynamoException as error:
            if self._why_not_one_graph:
                raise
            self._why_not_one_graph = str(error).strip().partition("\n")[0] or type(error).__name__
            return self.compile()

    def run(self, num_steps: int | None = None, forced: list[int] | None = None) -> Generated:
        """Reads the prompt, generates; `forced` tokens are fed in place of the chosen ones.

        num_steps: at most as many as there is room for.
        """
        num_steps = min(self._num_steps, num_steps or self._num_steps)
        logits, prefill_ms = self._timed(self._reading.begin())
        rows, tokens, decode_ms = [logits], [self._chosen(logits, 0)], []
        for step in range(num_steps - 1):
            token = tokens[-1] if forced is None else forced[step]
            logits, ms = self._timed(self._reading.go_on(token))
            rows.append(logits)
            tokens.append(self._chosen(logits, step + 1))
            decode_ms.append(ms)
        return Generated(tokens, torch.stack(rows), prefill_ms, decode_ms)

    def _chosen(self, logits: Tensor, step: int) -> int:
        if self.predicts_tokens:
            return int(logits.argmax())
        return int(self._prompt[0, step % self._prompt.shape[1]])

    @torch.no_grad()
    def _timed(self, input_ids: Tensor) -> tuple[Tensor, float]:
        start = time.perf_counter()
        logits = self._call(input_ids).float().cpu()
        return logits, (time.perf_counter() - start) * 1e3
