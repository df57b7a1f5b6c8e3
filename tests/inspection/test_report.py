"""What `cmoe inspect` says of folders whose tensors nobody could read: there are none."""

from __future__ import annotations

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from cmoe import LoadError
from cmoe.inspection import defaults, report
from cmoe.inspection.bandwidth import read_gbps
from cmoe.inspection.report import inspect_folder

QWEN = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": 16,
    "moe_intermediate_size": 8,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "read_gbps", lambda device: 10.0)


def block(prefix: str, **sizes: int) -> dict[str, list[int]]:
    experts, hidden, inter = (sizes.get(k, d) for k, d in (("e", 4), ("h", 16), ("i", 8)))
    shapes = {f"{prefix}.gate.weight": [experts, hidden]}
    for expert in range(experts):
        shapes[f"{prefix}.experts.{expert}.gate_proj.weight"] = [inter, hidden]
        shapes[f"{prefix}.experts.{expert}.up_proj.weight"] = [inter, hidden]
        shapes[f"{prefix}.experts.{expert}.down_proj.weight"] = [hidden, inter]
    return shapes


def folder_of(folder: Path, shapes: dict[str, list[int]], config: dict[str, Any]) -> Path:
    """A file of holes: its tensors take no room."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def two_blocks() -> dict[str, list[int]]:
    shapes = {"model.embed_tokens.weight": [11, 16], "model.norm.weight": [16]}
    for layer in (1, 2):
        shapes |= block(f"model.layers.{layer}.mlp")
    return shapes


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    text, is_loadable = inspect_folder(folder_of(tmp_path, two_blocks(), QWEN))
    assert is_loadable
    experts = 2 * 4 * 3 * 16 * 8 * 2
    for line in (
        "family       qwen3_moe (Qwen3MoeSparseMoeBlock in transformers)",
        "routing      the 2 of 4 experts of highest score; score: softmax over all experts",
        "experts      4 of hidden size 16, intermediate size 8, silu, bfloat16",
        "blocks       2: model.layers.1.mlp ... model.layers.2.mlp (num_hidden_layers is 3)",
        f"bytes        routed experts {experts / 1e3:.2f} kB of",
        "8 x model.layers.#.mlp.experts.#.up_proj.weight [8, 16] bfloat16 -> w13_weight[#].w3",
        "2 x model.layers.#.mlp.gate.weight [4, 16] bfloat16 -> gate.weight",
        "not judged   2 tensors outside of the blocks, 384 bytes",
        "model.embed_tokens.weight, model.norm.weight: whether the model needs these",
        "missing      nothing",
        "unused       nothing",
        "reference: can run",
        "for the weights as stored",
        f"{experts / 2 / 1e3:.2f} kB / 10.0 GB/s = {experts / 2 / 1e10 * 1e3:.3g} ms a token",
    ):
        assert line in text, line


def test_missing_and_unused_tensors_are_named(tmp_path: Path) -> None:
    shapes = two_blocks() | {"model.layers.1.mlp.experts.0.norm.weight": [16]}
    del shapes["model.layers.2.mlp.experts.3.up_proj.weight"]
    text, is_loadable = inspect_folder(folder_of(tmp_path, shapes, QWEN))
    assert not is_loadable
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    assert f"missing      {name} (for w13_weight[3].w3) in 1 blocks from model.layers.2.mlp" in text
    assert "unused       model.layers.1.mlp.experts.0.norm.weight" in text


def test_a_shape_that_does_not_fit(tmp_path: Path) -> None:
    config = QWEN | {"moe_intermediate_size": 9}
    text, is_loadable = inspect_folder(folder_of(tmp_path, two_blocks(), config))
    assert not is_loadable
    assert "does not fit model.layers.1.mlp" in text
    assert "shape (8, 16) should be (9, 16)" in text


def test_the_family_that_the_tensors_look_like(tmp_path: Path) -> None:
    shapes = {n.replace(".mlp.", ".block_sparse_moe."): s for n, s in two_blocks().items()}
    shapes["model.layers.1.block_sparse_moe.e_score_correction_bias"] = [4]
    text, is_loadable = inspect_folder(folder_of(tmp_path, shapes, QWEN))
    assert not is_loadable
    assert "the tensors look like" in text
    assert "minimax_m2" in text


def test_a_family_of_the_switch_alone(tmp_path: Path) -> None:
    text, is_loadable = inspect_folder(
        folder_of(tmp_path, two_blocks(), {"model_type": "deepseek_v4"})
    )
    assert is_loadable
    assert "deepseek_v4: its first layers choose experts by token id" in text
    assert "24 expert tensors" in text
    assert "not judged   all tensors: transformers loads them" in text


def test_what_is_not_judged_is_named_once(tmp_path: Path) -> None:
    shapes = two_blocks()
    for layer in range(3):
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = [16]
    text, _ = inspect_folder(folder_of(tmp_path, shapes, QWEN))
    assert "not judged   5 tensors outside of the blocks" in text
    assert "model.embed_tokens.weight, model.layers.#.input_layernorm.weight, model.norm" in text


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in QWEN.items() if name not in names}


def test_absent_entries_are_transformers_defaults(tmp_path: Path) -> None:
    text, is_loadable = inspect_folder(
        folder_of(tmp_path, two_blocks(), without("hidden_act", "norm_topk_prob"))
    )
    assert is_loadable
    assert "by default   norm_topk_prob = False, hidden_act = silu: config.json has none" in text
    assert "weights: the score\n" in text


def test_absent_sizes_that_do_not_fit_the_tensors(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, two_blocks(), without("hidden_size"))
    text, is_loadable = inspect_folder(folder)
    assert not is_loadable
    assert "by default   hidden_size = 2048" in text
    assert re.search(r"shape \(\d+, \d+\) should be \(\d+, 2048\)", text)


def test_absent_entries_of_a_part(tmp_path: Path) -> None:
    """The dtype of the whole model stays."""
    part = {k: v for k, v in without("hidden_act").items() if k != "dtype"}
    outer = {"model_type": "some_vl", "dtype": "float16", "text_config": part}
    text, is_loadable = inspect_folder(folder_of(tmp_path, two_blocks(), outer))
    assert is_loadable
    assert "silu, float16" in text


@pytest.mark.parametrize("absent", [("hidden_size",), ("hidden_act", "norm_topk_prob")])
def test_absent_entries_where_transformers_is_absent_too(
    absent: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(defaults.importlib.util, "find_spec", lambda name: None)
    folder = folder_of(tmp_path, two_blocks(), without(*absent))
    with pytest.raises(LoadError, match=r"config.json has no .*install transformers, whose defaul"):
        inspect_folder(folder)


def test_an_entry_without_a_default_anywhere(tmp_path: Path) -> None:
    config = {**without("num_experts"), "num_experts_per_tok": [], "num_local_experts": None}
    with pytest.raises(LoadError, match="num_experts"):
        inspect_folder(folder_of(tmp_path, two_blocks(), config))


def test_transformers_is_not_imported_for_a_config_that_says_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert inspect_folder(folder_of(tmp_path, two_blocks(), QWEN)).is_loadable


def test_a_setting_that_the_row_does_not_hold_for(tmp_path: Path) -> None:
    config = {
        **without("num_experts", "moe_intermediate_size"),
        "model_type": "mixtral",
        "num_local_experts": 4,
        "intermediate_size": 8,
    }
    shapes = {name.replace(".mlp.", ".block_sparse_moe."): s for name, s in two_blocks().items()}
    text, _ = inspect_folder(folder_of(tmp_path, shapes, {**config, "router_jitter_noise": 0.1}))
    assert "not replaced config.router_jitter_noise is 0.1, a replaced block does what 0.0" in text
    (tmp_path / "model.safetensors").unlink()
    text, _ = inspect_folder(folder_of(tmp_path, shapes, config))
    assert "not replaced" not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type 'llama' is not in the table.*look like"),
        ({"model_type": []}, "model_type"),
        ({"num_experts": 10**12}, r"says 1000000000000 experts of 16 x 8 a layer; is it damaged"),
        ({"hidden_size": 10**30}, r"is it damaged"),
        ({"num_experts": "many"}, "num_experts"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_experts_per_tok": 99}, "top_k"),
        ({"hidden_act": []}, "activation"),
        ({"norm_topk_prob": "yes"}, "renormalize"),
    ],
)
def test_nonsense_in_the_config(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, two_blocks(), QWEN | changes)
    with pytest.raises(LoadError, match=message):
        inspect_folder(folder)


def test_hundreds_of_gigabytes_in_a_moment(tmp_path: Path) -> None:
    """The sizes of DeepSeek-V3 in bfloat16, 1.3 TB in 44,544 expert tensors; none is read."""
    shapes = {"model.embed_tokens.weight": [129280, 7168]}
    for layer in range(3, 61):
        shapes |= block(f"model.layers.{layer}.mlp", e=256, h=7168, i=2048)
        shapes[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] = [256]
        for name in ("gate_proj", "up_proj"):
            shapes[f"model.layers.{layer}.mlp.shared_experts.{name}.weight"] = [2048, 7168]
        shapes[f"model.layers.{layer}.mlp.shared_experts.down_proj.weight"] = [7168, 2048]
    config = {
        **QWEN,
        "model_type": "deepseek_v3",
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    }
    folder = folder_of(tmp_path, shapes, config)
    start = time.perf_counter()
    text, is_loadable = inspect_folder(folder)
    assert time.perf_counter() - start < 10  # a second and a half on an idle core; reading: minutes
    assert is_loadable
    assert f"routed experts {58 * 256 * 3 * 2 * 7168 * 2048 / 1e9:.2f} GB of" in text
    assert "within the 4 best of 8 groups" in text


def test_the_bandwidth_is_that_of_a_machine() -> None:
    assert 0.5 < read_gbps(torch.device("cpu")) < 5000
