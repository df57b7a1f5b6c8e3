"""How layers are cut into programs."""

from __future__ import annotations

import dataclasses

import pytest

from cmoe.custom_ops.triton.parameters import (
    LARGEST_BUCKET,
    ROWS_ALONE,
    THREADS,
    TMA,
    TMA_WARPS,
    Device,
    Parameters,
    Shape,
    Tile,
    bucket_of,
    buckets,
    candidates,
    default_parameters,
    fitted,
    refusal,
)

QWEN3 = Shape(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, dtype="bfloat16")
MIXTRAL = Shape(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336, dtype="bfloat16")
TINY = Shape(num_experts=7, top_k=2, hidden_size=5, intermediate_size=3, dtype="float32")
SHAPES = (QWEN3, MIXTRAL, TINY, dataclasses.replace(QWEN3, dtype="float32", is_gated=False))
HOPPER = Device(name="NVIDIA H200", shared_bytes=232448, capability=(9, 0), num_processors=132)
BLACKWELL = Device(name="NVIDIA B200", shared_bytes=232448, capability=(10, 0), num_processors=148)
AMPERE = Device(name="NVIDIA A100", shared_bytes=166912, capability=(8, 0))
GEFORCE = Device(name="NVIDIA GeForce RTX 4090", shared_bytes=101376, capability=(8, 9))
INSTINCT = Device(name="AMD Instinct MI300X", shared_bytes=65536, is_hip=True)
DEVICES = (HOPPER, BLACKWELL, AMPERE, GEFORCE, INSTINCT)
TILE = Tile(block_n=64, block_k=32, num_warps=4, num_stages=3)
ROW = Parameters(block_m=32, group_m=2, gate_up=TILE, down=TILE)


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
        default = default_parameters(HOPPER, shape, bucket)
        assert found[0] == fitted(default, HOPPER, shape)
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
    row = fitted(default_parameters(HOPPER, TINY, 64), HOPPER, TINY)
    assert (row.gate_up.block_n, row.gate_up.block_k, row.down.block_n, row.down.block_k) == (
        (16,) * 4
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(block_n=48), "block_n must be a power of two, got 48"),
        (dict(block_k=0), "block_k must be a power of two, got 0"),
        (dict(num_warps=3), "num_warps must be a power of two, got 3"),
        (dict(num_stages=9), "num_stages must be from 1 to 8, got 9"),
        (dict(block_n=True), "block_n must be a power of two, got True"),
        (dict(copies="dma"), "copies must be one of threads, tma, tma warps; got 'dma'"),
        (dict(num_programs=0), "num_programs must be at least 1 or None, got 0"),
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
        (
            dict(block_m=ROWS_ALONE, down=dataclasses.replace(TILE, copies=TMA)),
            "block_m 1 has no tiles: copies must be 'threads', num_programs None",
        ),
        (
            dict(block_m=ROWS_ALONE, gate_up=dataclasses.replace(TILE, num_programs=2)),
            "block_m 1 has no tiles",
        ),
        (
            dict(gate_up=dataclasses.replace(TILE, copies=TMA_WARPS)),
            "gate_up gathers x, .* copies must be 'threads' or 'tma', got 'tma warps'",
        ),
        (
            dict(down=dataclasses.replace(TILE, copies=TMA_WARPS, num_programs=2)),
            "'tma warps' need block_m 128, num_warps 4, num_programs; got 32, 4, 2",
        ),
        (
            dict(block_m=128, down=dataclasses.replace(TILE, copies=TMA_WARPS)),
            "'tma warps' need block_m 128, num_warps 4, num_programs; got 128, 4, None",
        ),
    ],
)
def test_parameters_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ROW, **changes)


# --- other ways of copying ------------------------------------------------------------------------


def with_copies(gate_up: str, down: str) -> Parameters:
    """A row for tiles of 128 rows that programs walk through."""
    return Parameters(
        block_m=128,
        group_m=2,
        gate_up=dataclasses.replace(TILE, copies=gate_up, num_programs=8),
        down=dataclasses.replace(TILE, copies=down, num_programs=8),
    )


BY_TMA, BY_WARPS = with_copies(TMA, TMA), with_copies(TMA, TMA_WARPS)


@pytest.mark.parametrize(
    ("row", "device", "changes", "reason"),
    [
        (with_copies(THREADS, THREADS), INSTINCT, {}, None),
        (BY_TMA, HOPPER, {}, None),
        (BY_TMA, BLACKWELL, {}, None),
        (BY_WARPS, HOPPER, {}, None),
        (
            BY_TMA,
            AMPERE,
            {},
            "copies 'tma' need compute capability 9.0 up, NVIDIA A100 has 8.0",
        ),
        (
            with_copies(THREADS, TMA_WARPS),
            INSTINCT,
            {},
            "copies 'tma warps' need compute capability 9.0 up, AMD Instinct MI300X has none",
        ),
        (
            BY_WARPS,
            BLACKWELL,
            {},
            "copies 'tma warps' are made for compute capability 9, NVIDIA B200 has 10.0",
        ),
        (
            BY_WARPS,
            HOPPER,
            dict(is_transposed=True),
            "copies 'tma' or 'tma warps' need weights that lie as [E, N, K]",
        ),
        (
            BY_TMA,
            HOPPER,
            dict(is_aligned=False),
            "copies 'tma' need rows that begin at multiples of 16 bytes",
        ),
        (
            BY_WARPS,
            HOPPER,
            dict(dtype="float32"),
            "copies 'tma warps' need tensor cores, which float32 does not use",
        ),
    ],
)
def test_which_rows_are_refused_where(
    row: Parameters, device: Device, changes: dict[str, object], reason: str | None
) -> None:
    assert refusal(row, device, dataclasses.replace(QWEN3, **changes)) == reason


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_candidates_copy_as_the_device_can(device: Device) -> None:
    shapes = (
        *SHAPES,
        dataclasses.replace(QWEN3, is_transposed=True),
        dataclasses.replace(QWEN3, is_aligned=False),
    )
    for shape in shapes:
        rows = [row for bucket in buckets() for row in candidates(device, shape, bucket)]
        assert {refusal(row, device, shape) for row in rows} == {None}
        assert any(row.down.num_programs == device.num_processors for row in rows)
    copies = {
        copy for bucket in buckets() for row in candidates(device, QWEN3, bucket)
        for copy in row.copies()
    }  # fmt: skip
    expected = {HOPPER: {THREADS, TMA, TMA_WARPS}, BLACKWELL: {THREADS, TMA}}
    assert copies == expected.get(device, {THREADS})


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_defaults_copy_by_threads_a_program_a_tile(device: Device) -> None:
    for shape, bucket in ((shape, bucket) for shape in SHAPES for bucket in buckets()):
        row = default_parameters(device, shape, bucket)
        assert row.copies() == {THREADS}
        assert (row.gate_up.num_programs, row.down.num_programs) == (None, None)


def test_how_many_programs_are_launched() -> None:
    walking = dataclasses.replace(TILE, num_programs=8)
    assert (TILE.programs(3, 100), walking.programs(3, 100)) == (6, 6)
    assert (TILE.programs(9, 64), walking.programs(9, 64)) == (9, 8)


def test_an_unaligned_layer_has_rows_of_its_own() -> None:
    assert str(dataclasses.replace(QWEN3, is_aligned=False)) == f"{QWEN3} unaligned"
