"""The table of model families: where each one's config says what cmoe needs to know.

Data only. A row names attributes of the family's Hugging Face config (`Attr`, `Choice`), literal
values, the modules of its sparse block in transformers, the layout of its expert weights. A family
whose block computes what another's does is that row under another name. `SWITCH_ONLY` has the
families whose block does what no row can say, each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cmoe.families.row import Attr, Choice, Family, Layout, Modules

_TOP_K = Attr("num_experts_per_tok")


def _sizes(num_experts: Attr, intermediate_size: str, top_k: Attr = _TOP_K) -> Mapping[str, Any]:
    return {
        "num_experts": num_experts,
        "top_k": top_k,
        "hidden_size": Attr("hidden_size"),
        "intermediate_size": Attr(intermediate_size),
    }


_NUM_EXPERTS = Attr("num_experts", other_name="num_local_experts")
_NUM_LOCAL_EXPERTS = Attr("num_local_experts", other_name="num_experts")
_BLOCK_SPARSE_MOE = ((".block_sparse_moe.", ".mlp."),)

# --- softmax over all the experts, then the choice ------------------------------------------------

_QWEN3 = Family(
    model_type="qwen3_moe",
    block="Qwen3MoeSparseMoeBlock",
    config=_sizes(_NUM_EXPERTS, "moe_intermediate_size"),
    router={"scoring_func": "softmax", "renormalize": Attr("norm_topk_prob")},
)
_MIXTRAL = Family(
    model_type="mixtral",
    block="MixtralSparseMoeBlock",
    config=_sizes(_NUM_LOCAL_EXPERTS, "intermediate_size"),
    router={"scoring_func": "softmax", "renormalize": True},
    holds_when={"router_jitter_noise": 0.0},
    renames=_BLOCK_SPARSE_MOE,
)
_OLMOE = replace(
    _QWEN3,
    model_type="olmoe",
    block="OlmoeSparseMoeBlock",
    config=_sizes(_NUM_EXPERTS, "intermediate_size"),
)
_QWEN2 = replace(
    _QWEN3,
    model_type="qwen2_moe",
    block="Qwen2MoeSparseMoeBlock",
    modules=Modules(shared_experts="shared_expert", shared_expert_gate="shared_expert_gate"),
)
_SOFTMAX: tuple[Family, ...] = (
    _QWEN3,
    _MIXTRAL,
    _OLMOE,
    _QWEN2,
    replace(_QWEN3, model_type="mellum", block="MellumSparseMoeBlock"),
    replace(
        _QWEN3,
        model_type="qwen3_vl_moe_text",
        block="Qwen3VLMoeTextSparseMoeBlock",
        router=_MIXTRAL.router,
        file_layout=Layout(transposed=None),
    ),
    replace(
        _QWEN3, model_type="qwen3_omni_moe_text", block="Qwen3OmniMoeThinkerTextSparseMoeBlock"
    ),
    replace(_OLMOE, model_type="flex_olmo", block="FlexOlmoSparseMoeBlock"),
    replace(
        _QWEN3,
        model_type="lara_mini",
        block="LaraMiniSparseMoeBlock",
        modules=Modules(shared_experts="shared_expert"),
    ),
    replace(_QWEN2, model_type="qwen3_next", block="Qwen3NextSparseMoeBlock"),
    replace(
        _QWEN2,
        model_type="qwen3_omni_moe_talker_text",
        block="Qwen3OmniMoeTalkerTextSparseMoeBlock",
    ),
    replace(
        _QWEN2,
        model_type="qwen3_5_moe_text",
        block="Qwen3_5MoeSparseMoeBlock",
        router=_MIXTRAL.router,
    ),
    replace(_QWEN2, model_type="qwen4_exp_text", block="Qwen4ExpTextSparseMoeBlock"),
    replace(_MIXTRAL, model_type="minimax", block="MiniMaxSparseMoeBlock"),
    replace(
        _OLMOE,
        model_type="jamba",
        block="JambaSparseMoeBlock",
        router={"scoring_func": "softmax", "renormalize": False},
        modules=Modules(gate="router"),
    ),
    Family(
        model_type="hunyuan_v1_moe",
        block="HunYuanMoEV1Moe",
        config=_sizes(
            Attr("num_experts"), "intermediate_size", Attr("moe_topk", "num_experts_per_tok")
        ),
        router={"scoring_func": "softmax", "renormalize": True},
        modules=Modules(gate="gate.wg", shared_experts="shared_mlp"),
    ),
    Family(
        model_type="ernie4_5_moe",
        block="Ernie4_5_MoeSparseMoeBlock",
        config=_sizes(
            Attr("moe_num_experts", "num_experts"),
            "moe_intermediate_size",
            Attr("moe_k", "num_experts_per_tok"),
        ),
        router={"scoring_func": "softmax", "renormalize": True, "e_score_correction_bias": True},
        modules=Modules(
            correction_bias="gate.moe_statics.e_score_correction_bias",
            shared_experts="shared_experts",
        ),
        renames=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
    ),
)

# --- the choice, then softmax over the chosen experts ---------------------------------------------

_TOPK_THEN_SOFTMAX: Mapping[str, Any] = {
    "scoring_func": "softmax",
    "softmax_after_topk": True,
    "renormalize": False,
}
_SWIGLUOAI: Mapping[str, Any] = {
    "name": "swigluoai",
    "alpha": Attr("swiglu_alpha", default=1.702),
    "limit": Attr("swiglu_limit"),
}
_GPT_OSS = Family(
    model_type="gpt_oss",
    block="GptOssMLP",
    config={**_sizes(_NUM_LOCAL_EXPERTS, "intermediate_size"), "has_bias": True},
    router=_TOPK_THEN_SOFTMAX,
    activation=_SWIGLUOAI,
    modules=Modules(gate="router"),
    layout=Layout(transposed=True, interleaved=True),
    returns_router_scores=True,
)
_GRANITE = Family(
    model_type="granitemoe",
    block="GraniteMoeMoE",
    config=_sizes(_NUM_LOCAL_EXPERTS, "intermediate_size"),
    router=_TOPK_THEN_SOFTMAX,
    modules=Modules(gate="router"),
    renames=(
        ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
        ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
    ),
)
_BY_FUNCTION = "expert_selection_fn"
_SOFTMAX_OF_CHOSEN: tuple[Family, ...] = (
    _GPT_OSS,
    _GRANITE,
    replace(_GRANITE, model_type="granitemoeshared", block="GraniteMoeSharedMoE"),
    replace(_GRANITE, model_type="granitemoehybrid", block="GraniteMoeHybridMoE"),
    replace(_GRANITE, model_type="granitemoe_swa", block="GraniteMoeSWAMoE", renames=()),
    # Divides the weights by K, multiplies the experts' sum by K.
    replace(
        _GPT_OSS,
        model_type="openai_privacy_filter",
        block="OpenAIPrivacyFilterMLP",
        layout=Layout(transposed=True),
    ),
    Family(
        model_type="aria_text",
        block="AriaTextMoELayer",
        config=_sizes(Attr("moe_num_experts"), "intermediate_size", Attr("moe_topk")),
        router=_TOPK_THEN_SOFTMAX,
        modules=Modules(gate="router", shared_experts="shared_experts"),
        layout=Layout(transposed=True),
        renames=(
            (".mlp.experts.fc1.weight", ".mlp.experts.gate_up_proj"),
            (".mlp.experts.fc2.weight", ".mlp.experts.down_proj"),
        ),
    ),
    Family(
        model_type="cohere2_moe",
        block="Cohere2MoeSparseMoeBlock",
        config=_sizes(Attr("num_experts"), "intermediate_size"),
        router={
            "scoring_func": Attr(_BY_FUNCTION),
            "softmax_after_topk": Choice(_BY_FUNCTION, {"softmax": True, "sigmoid": False}),
            "renormalize": Choice(
                _BY_FUNCTION, {"softmax": False, "sigmoid": Attr("norm_topk_prob")}
            ),
        },
        holds_when={"num_shared_experts": 0},  # They are averaged with the routed ones.
    ),
)

# --- softmax, groups without a bias ---------------------------------------------------------------

_BY_METHOD = "topk_method"
_DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    block="DeepseekV2Moe",
    config=_sizes(Attr("n_routed_experts"), "moe_intermediate_size"),
    router={
        "scoring_func": "softmax",
        "renormalize": False,
        "use_grouped_topk": Choice(_BY_METHOD, {"greedy": False, "group_limited_greedy": True}),
        "num_expert_group": Choice(
            _BY_METHOD, {"greedy": 1, "group_limited_greedy": Attr("n_group")}
        ),
        "topk_group": Choice(_BY_METHOD, {"greedy": 1, "group_limited_greedy": Attr("topk_group")}),
        "routed_scaling_factor": Attr("routed_scaling_factor"),
    },
    modules=Modules(shared_experts="shared_experts"),
)
# Their groups are marked by the sum of the best two experts, which cmoe does with a bias only.
_MISTRAL4 = Family(
    model_type="mistral4",
    block="Mistral4MoE",
    config=_sizes(Attr("n_routed_experts"), "moe_intermediate_size"),
    router={
        "scoring_func": "softmax",
        "renormalize": Attr("norm_topk_prob"),
        "routed_scaling_factor": Attr("routed_scaling_factor"),
    },
    modules=Modules(shared_experts="shared_experts"),
    holds_when={"n_group": 1},
)
_SOFTMAX_IN_GROUPS: tuple[Family, ...] = (
    _DEEPSEEK_V2,
    replace(_DEEPSEEK_V2, model_type="deepseek_ocr2_text", block="DeepseekOcr2TextMoe"),
    replace(_DEEPSEEK_V2, model_type="unlimited_ocr_text", block="UnlimitedOcrTextMoe"),
    _MISTRAL4,
    replace(
        _MISTRAL4,
        model_type="mistral_large4_text",
        block="MistralLarge4TextMoE",
        router={**_MISTRAL4.router, "renormalize": True},
    ),
)

# --- sigmoid, groups with a bias (noaux_tc) -------------------------------------------------------

_GATE_BIAS = "gate.e_score_correction_bias"
_SHARED = Modules(correction_bias=_GATE_BIAS, shared_experts="shared_experts")
_DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    block="DeepseekV3MoE",
    config=_sizes(Attr("n_routed_experts"), "moe_intermediate_size"),
    router={
        "scoring_func": "sigmoid",
        "renormalize": Attr("norm_topk_prob"),
        "use_grouped_topk": True,
        "num_expert_group": Attr("n_group"),
        "topk_group": Attr("topk_group"),
        "e_score_correction_bias": True,
        "routed_scaling_factor": Attr("routed_scaling_factor"),
    },
    modules=_SHARED,
)
_KIMI = replace(
    _DEEPSEEK_V3,
    model_type="kimi_linear",
    block="KimiLinearMoE",
    config=_sizes(
        Attr("num_experts"),
        "moe_intermediate_size",
        Attr("num_experts_per_token", "num_experts_per_tok"),
    ),
    router={
        **_DEEPSEEK_V3.router,
        "renormalize": Attr("moe_renormalize", "norm_topk_prob"),
        "num_expert_group": Attr("num_expert_group", "n_group"),
    },
    renames=_BLOCK_SPARSE_MOE,
)
_HY_V4 = replace(
    _DEEPSEEK_V3,
    model_type="hy_v4",
    block="HYV4MoE",
    activation={"name": "silu", "limit": Attr("swiglu_limit")},
    renames=((".linear_gate.", ".gate_proj."),),
)
_SIGMOID_IN_GROUPS: tuple[Family, ...] = (
    _DEEPSEEK_V3,
    replace(_DEEPSEEK_V3, model_type="deepseek_v32", block="DeepseekV32MoE"),
    replace(_DEEPSEEK_V3, model_type="dots1", block="Dots1MoE"),
    replace(_DEEPSEEK_V3, model_type="dots3_note_text", block="Dots3NoteTextMoE"),
    replace(_DEEPSEEK_V3, model_type="glm4_moe", block="Glm4MoeMoE"),
    replace(_DEEPSEEK_V3, model_type="glm4_moe_lite", block="Glm4MoeLiteMoE"),
    replace(_DEEPSEEK_V3, model_type="glm4v_moe_text", block="Glm4vMoeTextMoE"),
    replace(_DEEPSEEK_V3, model_type="glm_moe_dsa", block="GlmMoeDsaMoE"),
    replace(_DEEPSEEK_V3, model_type="solar_open", block="SolarOpenMoE"),
    replace(
        _DEEPSEEK_V3,
        model_type="exaone_moe",
        block="ExaoneMoeSparseMoEBlock",
        config=_sizes(Attr("num_experts"), "moe_intermediate_size"),
        renames=((".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),),
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="mimo_v2_flash",
        block="MiMoV2FlashMoE",
        modules=Modules(correction_bias=_GATE_BIAS),
    ),
    _KIMI,
    replace(
        _KIMI,
        model_type="bailing_hybrid",
        block="BailingHybridMoE",
        renames=((".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),),
    ),
    _HY_V4,
    replace(_HY_V4, model_type="hy_v4_vl_text", block="HYV4VLMoE"),
    replace(_HY_V4, model_type="glm5_next_text", block="Glm5NextTextMoE", renames=()),
    replace(
        _DEEPSEEK_V3,
        model_type="beam",
        block="BeamMoE",
        config=_sizes(Attr("num_experts"), "moe_intermediate_size"),
        router={**_DEEPSEEK_V3.router, "apply_routed_scale_to_output": True},
        modules=Modules(correction_bias=_GATE_BIAS),
    ),
    replace(
        _DEEPSEEK_V3,
        model_type="nemotron_h",
        block="NemotronHMoE",
        config={
            **_DEEPSEEK_V3.config,
            "hidden_size": Attr("moe_latent_size", other_name="hidden_size"),
        },
        activation={"name": Attr("mlp_hidden_act")},
        gated=False,
        modules=replace(
            _SHARED, input_transform="fc1_latent_proj", output_transform="fc2_latent_proj"
        ),
        renames=(("backbone.", "model."),),
    ),
)

# --- sigmoid without groups -----------------------------------------------------------------------

_SIGMOID_WITH_BIAS: Mapping[str, Any] = {
    "scoring_func": "sigmoid",
    "renormalize": True,
    "e_score_correction_bias": True,
}
_SIGMOID: tuple[Family, ...] = (
    Family(
        model_type="flint",
        block="FlintSparseMoeBlock",
        config=_sizes(Attr("num_experts"), "moe_intermediate_size"),
        router={"scoring_func": "sigmoid", "renormalize": Attr("norm_topk_prob")},
        modules=Modules(shared_experts="shared_expert"),
    ),
    # With groups it leaves losers at 0, above every negative choice.
    replace(
        _DEEPSEEK_V3,
        model_type="axk2",
        block="AXK2MoE",
        router={
            **_SIGMOID_WITH_BIAS,
            "renormalize": Attr("norm_topk_prob"),
            "routed_scaling_factor": Attr("routed_scaling_factor"),
        },
        holds_when={"n_group": None},
    ),
    Family(
        model_type="afmoe",
        block="AfmoeSparseMoeBlock",
        config=_sizes(Attr("num_experts"), "moe_intermediate_size"),
        router={**_SIGMOID_WITH_BIAS, "routed_scaling_factor": Attr("route_scale")},
        modules=Modules(
            gate="router.gate", correction_bias="expert_bias", shared_experts="shared_experts"
        ),
    ),
    Family(
        model_type="lfm2_moe",
        block="Lfm2MoeSparseMoeBlock",
        config=_sizes(Attr("num_experts"), "moe_intermediate_size"),
        router={
            "scoring_func": "sigmoid",
            "renormalize": Attr("norm_topk_prob"),
            "renormalize_epsilon": 1e-6,
            "e_score_correction_bias": Attr("use_expert_bias"),
            "routed_scaling_factor": Attr("routed_scaling_factor"),
        },
        activation={"name": "silu"},
        modules=Modules(correction_bias="expert_bias"),
    ),
    Family(
        model_type="hy_v3",
        block="HYV3MoE",
        config=_sizes(_NUM_EXPERTS, "moe_intermediate_size"),
        router={**_SIGMOID_WITH_BIAS, "routed_scaling_factor": Attr("router_scaling_factor")},
        modules=replace(_SHARED, correction_bias="e_score_correction_bias"),
        renames=(
            (".mlp.router.gate.weight", ".mlp.gate.weight"),
            (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
            (".mlp.shared_mlp.", ".mlp.shared_experts."),
        ),
    ),
    Family(
        model_type="laguna",
        block="LagunaSparseMoeBlock",
        config=_sizes(Attr("num_experts"), "moe_intermediate_size"),
        router={
            **_SIGMOID_WITH_BIAS,
            "routed_scaling_factor": Attr("moe_routed_scaling_factor"),
            "apply_routed_scale_to_output": True,
        },
        modules=_SHARED,
        holds_when={"moe_router_logit_softcapping": 0.0},
        renames=(
            (".mlp.experts.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
            (".mlp.shared_expert.", ".mlp.shared_experts."),
        ),
    ),
    Family(
        model_type="minimax_m2",
        block="MiniMaxM2SparseMoeBlock",
        config=_sizes(_NUM_LOCAL_EXPERTS, "intermediate_size"),
        router=_SIGMOID_WITH_BIAS,
        modules=Modules(correction_bias="e_score_correction_bias"),
        holds_when={"router_jitter_noise": 0.0},
        renames=_BLOCK_SPARSE_MOE,
    ),
    Family(
        model_type="minimax_m3_vl_text",
        block="MiniMaxM3VLSparseMoeBlock",
        config=_sizes(_NUM_LOCAL_EXPERTS, "intermediate_size"),
        router={
            **_SIGMOID_WITH_BIAS,
            "routed_scaling_factor": Attr("routed_scaling_factor"),
            "apply_routed_scale_to_output": True,
        },
        activation=_SWIGLUOAI,
        modules=_SHARED,
        renames=(
            (".block_sparse_moe.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
            *_BLOCK_SPARSE_MOE,
        ),
    ),
)

FAMILIES: tuple[Family, ...] = (
    *_SOFTMAX,
    *_SOFTMAX_OF_CHOSEN,
    *_SOFTMAX_IN_GROUPS,
    *_SIGMOID_IN_GROUPS,
    *_SIGMOID,
)
"""The families whose whole block cmoe takes over; one row for each model_type."""

_BESIDE_THE_MLP = "its experts stand in the decoder layer, behind norms of their own"
_SOFTCAP = "its experts bound gate and up parts by tanh"
SWITCH_ONLY: Mapping[str, str] = {
    "axk1": "it normalises the sum of routed and shared experts",
    "deepseek_v4": "its first layers choose experts by token id, every layer is given the ids",
    "diffusion_gemma_text": _BESIDE_THE_MLP,
    "dots3_note_vision_encoder": "its sizes differ from layer to layer",
    "ernie4_5_vl_moe_text": "it routes text and image tokens to different experts",
    "gemma4_text": _BESIDE_THE_MLP,
    "inkling_text": "its router weighs the shared experts too",
    "inkling2_text": _SOFTCAP,
    "inkling2_loop_text": _SOFTCAP,
    "kolibri1": "its bias is added to logits, not to scores",
    "muse_spark_text": "it normalises each expert's output",
    "phimoe": "its router masks logits near the best one (sparsemixer)",
    "zaya": "its router keeps a state from layer to layer",
}
"""model_type -> why no row can say what the block does: the experts switch alone serves it."""


def family_of(model_type: str) -> Family:
    """The row for a `config.model_type`; ValueError lists the known ones."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    if model_type in SWITCH_ONLY:
        raise ValueError(
            f"model_type {model_type!r} is served by the experts switch of the transformers "
            f"integration alone: {SWITCH_ONLY[model_type]}"
        )
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(f"model_type {model_type!r} is not in the table of families; known: {known}")
