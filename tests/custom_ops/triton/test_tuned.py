"""The file of tuned parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cmoe.custom_ops.triton.parameters import (
    TMA,
    Device,
    Parameters,
    Shape,
    Tile,
    default_parameters,
    fitted,
)
from cmoe.custom_ops.triton.tuned import parameters_for, read_file, user_table, write_file

QWEN3 = Shape(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, dtype="bfloat16")
MIXTRAL = Shape(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336, dtype="bfloat16")
HOPPER = Device(name="NVIDIA H200", shared_bytes=232448, capability=(9, 0), num_processors=132)
AMPERE = Device(name="NVIDIA A100", shared_bytes=166912, capability=(8, 0))
INSTINCT = Device(name="AMD Instinct MI300X", shared_bytes=65536, is_hip=True)
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
    user_table.cache_clear()
    parameters_for.cache_clear()


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
        assert parameters_for(device, shape, bucket) == fitted(
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


def test_other_ways_of_copying_come_back(users_file: Path) -> None:
    row = dataclasses.replace(ROW, down=dataclasses.replace(TILE, copies=TMA, num_programs=132))
    write_file(users_file, {HOPPER.name: {str(QWEN3): {64: row}}})
    forget()
    assert parameters_for(HOPPER, QWEN3, 64) == row


def test_a_row_that_cannot_run_there_is_refused_with_its_reason(users_file: Path) -> None:
    row = dataclasses.replace(ROW, down=dataclasses.replace(TILE, copies=TMA))
    write_file(users_file, {AMPERE.name: {str(QWEN3): {64: row}}})
    with pytest.raises(
        ValueError,
        match=r"parameters\.json has a row for NVIDIA A100, E128K8H2048I768 bfloat16, 64 tokens "
        r"that cannot run: copies 'tma' need compute capability 9\.0 up, NVIDIA A100 has 8\.0; "
        "remove it, or write it anew with python -m bench tune",
    ):
        parameters_for(AMPERE, QWEN3, 64)
    assert parameters_for(AMPERE, QWEN3, 32) == fitted(
        default_parameters(AMPERE, QWEN3, 32), AMPERE, QWEN3
    )


def test_a_reader_finds_the_former_file_or_the_new_one(
    users_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(users_file, {HOPPER.name: {str(QWEN3): {64: ROW}}})
    former = users_file.read_text()

    def full(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_file(users_file, {HOPPER.name: {str(QWEN3): {32: ROW}}})
    assert users_file.read_text() == former
    assert list(users_file.parent.iterdir()) == [users_file]
