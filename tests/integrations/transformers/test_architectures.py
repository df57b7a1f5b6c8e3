"""Every architecture with experts on cmoe, both ways, beside transformers' own eager run."""

from __future__ import annotations

import copy

import pytest
import torch

from cmoe.families import SWITCH_ONLY, family_of
from cmoe.integrations.transformers import replace_moe
from cmoe.integrations.transformers.blocks import find_blocks
from tests.integrations.transformers.architectures import ARCHITECTURES, VOCABULARY, output, tiny
from tests.integrations.transformers.tiny_models import relative_error

every = pytest.mark.parametrize("architecture", ARCHITECTURES)


def test_the_walk_finds_the_architectures() -> None:
    assert len(ARCHITECTURES) >= 60
    assert {"mixtral", "gpt_oss", "qwen3_omni_moe"} <= set(ARCHITECTURES)


@every
def test_an_architecture_has_a_row_or_a_reason(architecture: str) -> None:
    model = tiny(architecture)
    model_type = model.config.model_type
    if model_type in SWITCH_ONLY:
        assert not list(find_blocks(model))
    else:
        assert len(list(find_blocks(model))) == 2
        assert family_of(model_type).model_type == model_type


def rows_reached() -> set[str]:
    return {tiny(name).config.model_type for name in ARCHITECTURES}


@every
@torch.no_grad()
def test_logits_are_eagers(architecture: str) -> None:
    eager = tiny(architecture)
    ids = torch.randint(0, VOCABULARY, (2, 5))
    expected = output(eager, ids)
    switched = copy.deepcopy(eager)
    switched.set_experts_implementation("cmoe")
    assert relative_error(output(switched, ids), expected) <= 1e-5
    if eager.config.model_type in SWITCH_ONLY:
        return
    replace_moe(eager)
    assert relative_error(output(eager, ids), expected) <= 1e-5
