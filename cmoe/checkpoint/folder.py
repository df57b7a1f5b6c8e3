"""A folder in Hugging Face format, its headers read, its tensors mapped on demand."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cmoe.checkpoint.header import TensorInfo, check_file, read_header
from cmoe.checkpoint.mapped import MappedTensor
from cmoe.errors import LoadError
from cmoe.loading.report import listed

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_MAX_JSON_BYTES = 100_000_000
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """An opened folder.

    config: the content of config.json. tensors: what the headers say, by the tensors' names.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def get(self, name: str) -> Tensor:
        """The tensor, on the CPU, mapped from its file: it takes memory once it is read.

        Each tensor has a mapping of its own, which ends with the last use of the tensor; writes to
        it stay in memory. LoadError for a name that is not there.
        """
        stored = self.stored(name)
        return stored.read(stored.on_meta())

    def stored(self, name: str) -> MappedTensor:
        """The tensor where it lies, for `load_weights`. LoadError for a name that is not there."""
        if name not in self.tensors:
            raise LoadError(f"{self.folder} has no tensor {name!r}; it has {len(self.tensors)}")
        return MappedTensor(self.tensors[name])

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.stop - info.start for info in self.tensors.values())


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Reads config.json, the index, every shard's header; no tensor.

    One `model.safetensors`, shards with `model.safetensors.index.json`, or one file of another
    name. LoadError for a folder that lacks something, for a file that is damaged, for pickles.
    """
    folder = Path(folder)
    try:
        if not folder.is_dir():
            raise LoadError(f"{folder} is not a folder; give the folder that holds {CONFIG}")
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        raise LoadError(f"{folder} cannot be read ({error.strerror})") from error
    config = _read_json(folder / CONFIG)
    if SINGLE in names:
        tensors = read_header(folder / SINGLE)
    elif INDEX in names:
        tensors = _indexed(folder, names)
    else:
        tensors = read_header(_only_file(folder, names))
    return Checkpoint(folder=folder, config=config, tensors=tensors)


def _indexed(folder: Path, files: Collection[str]) -> dict[str, TensorInfo]:
    """The tensors of all shards, each where the index says."""
    index = folder / INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise LoadError(f"{index} has no weight_map from tensors to files; download it again")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard:
            raise LoadError(
                f"{index} names a shard {shard!r:.80}, which is not a file of its folder"
            )
        if not shard.endswith(".safetensors"):
            raise LoadError(f"{index} names a shard {shard!r:.80}; only safetensors files are read")
    names = list(dict.fromkeys(weight_map.values()))
    if missing := [name for name in names if name not in files]:
        raise LoadError(f"{folder} lacks {listed(missing)}, named by {INDEX}; download it again")
    tensors: dict[str, TensorInfo] = {}
    for shard in names:
        for name, info in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                where = f"in {weight_map[name]}" if name in weight_map else "nowhere"
                raise LoadError(f"{folder / shard} holds {name!r}, which {INDEX} puts {where}")
            tensors[name] = info
    if absent := [name for name in weight_map if name not in tensors]:
        shards = listed({weight_map[name] for name in absent})
        raise LoadError(f"{shards} should hold {listed(absent)} by {INDEX}; download it again")
    return tensors


def _only_file(folder: Path, names: Collection[str]) -> Path:
    """The folder's one safetensors file."""
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if len(files) == 1:
        return folder / files[0]
    if files:
        raise LoadError(
            f"{folder} has {len(files)} safetensors files but no {INDEX}; add the index"
        )
    if pickles := [name for name in names if name.endswith(_PICKLES)]:
        raise LoadError(
            f"{folder} has only {listed(pickles)}: pickles, which can run any code when they are "
            "read, so cmoe does not; convert the model with save_pretrained to safetensors"
        )
    raise LoadError(f"{folder} has no safetensors file; is the download complete?")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        check_file(path)
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise LoadError(f"{path} has more than {_MAX_JSON_BYTES} bytes; is it another file?")
        text = path.read_text("utf-8")
    except FileNotFoundError as error:
        raise LoadError(f"{path.parent} has no {path.name}; is it a model's folder?") from error
    except OSError as error:
        raise LoadError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise LoadError(f"{path} is no text in UTF-8; download it again") from error
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is no JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} is no JSON object; download it again")
    return content
