"""The seeded checkpoint: the hub's names, the same bits for a seed, a model worth running."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cmoe.checkpoint.folder import open_checkpoint
from cmoe.demo.seeded import SeededSizes, write_seeded_checkpoint

TINY = SeededSizes(
    num_layers=2,
    hidden_size=64,
    moe_intermediate_size=24,
    num_experts=16,
    top_k=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=128,
)


def test_shards_with_the_names_of_the_hub(tmp_path: Path) -> None:
    num_bytes = write_seeded_checkpoint(tmp_path, sizes=TINY, shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == num_bytes
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.num_bytes() == num_bytes
    info = checkpoint.tensors["model.layers.1.mlp.experts.15.down_proj.weight"]
    assert (info.shape, info.dtype) == ((64, 24), torch.bfloat16)


def test_a_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        write_seeded_checkpoint(tmp_path / name, seed=seed, sizes=TINY)
    files = [(tmp_path / n / "model-00001-of-00001.safetensors").read_bytes() for n in "abc"]
    assert files[0] == files[1] != files[2]


@torch.no_grad()
def test_logits_and_routing_are_not_degenerate(tmp_path: Path) -> None:
    write_seeded_checkpoint(tmp_path, sizes=TINY)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(128, (1, 64))
    output = model(tokens, output_router_logits=True)
    assert 2 < output.logits.std() < 8
    best = output.logits[0].topk(2).values
    assert (best[:, 0] - best[:, 1]).median() > 0.1
    for logits in output.router_logits:
        chosen = logits.topk(TINY.top_k)
        assert chosen.indices.unique().numel() > TINY.num_experts // 2
        largest_weight = chosen.values.softmax(-1).max(-1).values
        assert largest_weight.median() > 1.5 / TINY.top_k
