"""Greedy generation on a static cache, one token a step.

P tokens of the prompt, V size of the vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import StaticCache


class Generated(NamedTuple):
    """One run of the model."""

    tokens: list[int]  # chosen greedily, one a step
    logits: Tensor  # [steps, V], float32: what each was chosen from
    prefill_ms: float
    decode_ms: list[float]  # one a step after the first


class Greedy:
    """A model with its prompt in front of it; prefill and decode call one step function."""

    def __init__(self, model: nn.Module, prompt: Tensor, num_steps: int) -> None:
        self._model = model
        self._prompt = prompt
        self._num_steps = num_steps
        length = prompt.shape[1] + num_steps
        try:
            self._cache = StaticCache(config=model.config, max_cache_len=length)
        except (KeyError, ValueError) as error:
            raise _without_static_cache(model, error) from error
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._token = prompt[:, :1].clone()
        self.run_eager()
        try:
            with torch.no_grad():
                self._step(self._token)  # The cache's layers get their memory in a first call.
        except ValueError as error:
            raise _without_static_cache(model, error) from error

    def run_eager(self) -> None:
        """From now on calls are not compiled."""
        self._call: Callable[[Tensor], Tensor] = self._step

    def run_compiled(self) -> None:
        """From now on prefill is one graph, decode another one."""
        self._call = torch.compile(self._step, fullgraph=True)

    def run(self, num_steps: int | None = None, forced: list[int] | None = None) -> Generated:
        """Reads the prompt, generates; `forced` tokens are fed in place of the chosen ones."""
        num_steps = self._num_steps if num_steps is None else num_steps
        logits, prefill_ms = self._timed(self._prompt, restart=True)
        rows, tokens, decode_ms = [logits], [int(logits.argmax())], []
        for step in range(num_steps - 1):
            self._token.fill_(tokens[-1] if forced is None else forced[step])
            logits, ms = self._timed(self._token)
            rows.append(logits)
            tokens.append(int(logits.argmax()))
            decode_ms.append(ms)
        return Generated(tokens, torch.stack(rows), prefill_ms, decode_ms)

    @torch.no_grad()
    def _timed(self, input_ids: Tensor, restart: bool = False) -> tuple[Tensor, float]:
        if restart:
            self._cache.reset()
        start = time.perf_counter()
        logits = self._call(input_ids).float().cpu()
        return logits, (time.perf_counter() - start) * 1e3

    def _step(self, input_ids: Tensor) -> Tensor:
        """input_ids: [1, T] -> the logits after the last of them [V]."""
        output = self._model(
            input_ids=input_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        return output.logits[0, -1]


def _without_static_cache(model: nn.Module, error: Exception) -> ValueError:
    name = type(model).__name__
    return ValueError(f"the demo generates on a static cache, which {name} does not take ({error})")
