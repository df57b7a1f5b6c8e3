"""The table of families as data; tests/integrations/transformers holds it against models."""

from __future__ import annotations

import dataclasses
import re
import sys
import textwrap
from pathlib import Path

import pytest

from cmoe.activation import Activation
from cmoe.config import MoEConfig, RouterConfig
from cmoe.families import FAMILIES, SWITCH_ONLY, Attr, Family, family_of

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


@pytest.mark.parametrize("model_type", SWITCH_ONLY)
def test_a_family_without_a_row_has_its_reason(model_type: str) -> None:
    with pytest.raises(
        ValueError, match=f"'{model_type}' is served by the experts switch"
    ) as error:
        family_of(model_type)
    assert SWITCH_ONLY[model_type] in str(error.value)


def test_the_names_of_a_runner() -> None:
    pairs = dict(family_of("hunyuan_v1_moe").runner_names())
    assert pairs["experts.gate_up_proj"] == "routed_experts.w13_weight"
    assert pairs["gate.wg."] == "gate."
    assert pairs["shared_mlp."] == "shared_experts.mlp."
    pairs = dict(family_of("nemotron_h").runner_names())
    assert pairs["experts.up_proj"] == "routed_experts.w13_weight"
    assert pairs["gate.e_score_correction_bias"] == "router.e_score_correction_bias"
    assert pairs["fc1_latent_proj."] == "input_transform."


@ROWS
def test_a_routers_bias_has_a_place(family: Family) -> None:
    has_bias = family.router.get("e_score_correction_bias", False)
    assert bool(has_bias) == (family.modules.correction_bias is not None)


DOCS = (Path(__file__).parents[1] / "docs" / "families.md").read_text("utf-8")
MEASURED_NOWHERE = {"dots3_note_vision_encoder"}  # It takes images.


def test_the_docs_have_a_line_for_every_family() -> None:
    """`make families` writes them anew."""
    in_docs = set(re.findall(r"^\| `(\w+)` ", DOCS, flags=re.MULTILINE))
    assert in_docs == {f.model_type for f in FAMILIES} | {*SWITCH_ONLY} - MEASURED_NOWHERE
    for model_type in {*SWITCH_ONLY} - MEASURED_NOWHERE:
        assert SWITCH_ONLY[model_type] in DOCS


def test_the_readme_counts_the_families() -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    switched = len(SWITCH_ONLY) - len(MEASURED_NOWHERE)
    assert f"{len(FAMILIES)} whole, {switched} more by the switch" in readme
    assert f"## {len(FAMILIES)} families whole" in DOCS


def test_the_row_that_contributing_shows_is_the_tables() -> None:
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    _, _, example = text.partition("## Add a model family")
    shown = textwrap.dedent(example.partition("```python\n")[2].partition("```")[0])
    table = Path(sys.modules[family_of.__module__].__file__ or "").read_text("utf-8")
    assert textwrap.indent(shown.strip(), "    ") in table
