"""The table of families, against what transformers' own classes say."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest
import torch

from cmoe.activation import Activation
from cmoe.config import MoEConfig, RouterConfig
from cmoe.families import FAMILIES, Attr, Family, family_of

ROWS = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


def test_the_first_four_families() -> None:
    known = [family.model_type for family in FAMILIES]
    assert {"qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"} <= set(known)
    assert len(set(known)) == len(known)


@ROWS
def test_a_row_is_found_by_its_model_type(family: Family) -> None:
    assert family_of(family.model_type) is family


def test_an_unknown_model_type() -> None:
    with pytest.raises(
        ValueError, match=r"model_type 'qwen' is not .*; known: qwen3_moe, mixtral, "
    ):
        family_of("qwen")


@ROWS
def test_a_row_names_fields_that_exist(family: Family) -> None:
    for fields, cls in (
        (family.config, MoEConfig),
        (family.router, RouterConfig),
        (family.activation, Activation),
    ):
        assert set(fields) <= {field.name for field in dataclasses.fields(cls)}


@ROWS
def test_a_row_is_frozen(family: Family) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.block = "other"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Attr("a").name = "b"


def modeling_of(family: Family) -> Any:
    pytest.importorskip("transformers")
    name = family.model_type
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def tiny_block(family: Family) -> tuple[Any, torch.nn.Module]:
    """The family's Hugging Face config with odd sizes, and its sparse block on the meta device."""
    modeling = modeling_of(family)
    block = getattr(modeling, family.block)
    config_class = next(
        cls
        for name, cls in vars(modeling).items()
        if name.endswith("Config") and getattr(cls, "model_type", None) == family.model_type
    )
    sizes = {"num_experts": 16, "top_k": 2, "hidden_size": 24, "intermediate_size": 20}
    attributes = {family.config[field].name: size for field, size in sizes.items()}
    hf_config = config_class(**attributes)
    with torch.device("meta"):
        return hf_config, block(hf_config)


@ROWS
def test_the_blocks_modules_have_the_names_of_the_row(family: Family) -> None:
    _, block = tiny_block(family)
    children = dict(block.named_children())
    shared = set() if family.shared_experts is None else {family.shared_experts}
    assert set(children) == {"experts", family.gate} | shared
    assert children[family.gate].weight.shape == (16, 24)


@ROWS
def test_the_fused_weights_lie_as_the_row_says(family: Family) -> None:
    hf_config, block = tiny_block(family)
    config = MoEConfig.from_hf(hf_config)
    assert (config.layout.transposed, config.layout.interleaved) == (
        family.transposed,
        family.interleaved,
    )
    gate_up, down = (16, 40, 24), (16, 24, 20)
    if family.transposed:
        gate_up, down = (16, 24, 40), (16, 20, 24)
    assert block.experts.gate_up_proj.shape == gate_up
    assert block.experts.down_proj.shape == down
    assert hasattr(block.experts, "down_proj_bias") == config.has_bias
    source = inspect.getsource(type(block.experts))
    assert ("::2]" in source) == family.interleaved


@ROWS
def test_the_router_says_whether_it_has_a_bias(family: Family) -> None:
    hf_config, block = tiny_block(family)
    gate = getattr(block, family.gate)
    has_bias = "e_score_correction_bias" in dict(gate.named_buffers())
    assert has_bias == MoEConfig.from_hf(hf_config).router.e_score_correction_bias


@ROWS
def test_what_the_block_returns(family: Family) -> None:
    _, block = tiny_block(family)
    y = block.to_empty(device="cpu").eval()
    for tensor in [*y.parameters(), *y.buffers()]:
        torch.nn.init.zeros_(tensor)
    y = block(torch.zeros(1, 3, 24))
    assert isinstance(y, tuple) == family.returns_router_scores
