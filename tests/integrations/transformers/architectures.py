"""A small model of every architecture of the installed transformers that has experts.

The architectures are found in its sources; a new one is built from the sizes below, or fails until
it has a line in OTHERWISE. Two layers, sizes that divide nothing, random weights everywhere, router
biases too, which transformers initialises to zero.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from tests.integrations.transformers.tiny_models import fill

VOCABULARY = 61
LAYERS = 2
E, K, I = 6, 3, 11  # noqa: E741 - the shape vocabulary


def found() -> Iterator[str]:
    """Every architecture whose experts go through transformers' experts interface."""
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        if "use_experts_implementation" in path.read_text("utf-8"):
            yield path.parent.name


# Models beside the main one of their architecture: its folder, their class.
OTHER_MODELS: Mapping[str, tuple[str, str]] = {
    "qwen3_omni_moe_talker": ("qwen3_omni_moe", "Qwen3OmniMoeTalkerModel"),
}
ARCHITECTURES = (*found(), *OTHER_MODELS)

# What configs call the sizes; each config takes those that it has.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), E),
    **dict.fromkeys(("moe_num_experts",), E),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), K),
    **dict.fromkeys(("top_k_experts",), K),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), I),
    **dict.fromkeys(("n_group", "num_expert_group"), 3),
    "topk_group": 2,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 2),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 9),
    **dict.fromkeys(("dense_intermediate_size", "moe_shared_expert_intermediate_size"), 9),
    **dict.fromkeys(("moe_hidden_size", "moe_latent_size"), 12),
    **dict.fromkeys(("routed_scaling_factor", "router_scaling_factor", "route_scale"), 1.5),
    "moe_routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 0),
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"] * LAYERS,
    "vocab_size": VOCABULARY,
    "hidden_size": 20,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4),
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _rope(**others: object) -> Mapping[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **others}}


_FULL_ATTENTION: Mapping[str, Any] = {"layer_types": ["full_attention"] * LAYERS}
OTHERWISE: Mapping[str, Mapping[str, Any]] = {
    "axk1": {"head_dim": 4},
    "axk2": {"n_group": None, "topk_group": None},
    "bailing_hybrid": _FULL_ATTENTION,
    "cohere2_moe": {"num_shared_experts": 0},
    "deepseek_ocr2": {"topk_method": "group_limited_greedy"},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v3": {"head_dim": 4},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "ernie4_5_moe": {"moe_layer_start_index": 0},
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [I, 9],
        "head_dim": 16,
        **_rope(mrope_section=[2, 2, 4]),
    },
    "gemma4": {"enable_moe_block": True, "hidden_size_per_layer_input": 0},
    "glm4v_moe": {"head_dim": 16, **_rope(partial_rotary_factor=0.5, mrope_section=[1, 1, 2])},
    "glm5_next": {
        "index_kpool": 2,
        "qk_rope_head_dim": 0,
        "layer_types": ["indexed_attention"] * LAYERS,
    },
    "granitemoehybrid": {"mamba_n_heads": 4, **_FULL_ATTENTION},
    "hy_v4_vl": _rope(mrope_section=[1, 1, 0]),
    "inkling2": {"unpadded_vocab_size": VOCABULARY},
    "inkling2_loop": {"unpadded_vocab_size": VOCABULARY},
    "jamba": {
        "attn_layer_period": 1,
        "attn_layer_offset": 0,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
    },
    "kimi_linear": _FULL_ATTENTION,
    "lfm2_moe": _FULL_ATTENTION,
    "mimo_v2_flash": {"head_dim": 12, **_FULL_ATTENTION},
    "mistral4": {"n_group": 1, "topk_group": 1},
    "mistral_large4": {"n_group": 1, "topk_group": 1},
    "nemotron_h": {"layers_block_type": ["moe", "full_attention", "moe"]},
    "qwen3_5_moe": _FULL_ATTENTION,
    "qwen3_next": _FULL_ATTENTION,
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        **_FULL_ATTENTION,
    },
    "qwen3_omni_moe_talker": {"shared_expert_intermediate_size": 9},
    "unlimited_ocr": {"topk_method": "group_limited_greedy"},
    "zaya": {"num_experts_per_tok": 1},
}


def modeling(architecture: str) -> Any:
    """transformers' module of the architecture."""
    return importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")


def model_class(architecture: str) -> type[PreTrainedModel]:
    """The class of the language model: with a head where there is one, else without."""
    if architecture in OTHER_MODELS:
        folder, name = OTHER_MODELS[architecture]
        return getattr(modeling(folder), name)
    classes = [
        cls
        for cls in vars(modeling(architecture)).values()
        if inspect.isclass(cls) and issubclass(cls, PreTrainedModel) and cls.config_class
    ]
    for ending in ("ForCausalLM", "ForTokenClassification", "TextModel"):
        fitting = [cls for cls in classes if cls.__name__.endswith(ending)]
        if fitting:
            return min(fitting, key=lambda cls: len(cls.__name__))
    raise AssertionError(f"no model class of {architecture} has experts")


def tiny(architecture: str, **others: Any) -> PreTrainedModel:
    """A model in eval mode, on transformers' own eager experts. others: entries of its config."""
    cls = model_class(architecture)
    known = cls.config_class().to_dict()
    sizes = {key: size for key, size in SIZES.items() if key in known}
    config = cls.config_class(**{**sizes, **OTHERWISE.get(architecture, {}), **others})
    model = fill(cls(config).eval())
    model.set_experts_implementation("eager")
    return model


def tiny_whole_qwen3_vl_moe(**sizes: int) -> PreTrainedModel:
    """With its vision part; the hub's files of it have the experts transposed."""
    text = {**tiny("qwen3_vl_moe").config.to_dict(), **sizes}
    vision = dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16)
    vision |= {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    model = fill(transformers.Qwen3VLMoeForConditionalGeneration(config).eval())
    model.set_experts_implementation("eager")
    return model


def inputs_of(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """The arguments that stand for the tokens."""
    if isinstance(model, modeling("qwen3_omni_moe").Qwen3OmniMoeTalkerModel):
        return {"inputs_embeds": model.get_input_embeddings()(ids)}
    return {"input_ids": ids}


def result_of(output: Any) -> Tensor:
    """Logits, or the last hidden states, of what a model returns."""
    return output.logits if "logits" in output else output.last_hidden_state


def output(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Its logits, of a model without a head the last hidden states."""
    return result_of(model(**inputs_of(model, ids)))
