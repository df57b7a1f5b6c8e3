"""Compiled as one graph where the model allows it, else in parts, which is said."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from cmoe.demo.greedy import Greedy

STEPS = 4


class Model(nn.Module):
    """Sums of embeddings; `broken` where its forward cannot be one graph."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
        self._broken = broken

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: Tensor) -> CausalLMOutput:
        h = self.embed(input_ids).cumsum(1)
        if self._broken:
            torch._dynamo.graph_break()
        return CausalLMOutput(logits=self.head(h[:, logits_to_keep]))


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


@pytest.fixture(params=[False, True], ids=["one graph", "parts"])
def broken(request: pytest.FixtureRequest) -> bool:
    return request.param


def greedy_of(model: nn.Module) -> Greedy:
    return Greedy(model, torch.tensor([[3, 1, 4]]), STEPS)


def test_a_model_is_one_graph_or_runs_in_parts(
    broken: bool, count_compiles: Callable[[], int]
) -> None:
    greedy = greedy_of(Model(broken=broken))
    expected = greedy.run().tokens
    greedy.compile()
    assert greedy.run().tokens == expected
    assert (count_compiles() == 1) != broken
    assert ("; not as one graph: Call to `torch._dynamo.graph_break" in greedy.legend()) == broken


def test_what_cannot_be_compiled_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(graph: object, inputs: object) -> None:
        raise AssertionError("no compiler here")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=no_compiler))
    with pytest.raises(RuntimeError, match="no compiler here"):
        greedy_of(Model()).compile()


def test_no_more_steps_than_there_is_room_for() -> None:
    greedy = greedy_of(Model())
    assert greedy.run(99).tokens == greedy.run().tokens
    assert len(greedy.run(99).tokens) == STEPS
