"""The configuration: what it refuses, what it reads from Hugging Face configs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from cmoe.activation import Activation
from cmoe.config import (
    CheckpointLayout,
    MoEConfig,
    ParallelConfig,
    QuantConfig,
    RouterConfig,
    moe_part,
)

SIZES = dict(num_experts=8, top_k=2, hidden_size=16, intermediate_size=12)


def test_the_defaults() -> None:
    config = MoEConfig(**SIZES)
    assert config.activation == Activation(name="silu")
    assert config.params_dtype == torch.float32
    assert config.backend == "auto"
    assert not config.has_bias
    assert config.router == RouterConfig(scoring_func="softmax", renormalize=True)
    assert config.num_physical_experts() == 8
    assert (config.padded_hidden_size(), config.padded_intermediate_size()) == (16, 12)


def test_the_dtype_is_torchs_default_when_it_is_made() -> None:
    torch.set_default_dtype(torch.bfloat16)
    assert MoEConfig(**SIZES).params_dtype == torch.bfloat16


def test_an_activation_by_name_comes_with_its_constants() -> None:
    config = MoEConfig(**SIZES, activation="swigluoai")
    assert config.activation == Activation(name="swigluoai", alpha=1.702, limit=7.0)


def test_derived_sizes() -> None:
    config = MoEConfig(
        **SIZES,
        quant=QuantConfig(size_multiple=5),
        parallel=ParallelConfig(num_redundant_experts=3),
    )
    assert config.num_physical_experts() == 11
    assert (config.padded_hidden_size(), config.padded_intermediate_size()) == (20, 15)


GROUPED = dict(use_grouped_topk=True, num_expert_group=4, topk_group=2)

BAD_LAYERS: list[tuple[dict[str, Any], str]] = [
    (dict(num_experts=0), "num_experts must be a positive int, got 0"),
    (dict(top_k=-1), "top_k must be a positive int, got -1"),
    (dict(hidden_size=2.5), "hidden_size must be a positive int, got 2.5"),
    (dict(intermediate_size=None), "intermediate_size must be a positive int, got None"),
    (dict(top_k=9), r"top_k \(9\) must not exceed num_experts \(8\)"),
    (
        dict(params_dtype=torch.int8),
        r"params_dtype must be a float dtype such as torch\.bfloat16, got torch\.int8",
    ),
    (dict(params_dtype="bfloat16"), r"such as torch\.bfloat16, got 'bfloat16'"),
    (dict(router="sigmoid"), "router must be a RouterConfig, got 'sigmoid'"),
    (dict(quant=None), "quant must be a QuantConfig, got None"),
    (dict(activation="gelu_new"), "unknown activation 'gelu_new'; choose one of silu, gelu, "),
    (
        dict(router=RouterConfig(apply_router_weight_on_input=True)),
        "apply_router_weight_on_input needs top_k = 1, got 2",
    ),
    (
        dict(router=RouterConfig(use_grouped_topk=True, num_expert_group=3)),
        r"num_expert_group \(3\) must divide num_experts \(8\); choose one of 1, 2, 4, 8",
    ),
    (
        dict(top_k=5, router=RouterConfig(**GROUPED)),
        r"top_k \(5\) exceeds the 4 experts in topk_group \(2\) groups",
    ),
]

BAD_ROUTERS: list[tuple[dict[str, Any], str]] = [
    (
        dict(scoring_func="tanh"),
        "unknown scoring_func 'tanh'; choose one of softmax, sigmoid, sqrtsoftplus",
    ),
    (dict(softmax_after_topk=True, scoring_func="sigmoid"), "needs scoring_func='softmax' without"),
    (dict(softmax_after_topk=True, e_score_correction_bias=True), "without a bias"),
    (
        dict(num_expert_group=4, topk_group=2),
        r"num_expert_group \(4\) with topk_group \(2\) needs use_grouped_topk=True",
    ),
    (
        {**GROUPED, "topk_group": 5},
        r"topk_group \(5\) must be between 1 and num_expert_group \(4\)",
    ),
    ({**GROUPED, "topk_group": 0}, r"topk_group \(0\) must be between 1 and"),
    ({**GROUPED, "num_expert_group": None}, "num_expert_group must be an int, got None"),
    ({**GROUPED, "topk_group": None}, "topk_group must be an int, got None"),
    ({"renormalize_epsilon": None}, "renormalize_epsilon must be at least 1e-37, got None"),
    ({"renormalize_epsilon": 0.0}, r"renormalize_epsilon must be at least 1e-37, got 0\.0"),
    ({"renormalize_epsilon": 1e-38}, "renormalize_epsilon must be at least 1e-37, got 1e-38"),
    ({"renormalize_epsilon": float("nan")}, "renormalize_epsilon must be at least"),
    ({"renormalize_epsilon": True}, "renormalize_epsilon must be at least 1e-37, got True"),
    ({"routed_scaling_factor": None}, "routed_scaling_factor must be finite, got None"),
    ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be finite, got nan"),
]

BAD_PARALLEL: list[tuple[dict[str, Any], str]] = [
    *(
        ({f"{axis}_size": 2, f"{axis}_rank": 2}, rf"{axis}_rank \(2\) .* {axis}_size \(2\)")
        for axis in ("tp", "ep", "dp", "sp")
    ),
    (dict(ep_rank=-1), r"ep_rank \(-1\) must be in \[0, ep_size\) with ep_size \(1\)"),
    (dict(tp_size=0), r"tp_rank \(0\) must be in \[0, tp_size\) with tp_size \(0\) at least 1"),
    (dict(expert_placement="random"), "unknown expert_placement 'random'; choose linear or"),
    (dict(num_redundant_experts=-2), "num_redundant_experts is negative: -2"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_LAYERS, ids=lambda value: str(value)[:60])
def test_a_bad_layer(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{**SIZES, **fields})


@pytest.mark.parametrize(("fields", "message"), BAD_LAYERS, ids=lambda value: str(value)[:60])
def test_a_replaced_config_is_judged_again(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(MoEConfig(**SIZES), **fields)


@pytest.mark.parametrize(("fields", "message"), BAD_ROUTERS, ids=lambda value: str(value)[:60])
def test_a_bad_router(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RouterConfig(**fields)


@pytest.mark.parametrize(("fields", "message"), BAD_PARALLEL, ids=lambda value: str(value)[:60])
def test_bad_parallel_sizes(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**fields)


def test_a_bad_size_multiple() -> None:
    with pytest.raises(ValueError, match="size_multiple must be at least 1, got 0"):
        QuantConfig(size_multiple=0)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (MoEConfig(**SIZES), "top_k"),
        (RouterConfig(), "renormalize"),
        (CheckpointLayout(), "transposed"),
        (QuantConfig(), "method"),
        (ParallelConfig(), "tp_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_configs_are_frozen_values(config: Any, field: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, field, 3)
    with pytest.raises(TypeError):
        type(config)(3)
    again = dataclasses.replace(config)
    assert again == config
    assert hash(again) == hash(config)


# --- Hugging Face configs -------------------------------------------------------------------------

QWEN3 = dict(
    model_type="qwen3_moe",
    num_experts=16,
    num_experts_per_tok=4,
    hidden_size=32,
    moe_intermediate_size=24,
    intermediate_size=99,
    norm_topk_prob=True,
    hidden_act="silu",
)
MIXTRAL = dict(
    model_type="mixtral",
    num_local_experts=8,
    num_experts_per_tok=2,
    hidden_size=32,
    intermediate_size=24,
    hidden_act="silu",
)
DEEPSEEK = dict(
    model_type="deepseek_v3",
    n_routed_experts=32,
    num_experts_per_tok=6,
    hidden_size=32,
    moe_intermediate_size=24,
    intermediate_size=99,
    norm_topk_prob=True,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    hidden_act="silu",
)
# As published: without swiglu_alpha, which later transformers versions have.
GPT_OSS = dict(
    model_type="gpt_oss",
    num_local_experts=32,
    num_experts_per_tok=4,
    hidden_size=32,
    intermediate_size=24,
    swiglu_limit=7.0,
    hidden_act="silu",
)

LAYOUT = CheckpointLayout(transposed=False, interleaved=False)
EXPECTED: dict[str, MoEConfig] = {
    "qwen3_moe": MoEConfig(
        num_experts=16,
        top_k=4,
        hidden_size=32,
        intermediate_size=24,
        router=RouterConfig(scoring_func="softmax", renormalize=True),
        layout=LAYOUT,
    ),
    "mixtral": MoEConfig(
        num_experts=8,
        top_k=2,
        hidden_size=32,
        intermediate_size=24,
        router=RouterConfig(scoring_func="softmax", renormalize=True),
        layout=LAYOUT,
    ),
    "deepseek_v3": MoEConfig(
        num_experts=32,
        top_k=6,
        hidden_size=32,
        intermediate_size=24,
        router=RouterConfig(
            scoring_func="sigmoid",
            renormalize=True,
            use_grouped_topk=True,
            num_expert_group=8,
            topk_group=4,
            e_score_correction_bias=True,
            routed_scaling_factor=2.5,
        ),
        layout=LAYOUT,
    ),
    "gpt_oss": MoEConfig(
        num_experts=32,
        top_k=4,
        hidden_size=32,
        intermediate_size=24,
        has_bias=True,
        activation=Activation(name="swigluoai", alpha=1.702, limit=7.0),
        router=RouterConfig(scoring_func="softmax", softmax_after_topk=True, renormalize=False),
        layout=CheckpointLayout(transposed=True, interleaved=True),
    ),
}
DICTS = {d["model_type"]: d for d in (QWEN3, MIXTRAL, DEEPSEEK, GPT_OSS)}
CLASSES = {
    "qwen3_moe": "Qwen3MoeConfig",
    "mixtral": "MixtralConfig",
    "deepseek_v3": "DeepseekV3Config",
    "gpt_oss": "GptOssConfig",
}


@pytest.mark.parametrize("family", DICTS)
def test_from_a_config_json(family: str) -> None:
    assert MoEConfig.from_hf(DICTS[family]) == EXPECTED[family]


@pytest.mark.parametrize("family", DICTS)
def test_from_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    fields = {key: value for key, value in DICTS[family].items() if key != "model_type"}
    hf_config = getattr(transformers, CLASSES[family])(**fields)
    assert MoEConfig.from_hf(hf_config) == EXPECTED[family]
    # What transformers writes into a config.json, where it may rename what it read.
    assert MoEConfig.from_hf(hf_config.to_dict()) == EXPECTED[family]


def test_flags_are_read_not_assumed() -> None:
    for family in (QWEN3, DEEPSEEK):
        config = MoEConfig.from_hf({**family, "norm_topk_prob": False})
        assert not config.router.renormalize
    config = MoEConfig.from_hf({**GPT_OSS, "swiglu_alpha": 1.5, "swiglu_limit": 3.0})
    assert config.activation == Activation(name="swigluoai", alpha=1.5, limit=3.0)


@pytest.mark.parametrize(
    ("hidden_act", "name"),
    [
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("relu2", "relu2"),
    ],
)
def test_names_of_activations(hidden_act: str, name: str) -> None:
    assert MoEConfig.from_hf({**MIXTRAL, "hidden_act": hidden_act}).activation.name == name


@pytest.mark.parametrize("hidden_act", ["gelu_new", "quick_gelu", "tanh"])
def test_an_unknown_activation(hidden_act: str) -> None:
    with pytest.raises(ValueError, match=f"unknown activation '{hidden_act}'; choose one of silu,"):
        MoEConfig.from_hf({**MIXTRAL, "hidden_act": hidden_act})


@pytest.mark.parametrize(
    ("entries", "dtype"),
    [
        ({}, torch.float32),
        (dict(dtype="bfloat16"), torch.bfloat16),
        (dict(torch_dtype="float16"), torch.float16),
        (dict(dtype=None, torch_dtype="bfloat16"), torch.bfloat16),
        (dict(dtype=torch.bfloat16), torch.bfloat16),
        (dict(dtype="torch.bfloat16"), torch.bfloat16),
        (dict(dtype="auto"), torch.float32),
    ],
    ids=str,
)
def test_the_dtype(entries: dict[str, Any], dtype: torch.dtype) -> None:
    assert MoEConfig.from_hf({**QWEN3, **entries}).params_dtype == dtype


def test_the_dtype_of_a_transformers_config() -> None:
    transformers = pytest.importorskip("transformers")
    hf_config = transformers.MixtralConfig(dtype="bfloat16")
    assert MoEConfig.from_hf(hf_config).params_dtype == torch.bfloat16
    assert MoEConfig.from_hf(hf_config.to_dict()).params_dtype == torch.bfloat16


def test_an_unknown_family() -> None:
    with pytest.raises(ValueError, match=r"model_type 'llama' is not in the table .*: qwen3_moe, "):
        MoEConfig.from_hf({**QWEN3, "model_type": "llama"})


@pytest.mark.parametrize("name", ["model_type", "num_experts_per_tok", "norm_topk_prob"])
@pytest.mark.parametrize("as_object", [False, True])
def test_a_missing_entry(name: str, as_object: bool) -> None:
    class Object:
        pass

    entries = {key: value for key, value in QWEN3.items() if key != name}
    hf_config: Any = entries
    if as_object:
        hf_config = Object()
        hf_config.dtype = None
        for key, value in entries.items():
            setattr(hf_config, key, value)
    with pytest.raises(ValueError, match=f"the Hugging Face config has no '{name}'; is it of anot"):
        MoEConfig.from_hf(hf_config)


@pytest.mark.parametrize("name", ["n_group", "topk_group"])
def test_groups_that_are_null(name: str) -> None:
    # transformers' own router cannot run such a config, so there is no routing to agree with.
    field = {"n_group": "num_expert_group"}.get(name, name)
    with pytest.raises(ValueError, match=f"{field} must be an int, got None"):
        MoEConfig.from_hf({**DEEPSEEK, name: None})


def test_one_group() -> None:
    config = MoEConfig.from_hf({**DEEPSEEK, "n_group": 1, "topk_group": 1})
    assert (config.router.num_expert_group, config.router.topk_group) == (1, 1)


@pytest.mark.parametrize("on_output", [False, True])
def test_the_routed_scale_acts_in_one_place(on_output: bool) -> None:
    router = RouterConfig(routed_scaling_factor=2.5, apply_routed_scale_to_output=on_output)
    scales = (router.scale_on_weights(), router.scale_on_output())
    assert scales == ((1.0, 2.5) if on_output else (2.5, 1.0))


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"num_experts": True}, "num_experts must be a positive int, got True"),
        ({"num_experts": "16"}, "num_experts must be a positive int, got '16'"),
        ({"num_experts_per_tok": 4.0}, "top_k must be a positive int, got 4.0"),
        ({"hidden_size": [32]}, r"hidden_size must be a positive int, got \[32\]"),
        ({"norm_topk_prob": "false"}, "renormalize must be True or False, got 'false'"),
        ({"norm_topk_prob": 1}, "renormalize must be True or False, got 1"),
        ({"hidden_act": []}, r"the activation of qwen3_moe must be a name, got \[\]"),
        ({"hidden_act": None}, "the activation of qwen3_moe must be a name, got None"),
        ({"dtype": "flaot16"}, "dtype of the Hugging Face config is 'flaot16', which torch does"),
        ({"dtype": 16}, "dtype of the Hugging Face config is 16, which torch does not have"),
        (
            {"dtype": "int8"},
            r"params_dtype must be a float dtype such as torch\.bfloat16, got torch\.int8",
        ),
        ({"model_type": []}, r"model_type of the Hugging Face config must be a string, got \[\]"),
    ],
    ids=str,
)
def test_nonsense_in_a_config(entries: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        MoEConfig.from_hf({**QWEN3, **entries})


@pytest.mark.parametrize(
    ("family", "entries", "match"),
    [
        (DEEPSEEK, {"n_group": True}, "num_expert_group must be an int, got True"),
        (DEEPSEEK, {"routed_scaling_factor": "2.5"}, "factor must be finite, got '2.5'"),
        (DEEPSEEK, {"routed_scaling_factor": True}, "factor must be finite, got True"),
        (GPT_OSS, {"swiglu_limit": "7"}, "activation limit must be a number, got '7'"),
        (GPT_OSS, {"swiglu_alpha": True}, "activation alpha must be a number, got True"),
    ],
    ids=str,
)
def test_nonsense_in_routing_or_activation(
    family: dict[str, Any], entries: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        MoEConfig.from_hf({**family, **entries})


@pytest.mark.parametrize("nonsense", [None, [], "qwen3_moe", 3])
def test_what_is_no_config_at_all(nonsense: Any) -> None:
    with pytest.raises(ValueError, match="the Hugging Face config has no 'model_type'"):
        MoEConfig.from_hf(nonsense)


def test_the_part_that_has_experts() -> None:
    outer = {"model_type": "some_vl", "dtype": "bfloat16", "text_config": QWEN3, "seed": 3}
    assert moe_part(outer) is QWEN3
    config = MoEConfig.from_hf(outer)
    assert config == dataclasses.replace(EXPECTED["qwen3_moe"], params_dtype=torch.bfloat16)
    deeper = {"model_type": "omni", "thinker_config": {"model_type": "thinker", "text": QWEN3}}
    assert moe_part(deeper) is QWEN3


def test_several_parts_with_experts() -> None:
    outer = {"model_type": "omni", "a": QWEN3, "b": MIXTRAL}
    with pytest.raises(ValueError, match="several parts with experts: qwen3_moe, mixtral; give on"):
        MoEConfig.from_hf(outer)


def test_a_choice_that_the_row_does_not_have() -> None:
    deepseek_v2 = {**DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "noaux_tc"}
    with pytest.raises(
        ValueError, match="topk_method of the Hugging Face config is 'noaux_tc'; ch"
    ):
        MoEConfig.from_hf(deepseek_v2)
    grouped = MoEConfig.from_hf({**deepseek_v2, "topk_method": "group_limited_greedy"}).router
    assert (grouped.num_expert_group, grouped.topk_group, grouped.renormalize) == (8, 4, False)
    greedy = MoEConfig.from_hf({**deepseek_v2, "topk_method": "greedy", "n_group": None}).router
    assert not greedy.use_grouped_topk


def test_experts_without_a_gate() -> None:
    nemotron = {**DEEPSEEK, "model_type": "nemotron_h", "mlp_hidden_act": "relu2"}
    assert MoEConfig.from_hf(nemotron).activation == Activation(name="relu2_no_mul")
    assert MoEConfig.from_hf({**nemotron, "moe_latent_size": None}).hidden_size == 32
    assert MoEConfig.from_hf({**nemotron, "moe_latent_size": 16}).hidden_size == 16
