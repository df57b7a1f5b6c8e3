"""Saving: the bits that were loaded, under the same names, or nothing at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import cmoe
from cmoe import LoadError
from cmoe.checkpoint import Checkpoint, load_model, open_checkpoint, save_model, write
from cmoe.checkpoint import save as save_module
from tests.checkpoint.test_load import (
    Model,
    model_tensors,
    packable_model,
    packable_tensors,
    saved,
)
from tests.packable import strips_backend


def another() -> Model:
    """A model with the names of those that live already."""
    with cmoe.static_context():
        return Model()


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = (load_file(path) for path in sorted(folder.glob("*.safetensors")))
    return {name: tensor for file in files for name, tensor in file.items()}


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(actual) == set(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[Model, Checkpoint]:
    (tmp_path / "from").mkdir()
    checkpoint = saved(tmp_path / "from", model_tensors(), hidden_act="silu")
    model = another()
    load_model(model, checkpoint)
    return model, checkpoint


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 2000, 1])
def test_a_round_trip_gives_the_same_bits(
    max_shard_bytes: int, loaded: tuple[Model, Checkpoint], tmp_path: Path
) -> None:
    model, checkpoint = loaded
    files = save_model(model, tmp_path / "to", checkpoint, max_shard_bytes=max_shard_bytes)
    again = open_checkpoint(tmp_path / "to")
    assert_same_bits(tensors_of(tmp_path / "to"), tensors_of(tmp_path / "from"))
    assert {info.shard for info in again.tensors.values()} == set(files)
    assert len(files) == {1 << 30: 1, 1: len(checkpoint.tensors)}.get(max_shard_bytes, len(files))
    assert again.config == {**checkpoint.config, "torch_dtype": "float32"}
    other = another()
    load_model(other, again)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


@pytest.mark.parametrize("layout", ["fused", "per_expert"])
def test_the_other_layout_holds_the_same(
    layout: Any, loaded: tuple[Model, Checkpoint], tmp_path: Path
) -> None:
    model, checkpoint = loaded
    save_model(model, tmp_path / "fused", checkpoint, layout="fused")
    fused = open_checkpoint(tmp_path / "fused")
    assert fused.tensors["layers.0.mlp.experts.gate_up_proj"].shape == (5, 16, 16)
    other = another()
    load_model(other, fused)
    save_model(other, tmp_path / "back", fused, layout="per_expert")
    assert_same_bits(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "from"))
    same = tmp_path / "same"
    save_model(other, same, fused if layout == "fused" else checkpoint, layout=layout)
    assert set(open_checkpoint(same).tensors) == set(
        (fused if layout == "fused" else checkpoint).tensors
    )


def test_files_are_those_of_the_library(loaded: tuple[Model, Checkpoint], tmp_path: Path) -> None:
    """Byte for byte, for the tensors in the order that it writes them in."""
    model, checkpoint = loaded
    (path,) = save_model(model, tmp_path / "to", checkpoint)
    save_file(load_file(path), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert path.stat().st_size == (tmp_path / "theirs.safetensors").stat().st_size


def test_a_model_that_was_changed_saves_what_it_has(
    loaded: tuple[Model, Checkpoint], tmp_path: Path
) -> None:
    model, checkpoint = loaded
    with torch.no_grad():
        model.layers[1].mlp.routed_experts.w2_weight[3] += 1
    save_model(model, tmp_path / "to", checkpoint)
    before, after = tensors_of(tmp_path / "from"), tensors_of(tmp_path / "to")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"layers.1.mlp.experts.3.down_proj.weight"}


def test_dtypes_are_the_models(loaded: tuple[Model, Checkpoint], tmp_path: Path) -> None:
    model, checkpoint = loaded
    save_model(model.to(torch.bfloat16), tmp_path / "to", checkpoint)
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(tmp_path / "to").items()}
    assert dtypes.pop("steps") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}
    assert open_checkpoint(tmp_path / "to").config["torch_dtype"] == "bfloat16"


def test_a_failure_leaves_nothing(
    loaded: tuple[Model, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoint = loaded

    def fail(*arguments: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(save_module, "write_json", fail)
    with pytest.raises(OSError, match="No space left"):
        save_model(model, tmp_path / "to", checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["from"]


def test_a_folder_in_use_is_left_alone(loaded: tuple[Model, Checkpoint], tmp_path: Path) -> None:
    model, checkpoint = loaded
    before = {path.name: path.read_bytes() for path in (tmp_path / "from").iterdir()}
    for folder in (tmp_path / "from", tmp_path / "from" / "config.json"):
        with pytest.raises(ValueError, match="is there already; save into a new folder"):
            save_model(model, folder, checkpoint)
    assert {path.name: path.read_bytes() for path in (tmp_path / "from").iterdir()} == before
    (tmp_path / "empty").mkdir()
    save_model(model, tmp_path / "empty", checkpoint)


def test_a_link_is_followed(loaded: tuple[Model, Checkpoint], tmp_path: Path) -> None:
    model, checkpoint = loaded
    (tmp_path / "there").mkdir()
    for name in ("there", "nowhere yet"):
        link = tmp_path / f"link to {name}"
        link.symlink_to(tmp_path / name)
        save_model(model, link, checkpoint)
        assert_same_bits(tensors_of(tmp_path / name), tensors_of(tmp_path / "from"))
        with pytest.raises(ValueError, match="is there already"):
            save_model(model, link, checkpoint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layout": "fusd"}, "unknown layout 'fusd'; choose one of original, per_expert, fused"),
        ({"max_shard_bytes": 0}, "max_shard_bytes must be at least 1, got 0"),
        ({"ignore": "bias"}, "ignore is a list of regular expressions, got 'bias' alone"),
        ({"ignore": ["("]}, r"ignore: '\(' is no regular expression \(missing \)"),
    ],
)
def test_what_cannot_be_meant(
    arguments: dict[str, Any], message: str, loaded: tuple[Model, Checkpoint], tmp_path: Path
) -> None:
    model, checkpoint = loaded
    with pytest.raises(ValueError, match=message):
        save_model(model, tmp_path / "to", checkpoint, **arguments)
    assert not (tmp_path / "to").exists()


def test_a_disk_that_is_full(
    loaded: tuple[Model, Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoint = loaded
    before = set(tmp_path.iterdir())

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(write.os, "fsync", full)
    message = r"to cannot be written, nothing of it is left \(No space left on device\)"
    with pytest.raises(OSError, match=message) as raised:
        save_model(model, tmp_path / "to", checkpoint)
    assert raised.value.errno == errno.ENOSPC
    assert set(tmp_path.iterdir()) == before


def test_a_place_below_a_file(loaded: tuple[Model, Checkpoint], tmp_path: Path) -> None:
    model, checkpoint = loaded
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"file/to cannot be written.*\(Not a directory\)"):
        save_model(model, tmp_path / "file" / "to", checkpoint)
    assert (tmp_path / "file").read_text() == "x"


def test_a_checkpoint_of_another_model(loaded: tuple[Model, Checkpoint], tmp_path: Path) -> None:
    model, checkpoint = loaded
    model.layers[0].norm.register_parameter("scale", nn.Parameter(torch.ones(1)))
    with pytest.raises(LoadError, match=r"missing layers\.0\.norm\.scale"):
        save_model(model, tmp_path / "to", checkpoint)
    del model.layers[0].norm.scale, model.layers[0].norm.bias
    model.layers[0].norm.bias = None
    with pytest.raises(LoadError, match=r"no home for layers\.0\.norm\.bias"):
        save_model(model, tmp_path / "to", checkpoint)
    assert not (tmp_path / "to").exists()
    save_model(model, tmp_path / "to", checkpoint, ignore=[r"layers\.0\.norm\.bias"])


def test_padding_is_not_saved(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    tensors = model_tensors()
    checkpoint = saved(tmp_path / "from", tensors)
    model = another()
    config = cmoe.MoEConfig(
        num_experts=5,
        top_k=2,
        hidden_size=16,
        intermediate_size=8,
        quant=cmoe.QuantConfig(size_multiple=12),
    )
    for layer in range(2):
        gate = cmoe.GateLinear(16, 5)
        model.layers[layer]["mlp"] = cmoe.FusedMoE(config, f"padded.{layer}", gate=gate)
    load_model(model, checkpoint)
    save_model(model, tmp_path / "to", checkpoint)
    assert_same_bits(tensors_of(tmp_path / "to"), tensors)


def test_config_keeps_the_name_of_its_dtype(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    checkpoint = saved(tmp_path / "from", model_tensors(), dtype="float16", extra=[1, {"a": None}])
    model = another()
    load_model(model, checkpoint)
    save_model(model, tmp_path / "to", checkpoint)
    content = json.loads((tmp_path / "to" / "config.json").read_text())
    assert content == {**checkpoint.config, "dtype": "float32"}


@pytest.mark.parametrize("layout", ["original", "fused", "per_expert"])
def test_packed_weights_are_saved_as_they_were(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value by value, no whole weight is unpacked for it."""

    def forbidden(weight: Tensor) -> Tensor:
        raise AssertionError("a whole weight was unpacked")

    (tmp_path / "from").mkdir()
    checkpoint = saved(tmp_path / "from", packable_tensors())
    with strips_backend():
        model = packable_model()
        load_model(model, checkpoint)
        save_model(model, tmp_path / "plain", checkpoint, layout=layout)
        cmoe.pack_weights(model)
        monkeypatch.setattr("cmoe.routed_experts.unpack", forbidden)
        save_model(model, tmp_path / "packed", checkpoint, layout=layout)
        assert_same_bits(tensors_of(tmp_path / "packed"), tensors_of(tmp_path / "plain"))
        before = {name: p.clone() for name, p in model.named_parameters()}
        load_model(model, open_checkpoint(tmp_path / "packed"))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
