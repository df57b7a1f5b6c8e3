"""How a model is shown a text that grows by one token a call.

P tokens of the prompt, T of one call, V results at a token: logits, or hidden units.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache


class Reading(ABC):
    """A model with the text in front of it; every call of a phase has one shape."""

    legend: str
    """For the reader of the table: what one call reads."""

    @abstractmethod
    def begin(self) -> Tensor:
        """Forgets what was read. The ids of the first call: the prompt."""

    @abstractmethod
    def go_on(self, token: int) -> Tensor:
        """The ids of the call that reads one token more."""

    @abstractmethod
    def step(self, input_ids: Tensor) -> Tensor:
        """input_ids: [1, T] -> what the model gives for the last token that was read [V]."""


def reading_of(model: PreTrainedModel, prompt: Tensor, num_steps: int) -> Reading:
    """On a static cache where the model takes one, else the whole text in every call.

    prompt: [1, P].
    """
    if not predicts_tokens(model):
        return WholeText(model, prompt, num_steps, why="predicts no tokens")
    try:
        return OnStaticCache(model, prompt, num_steps)
    except Exception as error:  # Of many kinds: what a model's own cache is asked for in vain.
        why = f"takes no static cache ({type(error).__name__}: {error})"
        return WholeText(model, prompt, num_steps, why=" ".join(why.split()))


def predicts_tokens(model: PreTrainedModel) -> bool:
    """Whether the model has a head for the next token."""
    return "logits_to_keep" in inspect.signature(type(model).forward).parameters


class OnStaticCache(Reading):
    """The prompt, then one token a call."""

    legend = "Prefill reads the prompt, decode a token, on a static cache"

    def __init__(self, model: PreTrainedModel, prompt: Tensor, num_steps: int) -> None:
        self._model = model
        self._prompt = prompt
        self._token = prompt[:, :1].clone()
        self._cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + num_steps)
        parameters = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        with torch.no_grad():
            self.step(self._token)  # The cache's layers get their memory in a first call.

    def begin(self) -> Tensor:
        """See Reading."""
        self._cache.reset()
        return self._prompt

    def go_on(self, token: int) -> Tensor:
        """See Reading."""
        return self._token.fill_(token)

    def step(self, input_ids: Tensor) -> Tensor:
        """See Reading."""
        output = self._model(
            input_ids=input_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: self._cache},
        )
        return output.logits[0, -1]


class WholeText(Reading):
    """All of the text in every call, with zeros where later tokens will be.

    A causal model does not look there, any other one reads the same in both arms.
    """

    def __init__(self, model: PreTrainedModel, prompt: Tensor, num_steps: int, *, why: str) -> None:
        self.legend = (
            f"Prefill and decode both read the whole text, since {type(model).__name__} {why}"
        )
        self._model = model
        self._num_prompt_tokens = prompt.shape[1]
        padding = prompt.new_zeros(1, num_steps)
        self._text = torch.cat([prompt, padding], dim=1)
        self._last = prompt.new_zeros(1)
        self._has_head = predicts_tokens(model)

    def begin(self) -> Tensor:
        """See Reading."""
        self._text[:, self._num_prompt_tokens :] = 0
        self._last.fill_(self._num_prompt_tokens - 1)
        return self._text

    def go_on(self, token: int) -> Tensor:
        """See Reading."""
        self._last += 1
        self._text[0, self._last] = token
        return self._text

    def step(self, input_ids: Tensor) -> Tensor:
        """See Reading."""
        if self._has_head:
            output = self._model(input_ids=input_ids, use_cache=False, logits_to_keep=self._last)
            return output.logits[0, -1]
        # Not every model without a head knows ids.
        embedded = self._model.get_input_embeddings()(input_ids)
        results: Any = self._model(inputs_embeds=embedded, use_cache=False)
        return results.to_tuple()[0][0].index_select(0, self._last)[0]
