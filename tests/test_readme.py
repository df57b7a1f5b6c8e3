"""README's code runs as it stands there, block after block, on a small checkpoint."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cmoe.environment import cxx_compiler

README = Path(__file__).parents[1] / "README.md"

SAVE = """
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
sizes = dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=32, num_experts=7)
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=16)
config = Qwen3MoeConfig(vocab_size=61, num_hidden_layers=2, num_experts_per_tok=2, **sizes, **heads)
Qwen3MoeForCausalLM(config).save_pretrained({folder!r})
"""


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler: nothing can be packed")
def test_every_block_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = str(tmp_path / "model")
    code = [
        SAVE.format(folder=folder),
        *blocks(),
        "print(model(torch.tensor([[1, 2]])).logits.shape)",
    ]
    program = "\n".join(code).replace('"FOLDER"', repr(folder))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "torch.Size([1, 2, 61])"
    assert len(blocks()) >= 4
