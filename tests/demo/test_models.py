"""Checkpoints of the four families in cmoe: transformers' tokens, one graph a phase."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from cmoe.demo.greedy import Greedy
from cmoe.demo.models import load_cmoe, load_transformers

CPU = torch.device("cpu")
STEPS = 6
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, intermediate_size=24, moe_intermediate_size=16, num_experts=7
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, intermediate_size=16, num_local_experts=7),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        intermediate_size=24,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, intermediate_size=16, num_local_experts=7, sliding_window=8
    ),
}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint as save_pretrained writes it; biases that matter where there are any."""
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            tensor.uniform_(0.0, 0.5)
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(64, (1, 9))


def test_the_tokens_of_transformers(
    folder: Path, prompt: torch.Tensor, count_compiles: Callable[[], int]
) -> None:
    theirs = Greedy(load_transformers(folder, torch.float32, CPU), prompt, STEPS).run()
    ours = Greedy(load_cmoe(folder, torch.float32, CPU), prompt, STEPS)
    eager = ours.run()
    assert eager.tokens == theirs.tokens
    torch.testing.assert_close(eager.logits, theirs.logits, rtol=1e-4, atol=1e-4)
    ours.run_compiled()
    for _ in range(2):
        assert ours.run().tokens == theirs.tokens
    assert count_compiles() == 2  # prefill, decode


def test_in_bfloat16_parts_stay_float32_as_in_transformers(folder: Path) -> None:
    theirs = load_transformers(folder, torch.bfloat16, CPU)
    ours = load_cmoe(folder, torch.bfloat16, CPU)
    shared = dict(theirs.named_parameters())
    dtypes = {name: p.dtype for name, p in ours.named_parameters() if name in shared}
    assert dtypes == {name: shared[name].dtype for name in dtypes}
    assert len(dtypes) > 10


def test_forced_tokens_replace_the_chosen_ones(tmp_path: Path, prompt: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"]()).eval()
    greedy = Greedy(model, prompt, STEPS)
    forced = [5, 6, 7, 8, 9, 10]
    logits = greedy.run(forced=forced).logits
    whole = torch.cat([prompt, torch.tensor([forced])], dim=1)
    with torch.no_grad():
        expected = model(whole).logits[0, prompt.shape[1] - 1 : -1]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
