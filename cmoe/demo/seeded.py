"""The seeded checkpoint: a small Qwen3-MoE with real layer proportions, random weights.

H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

SHARD_BYTES = 100_000_000

# Deviations relative to 1/sqrt(fan-in), for a model that behaves like a trained one where it counts
# here: logits some units wide, so that the greedy choice is clear; a router that prefers some
# experts; layers that add about as much to the residual stream as they find there.
_ROUTER_GAIN = 2.0
_LOGITS_GAIN = 4.0
_EXPERTS_GAIN = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SeededSizes:
    """Sizes of the model; the proportions are those of Qwen3-30B-A3B, at a quarter of its width."""

    num_layers: int = 4
    hidden_size: int = 512
    moe_intermediate_size: int = 192
    num_experts: int = 128
    top_k: int = 8
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    vocab_size: int = 4096


def write_seeded_checkpoint(
    folder: Path, *, seed: int = 0, sizes: SeededSizes | None = None, shard_bytes: int = SHARD_BYTES
) -> int:
    """Writes config, index, bfloat16 shards into an existing folder; gives the tensors' bytes."""
    sizes = SeededSizes() if sizes is None else sizes
    generator = torch.Generator().manual_seed(seed)
    shards: list[dict[str, Tensor]] = [{}]
    total_bytes = shard_size = 0
    for name, tensor in _tensors(sizes, generator):
        if shard_size and shard_size + tensor.nbytes > shard_bytes:
            shards.append({})
            shard_size = 0
        shards[-1][name] = tensor
        shard_size += tensor.nbytes
        total_bytes += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(_config(sizes), indent=1))
    return total_bytes


def _config(sizes: SeededSizes) -> dict[str, Any]:
    """config.json, as the hub has it for Qwen3-30B-A3B."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 3 * sizes.hidden_size,
        "max_position_embeddings": 32768,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": sizes.moe_intermediate_size,
        "norm_topk_prob": True,
        "num_attention_heads": sizes.num_heads,
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.top_k,
        "num_hidden_layers": sizes.num_layers,
        "num_key_value_heads": sizes.num_kv_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vocab_size": sizes.vocab_size,
    }


def _tensors(sizes: SeededSizes, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Every tensor by its name on the hub, in the order of the layers."""
    h, i = sizes.hidden_size, sizes.moe_intermediate_size
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim

    def linear(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        weight = torch.randn(rows, columns, generator=generator) * (gain * columns**-0.5)
        return weight.to(torch.bfloat16)

    def norm(width: int) -> Tensor:
        return (1 + 0.1 * torch.randn(width, generator=generator)).to(torch.bfloat16)

    yield "model.embed_tokens.weight", linear(sizes.vocab_size, h, h**0.5)
    for layer in range(sizes.num_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", norm(h)
        yield f"{prefix}.self_attn.q_proj.weight", linear(q, h)
        yield f"{prefix}.self_attn.k_proj.weight", linear(kv, h)
        yield f"{prefix}.self_attn.v_proj.weight", linear(kv, h)
        yield f"{prefix}.self_attn.o_proj.weight", linear(h, q)
        yield f"{prefix}.self_attn.q_norm.weight", norm(sizes.head_dim)
        yield f"{prefix}.self_attn.k_norm.weight", norm(sizes.head_dim)
        yield f"{prefix}.post_attention_layernorm.weight", norm(h)
        yield f"{prefix}.mlp.gate.weight", linear(sizes.num_experts, h, _ROUTER_GAIN)
        for expert in range(sizes.num_experts):
            yield f"{prefix}.mlp.experts.{expert}.gate_proj.weight", linear(i, h)
            yield f"{prefix}.mlp.experts.{expert}.up_proj.weight", linear(i, h)
            yield f"{prefix}.mlp.experts.{expert}.down_proj.weight", linear(h, i, _EXPERTS_GAIN)
    yield "model.norm.weight", norm(h)
    yield "lm_head.weight", linear(sizes.vocab_size, h, _LOGITS_GAIN)
