"""The two ways to read a text give the same logits; the second one needs no cache."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from cmoe.demo.reading import OnStaticCache, Reading, WholeText, reading_of
from tests.integrations.transformers.architectures import VOCABULARY, tiny

PROMPT_TOKENS, STEPS = 7, 5


@torch.no_grad()
def read(reading: Reading, tokens: list[int]) -> torch.Tensor:
    rows = [reading.step(reading.begin())]
    rows += [reading.step(reading.go_on(token)) for token in tokens]
    return torch.stack(rows)


def both(model: PreTrainedModel) -> tuple[Reading, Reading]:
    prompt = torch.randint(VOCABULARY, (1, PROMPT_TOKENS))
    return (
        OnStaticCache(model, prompt, STEPS),
        WholeText(model, prompt, STEPS, why="is asked to"),
    )


def test_the_whole_text_in_every_step_gives_the_cache_s_logits() -> None:
    on_cache, whole = both(tiny("mixtral"))
    tokens = torch.randint(VOCABULARY, (STEPS - 1,)).tolist()
    expected = read(on_cache, tokens)
    torch.testing.assert_close(read(whole, tokens), expected, rtol=1e-4, atol=1e-4)
    others = torch.randint(VOCABULARY, (STEPS - 1,)).tolist()
    for reading in (on_cache, whole):  # What was read before leaves no trace.
        read(reading, others)
        torch.testing.assert_close(read(reading, tokens), expected, rtol=1e-4, atol=1e-4)


def test_the_calls_of_a_phase_have_one_shape() -> None:
    for reading, decode in zip(both(tiny("mixtral")), (1, PROMPT_TOKENS + STEPS), strict=True):
        reading.begin()
        assert {reading.go_on(token).shape for token in (3, 4)} == {(1, decode)}


def test_a_cache_that_a_model_does_not_take_is_said() -> None:
    reading = reading_of(tiny("deepseek_v4"), torch.zeros(1, 3, dtype=torch.long), STEPS)
    assert isinstance(reading, WholeText)
    assert "DeepseekV4ForCausalLM takes no static cache (KeyError: " in reading.legend


def test_a_model_without_a_head_is_said() -> None:
    reading = reading_of(tiny("glm4v_moe"), torch.zeros(1, 3, dtype=torch.long), STEPS)
    assert "Glm4vMoeTextModel predicts no tokens" in reading.legend
