"""A saved checkpoint of every architecture through the demo, in this process, not compiled.

`tests/integrations/transformers/test_architectures.py` compiles each of them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cmoe.demo import measurement
from cmoe.demo.options import DemoOptions
from cmoe.demo.run import run_demo
from cmoe.demo.worker import Arm
from tests.integrations.transformers.architectures import (
    ARCHITECTURES,
    model_class,
    tiny,
    tiny_whole_qwen3_vl_moe,
)

OWN_CACHE = ("deepseek_v4", "minimax")
"""Their caches are of their own, and grow."""


class InThisProcess:
    """A worker without its process: what it is asked, what it answers cross as JSON."""

    def __init__(self, *, compile_cache: Path, log: Path) -> None:
        self._arm = Arm()

    def __enter__(self) -> InThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def close(self) -> None:
        pass

    def ask(self, method: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = getattr(self._arm, method)(json.loads(json.dumps(request or {})))
        return json.loads(json.dumps(answer))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "Worker", InThisProcess)
    monkeypatch.setattr(measurement, "_ROUNDS", 1)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def demo_of(folder: Path, **options: Any) -> str:
    out = io.StringIO()
    sizes = {"num_tokens": 8, "num_prompt_tokens": 9, **options}
    assert run_demo(DemoOptions(model=folder, **sizes), out, io.StringIO()) == 0, out.getvalue()
    return out.getvalue()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_checkpoint_of_every_architecture(architecture: str, tmp_path: Path) -> None:
    tiny(architecture).save_pretrained(tmp_path)
    text = demo_of(tmp_path)
    generates = model_class(architecture).can_generate()
    assert ("all 8 greedy tokens are the same" in text) == generates
    assert ("the results are transformers' within" in text) != generates
    assert ("takes no static cache" in text) == (architecture in OWN_CACHE)
    assert ("both read the whole text" in text) == (architecture in OWN_CACHE or not generates)
    assert "cmoe cpu" in text or "by the experts switch" in text


def test_a_checkpoint_with_a_vision_part(tmp_path: Path) -> None:
    tiny_whole_qwen3_vl_moe().save_pretrained(tmp_path)
    assert "all 8 greedy tokens are the same" in demo_of(tmp_path)


def test_a_vocabulary_of_three(tmp_path: Path) -> None:
    tiny("qwen3_moe", vocab_size=3).save_pretrained(tmp_path)
    assert "all 8 greedy tokens are the same" in demo_of(tmp_path)


def test_a_prompt_longer_than_the_model_was_made_for(tmp_path: Path) -> None:
    tiny("mixtral", max_position_embeddings=8).save_pretrained(tmp_path)
    assert "all 8 greedy tokens are the same" in demo_of(tmp_path, num_prompt_tokens=64)
