"""Two-layer models of the four families, with sizes that divide nothing.

E is prime where the family allows it, I odd, H no multiple of 8. Random weights everywhere, routers
and biases too, which transformers initialises to zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from cmoe.integrations.transformers import register, replace_moe

transformers.logging.set_verbosity_error()
register()

VOCABULARY = 61
LAYERS = 2


def _sizes(**others: object) -> dict[str, object]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 20,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "num_experts_per_tok": 3,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
        **others,
    }


def _deepseek_v3() -> PreTrainedModel:
    sizes = _sizes(
        num_key_value_heads=2,
        intermediate_size=18,
        moe_intermediate_size=11,
        n_routed_experts=6,
        n_group=3,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        first_k_dense_replace=0,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )
    del sizes["head_dim"]
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_sizes(num_experts=7, moe_intermediate_size=11, intermediate_size=18),
            norm_topk_prob=True,
        )
    ),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(**_sizes(num_local_experts=7, intermediate_size=11))
    ),
    "deepseek_v3": _deepseek_v3,
    "gpt_oss": lambda: GptOssForCausalLM(
        GptOssConfig(**_sizes(num_local_experts=7, intermediate_size=11))
    ),
}
WAYS = ("switch", "replace")


@torch.no_grad()
def fill(module: nn.Module) -> nn.Module:
    """Random values for every parameter, every saved buffer; norms stay near 1."""
    saved = module.state_dict(keep_vars=True)
    for name, tensor in saved.items():
        is_norm = tensor.dim() == 1 and name.endswith("norm.weight")
        tensor.copy_(torch.randn(tensor.shape) * (0.1 if is_norm else 0.3) + (1 if is_norm else 0))
    return module


def tiny_model(family: str) -> PreTrainedModel:
    """A model in eval mode, on transformers' own eager experts."""
    model = fill(MODELS[family]().eval())
    model.set_experts_implementation("eager")
    return model


def on_cmoe(model: PreTrainedModel, way: str) -> PreTrainedModel:
    """The same object, its experts on cmoe in one of the two ways."""
    if way == "switch":
        model.set_experts_implementation("cmoe")
    else:
        replace_moe(model)
    return model


def blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The sparse block of each layer."""
    return [layer.mlp for layer in model.model.layers]


def hidden(output: Tensor | tuple[Tensor, object]) -> Tensor:
    """A block's hidden states, which come with scores in some families."""
    return output[0] if isinstance(output, tuple) else output


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    wide = torch.promote_types(expected.dtype, torch.float32)
    actual, expected = actual.detach().to(wide), expected.detach().to(wide)
    return float((actual - expected).abs().max() / expected.abs().max())


def token_ids(rows: int = 2, columns: int = 5) -> Tensor:
    """Random input ids [rows, columns]."""
    return torch.randint(0, VOCABULARY, (rows, columns))
