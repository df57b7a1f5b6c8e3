"""The names of missing tensors, told in the manner of those that are there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from cmoe.loading.expected_names import ExpectedNames

PER_EXPERT = ("gate_proj", "up_proj", "down_proj")
NUMBERED = ("w1", "w3", "w2")


def slots(num_experts: int = 4, block: str = "", kind: str = "weight") -> list[str]:
    rows = range(num_experts)
    return [
        *(f"{block}w13_{kind}[{row}].{part}" for row in rows for part in ("w1", "w3")),
        *(f"{block}w2_{kind}[{row}]" for row in rows),
    ]


def per_expert(words: tuple[str, ...], stem: str, block: str = "", end: str = ".weight") -> dict:
    words_of = dict(zip(("w1", "w3", "w2"), words, strict=True))
    return {
        slot: f"{stem}experts.{slot.partition('[')[2][0]}.{words_of[part]}{end}"
        for slot in slots(block=block)
        for part in (slot.rpartition(".")[2] if slot.endswith(("w1", "w3")) else "w2",)
    }


def fused(stem: str, *, gated: bool = True, down: str = "down_proj", end: str = "") -> dict:
    up = "gate_up_proj" if gated else "up_proj"
    return {
        slot: f"{stem}experts.{down if slot.startswith('w2') else up}{end}"
        for slot in slots()
        if gated or not slot.endswith("w3")
    }


def expected(all_of: Mapping[str, str], *missing: str) -> list[str]:
    rest = {slot: key for slot, key in all_of.items() if slot not in missing}
    names = ExpectedNames(rest, missing)
    return [names.of(slot) for slot in missing]


@pytest.mark.parametrize("words", [PER_EXPERT, NUMBERED])
@pytest.mark.parametrize("stem", ["", "model.layers.0.mlp.", "model.layers.3.block_sparse_moe."])
@pytest.mark.parametrize("slot", slots())
def test_one_tensor_of_one_expert(slot: str, stem: str, words: tuple[str, ...]) -> None:
    all_of = per_expert(words, stem)
    assert expected(all_of, slot) == [all_of[slot]]


@pytest.mark.parametrize("words", [PER_EXPERT, NUMBERED])
@pytest.mark.parametrize("part", ["w1", "w3", "w2_"])
def test_a_projection_of_every_expert(part: str, words: tuple[str, ...]) -> None:
    all_of = per_expert(words, "model.layers.0.mlp.")
    gone = [slot for slot in all_of if part in slot.replace("w13", "")]
    assert len(gone) == 4
    assert expected(all_of, *gone) == [all_of[slot] for slot in gone]


@pytest.mark.parametrize("end", ["", ".weight"])
@pytest.mark.parametrize("start", ["w13", "w2"])
@pytest.mark.parametrize("gated", [True, False])
def test_a_fused_tensor(gated: bool, start: str, end: str) -> None:
    all_of = fused("layers.0.mlp.", gated=gated, end=end)
    gone = [slot for slot in all_of if slot.startswith(start)]
    assert set(expected(all_of, *gone)) == {all_of[gone[0]]}


def test_the_biases_of_every_expert() -> None:
    weights = per_expert(PER_EXPERT, "mlp.")
    names = ExpectedNames(weights, ["w13_bias[2].w3", "w2_bias[1]"])
    assert names.of("w13_bias[2].w3") == "mlp.experts.2.up_proj.bias"
    assert names.of("w2_bias[1]") == "mlp.experts.1.down_proj.bias"
    names = ExpectedNames(fused("mlp."), ["w13_bias[2].w3", "w2_bias[1]"])
    assert names.of("w13_bias[2].w3") == "mlp.experts.gate_up_proj_bias"
    assert names.of("w2_bias[1]") == "mlp.experts.down_proj_bias"


def test_a_block_of_several() -> None:
    stems = {"model.layers.0.mlp.": "x.layers.0.moe.", "model.layers.1.mlp.": "x.layers.1.moe."}
    all_of: dict[str, str] = {}
    for block, stem in stems.items():
        all_of |= per_expert(NUMBERED, stem, block)
        all_of[f"{block}gate.weight"] = f"{stem}router.weight"
    all_of["lm_head.weight"] = "head.weight"
    gone = [slot for slot in all_of if slot.startswith("model.layers.1.")]
    assert expected(all_of, *gone) == [all_of[slot] for slot in gone]
    assert expected(all_of, "lm_head.weight") == ["lm_head.weight"]


def test_what_stands_beside_the_experts() -> None:
    names = ExpectedNames(per_expert(PER_EXPERT, "model.layers.0.mlp."), ["gate.weight"])
    assert names.of("gate.weight") == "model.layers.0.mlp.gate.weight"


def test_where_nothing_was_filled() -> None:
    names = ExpectedNames({}, slots(block="mlp."))
    assert names.of("mlp.w13_weight[3].w1") == "mlp.experts.3.gate_proj.weight"
    assert names.of("mlp.w2_weight[0]") == "mlp.experts.0.down_proj.weight"
    assert ExpectedNames({}, ["w13_weight[3].w1"]).of("w13_weight[3].w1") == (
        "experts.3.up_proj.weight"
    )
    assert names.of("norm.weight") == "norm.weight"
