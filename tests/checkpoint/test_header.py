"""Safetensors headers, handmade: each damage has its own message."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from cmoe import LoadError
from cmoe.checkpoint.header import MAX_HEADER_BYTES, read_header


def entry(start: int, stop: int, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def write(path: Path, header: Any, num_bytes: int, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", length) + text + bytes(num_bytes))
    return path


GOOD = {"a": entry(0, 8, [2]), "b": entry(8, 12, [1, 1])}
TWICE = b'{"a":' + json.dumps(entry(0, 8, [2])).encode() + b","
TWICE += b'"a":' + json.dumps(entry(0, 8, [2])).encode() + b"}"

DAMAGE = {
    "truncated data": (GOOD, 11, r"truncated: its tensors end at byte \d+, the file at \d+"),
    "bytes behind": (GOOD, 13, r"has 1 bytes that belong to no tensor"),
    "overlap": ({**GOOD, "b": entry(4, 12, [2])}, 12, r"'b' overlaps 'a'"),
    "same place": ({**GOOD, "b": entry(0, 8, [2])}, 8, r"overlaps '[ab]'"),
    "hole": ({**GOOD, "b": entry(12, 16, [1])}, 16, r"'b' leaves a hole after 'a'"),
    "beyond the end": ({"a": entry(2**60, 2**60 + 8, [2])}, 8, r"'a' leaves a hole"),
    "shape": ({"a": entry(0, 8, [3])}, 8, r"F32 \(3,\) takes 12 bytes, .* hold 8"),
    "huge shape": ({"a": entry(0, 8, [2**40, 2**40])}, 8, r"takes \d+ bytes, .* hold 8"),
    "negative": ({"a": entry(0, 8, [-2])}, 8, r"has shape \[-2\], not a list of at most 64 sizes"),
    "not integers": ({"a": entry(0, 8, [2.0])}, 8, r"has shape \[2.0\]"),
    "boolean": ({"a": entry(0, 8, [True])}, 8, r"has shape \[True\]"),
    "backwards": ({"a": entry(8, 0, [2])}, 8, r"data_offsets \[8, 0\], not \[start, stop\]"),
    "dtype": ({"a": entry(0, 8, [2], "F99")}, 8, r"has dtype 'F99'; known: BF16,"),
    "odd dtype": ({"a": entry(0, 8, [2], 7)}, 8, r"has dtype 7"),
    "a list as dtype": ({"a": entry(0, 8, [2], [])}, 8, r"has dtype \[\]; known"),
    "a dict as dtype": ({"a": entry(0, 8, [2], {"F32": 1})}, 8, r"has dtype {'F32': 1}; known"),
    "too many sizes": ({"a": entry(0, 4, [1] * 65)}, 4, r"not a list of at most 64 sizes"),
    "a size beyond 63 bits": ({"a": entry(0, 8, [2**63])}, 8, r"not a list of at most 64 sizes"),
    "a product beyond reason": ({"a": entry(0, 8, [2**62] * 64)}, 8, r"takes \d+ bytes"),
    "a number of many digits": (b'{"a": ' + b"9" * 5000 + b"}", 0, r"a header that is no JSON \("),
    "no number": ({"a": entry(0, 8, [float("nan")])}, 8, r"has shape \[nan\]"),
    "negative offset": ({"a": entry(-8, 0, [2])}, 8, r"data_offsets \[-8, 0\], not"),
    "offsets beyond 63 bits": ({"a": entry(0, 2**64, [2])}, 8, r"not \[start, stop\]"),
    "one offset": ({"a": {**entry(0, 8, [2]), "data_offsets": [0]}}, 8, r"not \[start, stop\]"),
    "metadata": ({"__metadata__": [1], **GOOD}, 12, r"a __metadata__ that maps no texts"),
    "numbers as metadata": ({"__metadata__": {"a": 1}, **GOOD}, 12, r"a __metadata__ that maps no"),
    "no entry": ({"a": 3}, 0, r"must have dtype, shape, data_offsets, got 3"),
    "more in it": ({"a": {**GOOD["a"], "pickle": 1}}, 8, r"must have dtype, shape, data_offsets"),
    "twice": (TWICE, 8, r"names 'a' twice"),
    "no JSON": (b'{"a":', 0, r"a header that is no JSON \("),
    "deep JSON": (b"[" * 200_000, 0, r"a header that is no JSON \("),
    "no object": (b"[1]", 0, r"no JSON object"),
    "no UTF-8": (b"\xff\xfe{}", 0, r"a header that is no JSON \("),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, tmp_path: Path) -> None:
    header, num_bytes, message = DAMAGE[name]
    path = write(tmp_path / "model.safetensors", header, num_bytes)
    with pytest.raises(LoadError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


def test_the_library_refuses_the_same_files(tmp_path: Path) -> None:
    """All but a name given twice with the same bytes, of which it takes the last one unsaid."""
    for name, (header, num_bytes, _) in DAMAGE.items():
        path = write(tmp_path / "model.safetensors", header, num_bytes)
        if name not in ("twice", "more in it", "too many sizes"):
            with pytest.raises(SafetensorError), safe_open(path, "pt"):
                pass


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**63, 2**64 - 1])
def test_an_absurd_header_length_allocates_nothing(length: int, tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", GOOD, 12, length)
    with pytest.raises(LoadError, match=rf"declares a header of {length} bytes"):
        read_header(path)


def test_a_header_beyond_the_end_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "model.safetensors", GOOD, 12, 1_000_000)
    with pytest.raises(LoadError, match=r"truncated: its header ends at byte 1000008"):
        read_header(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"has 0 bytes, too few"),
        (b"1234567", r"has 7 bytes, too few"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"Git LFS pointer.*git lfs pull"),
    ],
)
def test_files_that_are_none(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=message):
        read_header(path)


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.0),
        "nothing": torch.empty(0, 4, dtype=torch.int8),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "eighth": torch.randn(7).to(torch.float8_e4m3fn),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    read = read_header(path)
    assert {name: (info.shape, info.dtype) for name, info in read.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()
    }


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for name, message in {
        "folder": "folder is no file",
        "link": r"link is a link to .*gone, which does not exist; download it again",
        "loop": "loop is a link to",
        "pipe": "pipe is no file",
        "nowhere": r"nowhere cannot be read \(No such file",
        "x" * 300: r"cannot be read \(File name too long\)",
    }.items():
        with pytest.raises(LoadError, match=message):
            read_header(tmp_path / name)


def test_a_name_given_twice_at_the_end_of_many_is_found_at_once(tmp_path: Path) -> None:
    empty = json.dumps(entry(0, 0, [0]))
    names = [*range(50_000), 49_999]
    text = "{" + ",".join(f'"{name}": {empty}' for name in names) + "}"
    path = write(tmp_path / "model.safetensors", text.encode(), 0)
    start = time.perf_counter()
    with pytest.raises(LoadError, match="names '49999' twice"):
        read_header(path)
    assert time.perf_counter() - start < 5  # comparing each name with each takes minutes
