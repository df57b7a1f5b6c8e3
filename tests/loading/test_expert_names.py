"""What expert tensors are called."""

from __future__ import annotations

import pytest
import torch

from cmoe.loading.expert_names import (
    ExpertTensorName,
    maybe_remap_moe_expert_param_name,
    parse_expert_name,
    remap_moe_expert_weights,
    sibling_name,
)

PREFIXES = ["", "mlp.", "model.layers.11.mlp.", "model.layers.0.block_sparse_moe.", "a.b.c.d.e."]

NAMES = {
    "experts.7.gate_proj.weight": (7, "w1", False, False),
    "experts.7.up_proj.weight": (7, "w3", False, False),
    "experts.7.down_proj.weight": (7, "w2", False, False),
    "experts.0.w1.weight": (0, "w1", False, False),
    "experts.0.w3.weight": (0, "w3", False, False),
    "experts.0.w2.weight": (0, "w2", False, False),
    "experts.127.gate_proj.bias": (127, "w1", True, False),
    "experts.127.down_proj.bias": (127, "w2", True, False),
    "experts.3.gate_up_proj.weight": (3, "w13", False, False),
    "experts.3.w2_weight": (3, "w2", False, False),
    "experts.gate_up_proj": (None, "w13", False, False),
    "experts.down_proj": (None, "w2", False, False),
    "experts.up_proj": (None, "w3", False, False),
    "experts.gate_up_proj.weight": (None, "w13", False, False),
    "experts.gate_up_proj_bias": (None, "w13", True, False),
    "experts.down_proj_bias": (None, "w2", True, False),
    "experts.w13_weight": (None, "w13", False, True),
    "experts.w2_weight": (None, "w2", False, True),
    "experts.w13_bias": (None, "w13", True, True),
    "routed_experts.w2_bias": (None, "w2", True, True),
    "experts.routed_experts.w13_weight": (None, "w13", False, True),
    "experts.w2.weight": (None, "w2", False, False),
}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", NAMES)
def test_expert_tensors_are_understood_at_any_depth(name: str, prefix: str) -> None:
    assert parse_expert_name(prefix + name) == ExpertTensorName(*NAMES[name])


@pytest.mark.parametrize(
    "name",
    [
        "mlp.gate.weight",
        "mlp.gate_proj.weight",
        "shared_experts.gate_proj.weight",
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_expert.down_proj.weight",
        "myexperts.0.gate_proj.weight",
        "experts.0.gate_proj.weight_scale_inv",
        "experts.0.gate_proj.qweight",
        "experts.gate_up_proj_blocks",
        "experts.gate_up_proj_scales",
        "experts.w13_weight_scale",
        "experts.w13_weight.0",
        "experts.x.gate_proj.weight",
        "experts.-1.gate_proj.weight",
        "experts.0.1.gate_proj.weight",
        "experts.0.base_layer.gate_proj.weight",
        "experts.0.new_gate_proj.weight",
        "experts..gate_proj.weight",
        "experts.0.gate_proj.weight ",
        "",
    ],
)
def test_everything_else_is_no_expert_tensor(name: str) -> None:
    assert parse_expert_name(name) is None


PARTS = ["w13_weight", "w2_weight", "w13_bias", "w2_bias", "w13_weight_scale", "w2_qzeros"]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("part", PARTS)
def test_old_paths_are_translated_at_any_depth(prefix: str, part: str) -> None:
    new = f"{prefix}experts.routed_experts.{part}"
    assert maybe_remap_moe_expert_param_name(f"{prefix}experts.{part}", {new}) == new


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_is_right_stays(prefix: str) -> None:
    old, new = (f"{prefix}experts.{middle}w13_weight" for middle in ("", "routed_experts."))
    assert maybe_remap_moe_expert_param_name(new, {new}) == new
    assert maybe_remap_moe_expert_param_name(old, {old, new}) == old
    assert maybe_remap_moe_expert_param_name(new, {old}) == new


@pytest.mark.parametrize(
    "name",
    ["mlp.experts.w13_weight", "mlp.gate.weight", "experts", "shared_experts.w2_weight", ""],
)
def test_what_has_no_home_stays(name: str) -> None:
    params = {"other.experts.routed_experts.w13_weight", "shared_experts.routed_experts.w2_weight"}
    assert maybe_remap_moe_expert_param_name(name, params) == name


@pytest.mark.parametrize(
    "new",
    [
        "experts.routed_experts.experts.w2_weight",
        "experts.experts.routed_experts.w2_weight",
    ],
)
def test_the_right_one_of_two_places_is_found(new: str) -> None:
    assert maybe_remap_moe_expert_param_name("experts.experts.w2_weight", {new}) == new


def test_pairs_are_translated_as_they_come() -> None:
    params = {"mlp.experts.routed_experts.w2_weight", "norm.weight"}
    tensor, norm = torch.ones(1), torch.ones(2)
    given = iter([("mlp.experts.w2_weight", tensor), ("norm.weight", norm), ("lost", norm)])
    remapped = remap_moe_expert_weights(given, params)
    name, first = next(remapped)
    assert (name, first) == ("mlp.experts.routed_experts.w2_weight", tensor)
    assert first is tensor
    assert next(given)[0] == "norm.weight"  # nothing was read ahead
    assert [name for name, _ in remapped] == ["lost"]


@pytest.mark.parametrize(
    ("key", "part", "is_bias", "expected"),
    [
        ("a.experts.0.gate_proj.weight", "w2", False, "a.experts.3.down_proj.weight"),
        ("a.experts.0.w1.weight", "w3", False, "a.experts.3.w3.weight"),
        ("a.experts.0.w1.weight", "w2", True, "a.experts.3.w2.bias"),
        ("experts.gate_up_proj", "w2", False, "experts.down_proj"),
        ("experts.gate_up_proj", "w13", True, "experts.gate_up_proj_bias"),
        ("experts.down_proj_bias", "w13", False, "experts.gate_up_proj"),
        ("experts.down_proj.weight", "w3", False, "experts.up_proj.weight"),
        ("routed_experts.w13_weight", "w2", True, "routed_experts.w2_bias"),
    ],
)
def test_another_part_in_the_same_manner(key: str, part: str, is_bias: bool, expected: str) -> None:
    assert sibling_name(key, expert=3, part=part, is_bias=is_bias) == expected
