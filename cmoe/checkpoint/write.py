"""Safetensors files written tensor by tensor, in a folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from cmoe.checkpoint.folder import INDEX, SINGLE
from cmoe.checkpoint.header import DTYPES

_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


class Planned(NamedTuple):
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def num_bytes(self) -> int:
        """Its size in the file."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, beside `folder`, which takes its name when the block ends well.

    It is removed when the block fails; a process that is killed leaves it behind, under its own
    name. A link is followed. ValueError when `folder` exists and is not empty; OSError, with its
    name, when the system refuses something.
    """
    place = folder.resolve()
    if place.is_file() or (place.is_dir() and any(place.iterdir())):
        raise ValueError(f"{folder} is there already; save into a new folder")
    partial = place.with_name(f".{place.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(place)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        said = f"{folder} cannot be written, nothing of it is left ({error.strerror or error})"
        raise OSError(error.errno, said) from error


def write_shards(
    folder: Path,
    planned: Sequence[Planned],
    fill: Callable[[str, Tensor], None],
    *,
    max_shard_bytes: int,
) -> list[Path]:
    """Writes one file, or shards with their index; one tensor is in memory at a time.

    fill: called with each name and an empty tensor of its shape, dtype, on the CPU.
    """
    shards = _shards(planned, max_shard_bytes)
    if len(shards) == 1:
        _write(folder / SINGLE, shards[0], fill)
        return [folder / SINGLE]
    weight_map, paths = {}, []
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(folder / name, shard, fill)
        weight_map.update(dict.fromkeys((tensor.name for tensor in shard), name))
        paths.append(folder / name)
    total = sum(tensor.num_bytes() for tensor in planned)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX, index)
    return paths


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Indented, as save_pretrained writes it."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", "utf-8")


def _shards(planned: Sequence[Planned], max_shard_bytes: int) -> list[list[Planned]]:
    """In the given order; a tensor larger than a shard has one of its own."""
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in planned:
        if shards[-1] and size + tensor.num_bytes() > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes()
    return shards


def _write(path: Path, shard: Sequence[Planned], fill: Callable[[str, Tensor], None]) -> None:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    # Larger elements first, as the safetensors library does, so that each tensor is aligned.
    shard = sorted(shard, key=lambda tensor: -tensor.dtype.itemsize)
    for tensor in shard:
        start, end = end, end + tensor.num_bytes()
        entries[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in shard:
            content = bytearray(tensor.num_bytes())
            if content:
                flat = torch.frombuffer(content, dtype=tensor.dtype)
                fill(tensor.name, flat.view(tensor.shape))
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
