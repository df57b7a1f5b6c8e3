"""The choice of kernel parameters, with the files that hold tuned ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmoe.custom_ops.triton import parameters
from cmoe.custom_ops.triton.parameters import (
    LARGEST_BUCKET,
    ROWS_ALONE,
    Device,
    Parameters,
    Shape,
    Tile,
    bucket_of,
    buckets,
    candidates,
    default_parameters,
    parameters_for,
    read_file,
    write_file,
)

QWEN3 = Shape(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, dtype="bfloat16")
MIXTRAL = Shape(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336, dtype="bfloat16")
TINY = Shape(num_experts=7, top_k=2, hidden_size=5, intermediate_size=3, dtype="float32")
SHAPES = (QWEN3, MIXTRAL, TINY, dataclasses.replace(QWEN3, dtype="float32", is_gated=False))
HOPPER = Device(name="NVIDIA H200", shared_bytes=232448, wide_tiles=True)
AMPERE = Device(name="NVIDIA A100", shared_bytes=166912)
GEFORCE = Device(name="NVIDIA GeForce RTX 4090", shared_bytes=101376)
INSTINCT = Device(name="AMD Instinct MI300X", shared_bytes=65536, is_hip=True)
DEVICES = (HOPPER, AMPERE, GEFORCE, INSTINCT)
TILE = Tile(block_n=64, block_k=32, num_warps=4, num_stages=3)
ROW = Parameters(block_m=32, group_m=2, gate_up=TILE, down=TILE)


@pytest.fixture(autouse=True)
def users_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A path without a file, in the place of whatever this machine's user has."""
    path = tmp_path / "folder" / "parameters.json"
    monkeypatch.setenv("CMOE_TRITON_PARAMETERS", str(path))
    forget()
    yield path
    forget()


def forget() -> None:
    """What a new process would not know."""
    parameters.user_table.cache_clear()
    parameters_for.cache_clear()


@pytest.mark.parametrize(
    ("tokens", "bucket"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (8, 8), (9, 16), (4096, 4096), (4097, 8192), (10**6, 16384)],
)
def test_bucket_of(tokens: int, bucket: int) -> None:
    assert bucket_of(tokens) == bucket
    assert bucket in buckets()


def test_buckets() -> None:
    assert buckets()[0] == 1
    assert buckets()[-1] == LARGEST_BUCKET


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_what_is_chosen_fits_the_device(device: Device, shape: Shape) -> None:
    for bucket in buckets():
        for row in candidates(device, shape, bucket):
            for tile, halves in ((row.gate_up, 1 + shape.is_gated), (row.down, 1)):
                used = tile.shared_bytes(row.block_m, halves, shape.element_bytes(), device.is_hip)
                assert used <= device.shared_bytes


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_candidates_are_few_and_start_with_the_default(shape: Shape) -> None:
    for bucket in buckets():
        found = candidates(HOPPER, shape, bucket)
        assert found[0] == parameters_for(HOPPER, shape, bucket)
        assert len(set(found)) == len(found) <= 32
        assert bucket > 8 or any(row.block_m == ROWS_ALONE for row in found)


def test_rows_go_alone_where_tokens_are_few_and_experts_many() -> None:
    alone = [b for b in buckets() if default_parameters(HOPPER, QWEN3, b).block_m == ROWS_ALONE]
    assert alone == [1, 2, 4, 8]
    alone = [b for b in buckets() if default_parameters(HOPPER, MIXTRAL, b).block_m == ROWS_ALONE]
    assert alone == [1, 2, 4]


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    rows = [default_parameters(HOPPER, QWEN3, bucket).block_m for bucket in buckets()]
    assert rows == sorted(rows)
    assert rows[-1] == 128


def test_blocks_are_no_larger_than_a_small_shape() -> None:
    row = parameters_for(HOPPER, TINY, 64)
    assert (row.gate_up.block_n, row.gate_up.block_k, row.down.block_n, row.down.block_k) == (
        (16,) * 4
    )


def test_a_file_comes_back(users_file: Path) -> None:
    table = {
        HOPPER.name: {str(QWEN3): {1: ROW, 64: dataclasses.replace(ROW, group_m=3)}},
        INSTINCT.name: {str(QWEN3): {8: ROW}, str(MIXTRAL): {8: ROW}},
    }
    write_file(users_file, table)
    assert read_file(users_file) == table
    assert len(users_file.read_text().splitlines()) < 20  # one line a bucket, for people to read


def test_the_users_rows_hold_for_their_device_shape_bucket(users_file: Path) -> None:
    write_file(users_file, {HOPPER.name: {str(QWEN3): {64: ROW}}})
    forget()
    assert parameters_for(HOPPER, QWEN3, 64) == ROW
    for device, shape, bucket in ((AMPERE, QWEN3, 64), (HOPPER, MIXTRAL, 64), (HOPPER, QWEN3, 32)):
        assert parameters_for(device, shape, bucket) == parameters.fitted(
            default_parameters(device, shape, bucket), device, shape
        )


def test_the_file_is_read_once(users_file: Path) -> None:
    before = parameters_for(HOPPER, QWEN3, 128)
    write_file(users_file, {HOPPER.name: {str(QWEN3): {64: ROW, 128: ROW}}})
    assert parameters_for(HOPPER, QWEN3, 128) == before
    assert parameters_for(HOPPER, QWEN3, 64) != ROW


def row_as_dict() -> dict[str, object]:
    return json.loads(json.dumps(dataclasses.asdict(ROW)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting"),
        ("[]", "no attribute 'items'"),
        ({"d": {"s": {"64": {}}}}, "gate_up"),
        ({"d": {"s": {"64": {**row_as_dict(), "extra": 1}}}}, "extra"),
        ({"d": {"s": {"63": row_as_dict()}}}, "bucket 63 is not a power of two from 1 to 16384"),
        ({"d": {"s": {"64": {**row_as_dict(), "block_m": 24}}}}, "block_m must be 1 or a power"),
    ],
)
def test_a_file_with_a_mistake(users_file: Path, content: object, message: str) -> None:
    users_file.parent.mkdir()
    users_file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=rf"not a file of Triton parameters: .*{message}"):
        parameters_for(HOPPER, QWEN3, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(block_n=48), "block_n must be a power of two, got 48"),
        (dict(block_k=0), "block_k must be a power of two, got 0"),
        (dict(num_warps=3), "num_warps must be a power of two, got 3"),
        (dict(num_stages=9), "num_stages must be from 1 to 8, got 9"),
    ],
)
def test_tiles_that_cannot_be(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TILE, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(block_m=8), "block_m must be 1 or a power of two from 16, got 8"),
        (dict(block_m=48), "block_m must be 1 or a power of two from 16, got 48"),
        (dict(group_m=0), "group_m must be at least 1, got 0"),
        (dict(down=dataclasses.replace(TILE, block_n=8)), "tiles of 32 rows need blocks of 16 up"),
    ],
)
def test_parameters_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ROW, **changes)
