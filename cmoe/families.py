"""The table of model families: where each one's config says what cmoe needs to know.

Data only. A row names attributes of the family's Hugging Face config (`Attr`), literal values, the
modules of its sparse block in transformers, the layout of its fused expert weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Attr:
    """A value read from the Hugging Face config, under the given attribute.

    other_name: what other versions of the config call it. default: the value where the config has
        neither; None: that is an error.
    """

    name: str
    other_name: str | None = None
    default: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One row of the table.

    model_type: `config.model_type`; block: the class of the sparse block in transformers.
    config, router, activation: fields of MoEConfig, RouterConfig, Activation.
    gate, shared_experts: names of the block's modules; None: the block has none.
    transposed, interleaved: the layout of the fused expert weights, as transformers keeps them.
    returns_router_scores: the block returns (hidden_states, scores) instead of hidden_states.
    renames: parts of tensor names, (in checkpoints, in the model), where they differ.
    holds_when: attributes of the config, each with the value under which the row is true.
    """

    model_type: str
    block: str
    config: Mapping[str, Any]
    router: Mapping[str, Any]
    activation: Mapping[str, Any] = field(default_factory=lambda: {"name": Attr("hidden_act")})
    gate: str = "gate"
    shared_experts: str | None = None
    transposed: bool = False
    interleaved: bool = False
    returns_router_scores: bool = False
    renames: tuple[tuple[str, str], ...] = ()
    holds_when: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: tuple[Family, ...] = (
    Family(
        model_type="qwen3_moe",
        block="Qwen3MoeSparseMoeBlock",
        config={
            "num_experts": Attr("num_experts", other_name="num_local_experts"),
            "top_k": Attr("num_experts_per_tok"),
            "hidden_size": Attr("hidden_size"),
            "intermediate_size": Attr("moe_intermediate_size"),
        },
        router={"scoring_func": "softmax", "renormalize": Attr("norm_topk_prob")},
    ),
    Family(
        model_type="mixtral",
        block="MixtralSparseMoeBlock",
        config={
            "num_experts": Attr("num_local_experts"),
            "top_k": Attr("num_experts_per_tok"),
            "hidden_size": Attr("hidden_size"),
            "intermediate_size": Attr("intermediate_size"),
        },
        router={"scoring_func": "softmax", "renormalize": True},
        holds_when={"router_jitter_noise": 0.0},
        renames=((".block_sparse_moe.", ".mlp."),),
    ),
    Family(
        model_type="deepseek_v3",
        block="DeepseekV3MoE",
        config={
            "num_experts": Attr("n_routed_experts"),
            "top_k": Attr("num_experts_per_tok"),
            "hidden_size": Attr("hidden_size"),
            "intermediate_size": Attr("moe_intermediate_size"),
        },
        router={
            "scoring_func": "sigmoid",
            "renormalize": Attr("norm_topk_prob"),
            "use_grouped_topk": True,
            "num_expert_group": Attr("n_group"),
            "topk_group": Attr("topk_group"),
            "e_score_correction_bias": True,
            "routed_scaling_factor": Attr("routed_scaling_factor"),
        },
        shared_experts="shared_experts",
    ),
    Family(
        model_type="gpt_oss",
        block="GptOssMLP",
        config={
            "num_experts": Attr("num_local_experts"),
            "top_k": Attr("num_experts_per_tok"),
            "hidden_size": Attr("hidden_size"),
            "intermediate_size": Attr("intermediate_size"),
            "has_bias": True,
        },
        router={"scoring_func": "softmax", "softmax_after_topk": True, "renormalize": False},
        activation={
            "name": "swigluoai",
            "alpha": Attr("swiglu_alpha", default=1.702),
            "limit": Attr("swiglu_limit"),
        },
        gate="router",
        transposed=True,
        interleaved=True,
        returns_router_scores=True,
    ),
)


def family_of(model_type: str) -> Family:
    """The row for a `config.model_type`; ValueError lists the known ones."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"model_type {model_type!r} is not in the table of families; known: {known}")
