"""The header of one safetensors file, judged whole before any tensor is read.

A file is 8 bytes of header length (little endian), a JSON header, the tensors' bytes. The
safetensors library reads the same header, but does not tell where a tensor lies, which is needed to
map single tensors, nor, in words for a user, what is wrong with a damaged file.
"""

from __future__ import annotations

import json
import math
import stat
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cmoe.errors import LoadError

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""

_MAX_DIMENSIONS = 64
_MAX_SIZE = 2**63  # of anything that a file of this world can hold

DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class TensorInfo(NamedTuple):
    """What a header says about one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shard: Path
    start: int  # bytes from the beginning of the file
    stop: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The file's tensors by name. LoadError says what is wrong with it, and what to do."""
    try:
        check_file(path)
        size = path.stat().st_size
        with path.open("rb") as file:
            data_start = 8 + _header_length(path, file.read(8), size)
            header = file.read(data_start - 8)
    except OSError as error:
        raise LoadError(f"{path} cannot be read ({error.strerror})") from error
    entries = _parsed(path, header)
    _check_metadata(path, entries.pop("__metadata__", {}))
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in entries.items()}
    _check_cover(path, tensors, data_start, size)
    return tensors


def check_file(path: Path) -> None:
    """LoadError for what is no ordinary file: a folder, a pipe, a link that leads nowhere."""
    if path.is_symlink() and not path.exists():
        raise LoadError(
            f"{path} is a link to {path.readlink()}, which does not exist; download it again"
        )
    if not stat.S_ISREG(path.stat().st_mode):
        raise LoadError(f"{path} is no file; {_AGAIN}")


def _header_length(path: Path, prefix: bytes, size: int) -> int:
    if prefix == b"version ":
        raise LoadError(
            f"{path} is a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        )
    if len(prefix) < 8:
        raise LoadError(f"{path} has {size} bytes, too few for a safetensors file; {_AGAIN}")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_HEADER_BYTES:
        raise LoadError(
            f"{path} declares a header of {length} bytes, more than the {MAX_HEADER_BYTES} that "
            "a safetensors file may have; is it another kind of file?"
        )
    if 8 + length > size:
        raise LoadError(
            f"{path} is truncated: its header ends at byte {8 + length}, the file at {size}; "
            f"{_AGAIN}"
        )
    return length


def _parsed(path: Path, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise LoadError(f"{path} names {twice!r} twice; {_AGAIN}")
        return content

    try:
        parsed = json.loads(header.decode("utf-8"), object_pairs_hook=unique)
    except LoadError:
        raise
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} has a header that is no JSON ({error}); {_AGAIN}") from error
    if not isinstance(parsed, dict):
        raise LoadError(f"{path} has a header that is no JSON object; {_AGAIN}")
    return parsed


def _check_metadata(path: Path, metadata: Any) -> None:
    texts = [*metadata, *metadata.values()] if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise LoadError(f"{path} has a __metadata__ that maps no texts to texts; {_AGAIN}")


def _tensor_info(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise LoadError(f"{where} must have dtype, shape, data_offsets, got {entry!r:.80}")
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
        raise LoadError(
            f"{where} has dtype {entry['dtype']!r:.40}; known: {', '.join(sorted(DTYPES))}"
        )
    dtype, shape, offsets = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not _are_sizes(shape):
        raise LoadError(
            f"{where} has shape {shape!r:.80}, not a list of at most {_MAX_DIMENSIONS} sizes"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise LoadError(f"{where} has data_offsets {offsets!r:.80}, not [start, stop]")
    expected, got = math.prod(shape) * dtype.itemsize, offsets[1] - offsets[0]
    if expected != got:
        raise LoadError(
            f"{where}: {entry['dtype']} {tuple(shape)} takes {expected} bytes, data_offsets "
            f"{offsets} hold {got}; {_AGAIN}"
        )
    return TensorInfo(tuple(shape), dtype, path, data_start + offsets[0], data_start + offsets[1])


def _are_sizes(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_DIMENSIONS
        and all(type(item) is int and 0 <= item < _MAX_SIZE for item in value)
    )


def _check_cover(path: Path, tensors: Mapping[str, TensorInfo], start: int, size: int) -> None:
    """The tensors' bytes must follow each other without overlap or hole, to the file's end."""
    previous = "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if info.start != start:
            how = "overlaps" if info.start < start else "leaves a hole after"
            raise LoadError(f"{path}: tensor {name!r} {how} {previous}; {_AGAIN}")
        previous, start = repr(name), info.stop
    if start > size:
        raise LoadError(
            f"{path} is truncated: its tensors end at byte {start}, the file at {size}; {_AGAIN}"
        )
    if start < size:
        raise LoadError(f"{path} has {size - start} bytes that belong to no tensor; {_AGAIN}")


_AGAIN = "download or write it again"
