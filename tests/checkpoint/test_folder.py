"""Folders in Hugging Face format: what is missing is named, what is there is mapped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cmoe import LoadError
from cmoe.checkpoint.folder import open_checkpoint

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def tensors() -> dict[str, Tensor]:
    return {"a": torch.randn(3, 4), "b": torch.randn(5).to(torch.bfloat16)}


def write_config(folder: Path, **content: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **content}))


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_config(tmp_path)
    for shard, (name, tensor) in zip(SHARDS, tensors().items(), strict=True):
        save_file({name: tensor}, tmp_path / shard)
    write_index(tmp_path, dict(zip("ab", SHARDS, strict=True)))
    return tmp_path


def test_one_file(tmp_path: Path) -> None:
    write_config(tmp_path, hidden_size=4)
    saved = tensors()
    save_file(saved, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == {"model_type": "qwen3_moe", "hidden_size": 4}
    assert checkpoint.num_bytes() == 3 * 4 * 4 + 5 * 2
    for name, tensor in saved.items():
        info = checkpoint.tensors[name]
        assert info[:3] == (tuple(tensor.shape), tensor.dtype, tmp_path / "model.safetensors")
        assert torch.equal(checkpoint.get(name), tensor)


def test_one_file_of_another_name(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file(tensors(), tmp_path / "weights.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}


def test_shards(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert [info.shard.name for info in checkpoint.tensors.values()] == list(SHARDS)
    assert checkpoint.get("b").shape == (5,)


def test_every_dtype_and_offset_is_read_as_written(tmp_path: Path) -> None:
    """Sizes that are no multiples of a page, or of the element: offsets are odd in every way."""
    write_config(tmp_path)
    saved = {
        f"{dtype}-{size}".replace("torch.", ""): torch.randn(size).to(dtype)
        for dtype in (torch.uint8, torch.bool, torch.float8_e5m2, torch.float16, torch.float64)
        for size in (0, 1, 3, 4097)
    }
    saved["scalar"] = torch.tensor(2, dtype=torch.int64)
    save_file(saved, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for name, tensor in saved.items():
        got = checkpoint.get(name)
        assert (got.shape, got.dtype) == (tensor.shape, tensor.dtype), name
        assert torch.equal(got.view(torch.uint8) if got.dim() else got, view_of(tensor)), name


def view_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dim() else tensor


def test_a_header_of_any_length_leaves_tensors_readable(tmp_path: Path) -> None:
    """Other writers do not pad the header, so tensors may begin at odd bytes."""
    write_config(tmp_path)
    value = torch.tensor([1.5, -2.5])
    for pad in range(8):
        entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        header = json.dumps({"a": entry}).encode() + b" " * pad
        content = len(header).to_bytes(8, "little") + header + value.numpy().tobytes()
        (tmp_path / "model.safetensors").write_bytes(content)
        assert open_checkpoint(tmp_path).get("a").tolist() == [1.5, -2.5]


def test_writing_to_a_tensor_leaves_the_file_alone(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    before = (sharded / SHARDS[0]).read_bytes()
    checkpoint.get("a").fill_(7.0)
    assert (sharded / SHARDS[0]).read_bytes() == before
    assert not checkpoint.get("a").eq(7.0).any()


def test_a_file_that_shrinks_after_it_was_opened(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    (sharded / SHARDS[0]).write_bytes(b"")
    with pytest.raises(LoadError, match="has changed since it was opened"):
        checkpoint.get("a")


def test_an_unknown_name(sharded: Path) -> None:
    with pytest.raises(LoadError, match="has no tensor 'c'; it has 2"):
        open_checkpoint(sharded).get("c")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"nowhere is not a folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_no_config(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"has no config.json"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is no JSON"),
        (b"[]", "is no JSON object"),
        (b"3", "is no JSON object"),
        (b"", "is no JSON"),
        (b"[" * 200_000, "is no JSON"),
        (b"\xff\xfe{}", "is no text in UTF-8"),
    ],
)
def test_a_broken_config(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(LoadError, match=rf"config.json {message}"):
        open_checkpoint(tmp_path)


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(LoadError, match=rf"lacks {SHARDS[1]}, named by"):
        open_checkpoint(sharded)


def test_a_key_of_the_index_that_its_shard_lacks(sharded: Path) -> None:
    write_index(sharded, {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]})
    with pytest.raises(LoadError, match=rf"{SHARDS[1]} should hold c by"):
        open_checkpoint(sharded)


def test_a_tensor_that_the_index_does_not_name(sharded: Path) -> None:
    save_file({"b": torch.ones(1), "c": torch.ones(1)}, sharded / SHARDS[1])
    with pytest.raises(LoadError, match=r"holds 'c', which .* puts nowhere"):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1)}, sharded / SHARDS[1])
    with pytest.raises(LoadError, match=rf"holds 'a', which .* puts in {SHARDS[0]}"):
        open_checkpoint(sharded)


def test_a_config_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(LoadError, match="more than 100000000 bytes; is it another file"):
        open_checkpoint(tmp_path)


def test_a_folder_in_place_of_a_file(sharded: Path) -> None:
    for name in (SHARDS[1], INDEX, "config.json"):
        (sharded / name).unlink()
        (sharded / name).mkdir()
        with pytest.raises(LoadError, match=rf"{name} is no file"):
            open_checkpoint(sharded)


def test_links_of_a_download_that_broke_off(sharded: Path) -> None:
    """The hub's cache is a folder of links into another folder."""
    for name in (SHARDS[1], INDEX, "config.json"):
        (sharded / name).unlink()
        (sharded / name).symlink_to(sharded / "blobs" / "1234")
        with pytest.raises(LoadError, match=rf"{name} is a link to .*1234, which does not exist"):
            open_checkpoint(sharded)


def test_links_are_followed(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    links = tmp_path_factory.mktemp("links")
    for path in sharded.iterdir():
        (links / path.name).symlink_to(path)
    assert set(open_checkpoint(links).tensors) == {"a", "b"}


def test_a_shard_with_an_absurd_name(sharded: Path) -> None:
    write_index(sharded, {"a": "x" * 10_000 + ".safetensors"})
    with pytest.raises(LoadError, match=r"lacks x{200}\.\.\., named by"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("name", ["\ud800.safetensors", "\0.safetensors"])
def test_a_shard_with_a_name_that_no_file_can_have(name: str, sharded: Path) -> None:
    write_index(sharded, {"a": name})
    with pytest.raises(LoadError, match=r"lacks .*, named by"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "shard",
    ["../model.safetensors", "/etc/passwd", "a\\b.safetensors", 3, None, [SHARDS[0]], {}],
)
def test_an_index_that_leads_out_of_its_folder(shard: Any, sharded: Path) -> None:
    write_index(sharded, {"a": shard})
    with pytest.raises(LoadError, match=r"which is not a file of its folder"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("shard", ["pytorch_model.bin", "", "..", "config.json"])
def test_an_index_of_other_files(shard: str, sharded: Path) -> None:
    write_index(sharded, {"a": shard})
    with pytest.raises(LoadError, match=r"only safetensors files are read"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [None, [], {}])
def test_an_index_without_a_map(weight_map: Any, sharded: Path) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(LoadError, match=r"has no weight_map"):
        open_checkpoint(sharded)


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(LoadError, match=r"has 2 safetensors files but no model.safetensors.index"):
        open_checkpoint(sharded)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(LoadError, match=r"only pytorch_model.bin: pickles.*save_pretrained"):
        open_checkpoint(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    write_config(tmp_path)
    with pytest.raises(LoadError, match=r"has no safetensors file"):
        open_checkpoint(tmp_path)
