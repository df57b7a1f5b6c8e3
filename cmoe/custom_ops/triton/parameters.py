"""How the Triton kernels cut a layer into programs, chosen by the bucket of the token count.

The choice is a function of (device, shape, bucket): tuned rows from the user's file where it has
them, otherwise the rule of `default_parameters`. Nothing is timed inside a call, so that a captured
graph cannot freeze a chance result. Parameters say how sums are cut into blocks and in which order
the blocks run: they change the rounding of those sums, never what is computed.

T tokens, K experts per token, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cmoe.environment import triton_parameters_file

LARGEST_BUCKET = 16384
ROWS_ALONE = 1
"""The `block_m` of the kernels without a sort: each program takes the rows one by one."""

_MIN_DOT = 16
"""Tensor cores take no smaller tiles."""


def _is_power_of_two(value: object) -> bool:
    return isinstance(value, int) and value >= 1 and value & (value - 1) == 0


def _power_of_two_from(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a choice needs to know of a device.

    name: as torch prints it. shared_bytes: the shared memory (LDS) that one program can have.
    is_hip: an AMD device, where the stage that is being loaded waits in registers. wide_tiles: its
    tensor cores read both operands from shared memory (Hopper, B200), which leaves the registers to
    the sums.
    """

    name: str
    shared_bytes: int
    is_hip: bool = False
    wide_tiles: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that make one class of layers.

    dtype: `bfloat16`, `float16` or `float32`. is_transposed: in memory the weights are [E, K, N].
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    is_gated: bool = True
    is_transposed: bool = False

    def __str__(self) -> str:
        sizes = f"E{self.num_experts}K{self.top_k}H{self.hidden_size}I{self.intermediate_size}"
        gated = "" if self.is_gated else " non-gated"
        transposed = " transposed" if self.is_transposed else ""
        return f"{sizes} {self.dtype}{gated}{transposed}"

    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return 4 if self.dtype == "float32" else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """How one of the two projections is cut.

    block_n: output columns of a program (of both halves, where gate and up run together).
    block_k: elements of the reduction in a step. num_stages: steps whose loads are in flight.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if not _is_power_of_two(value):
                raise ValueError(f"{name} must be a power of two, got {value!r}")
        if not (isinstance(self.num_stages, int) and 1 <= self.num_stages <= 8):
            raise ValueError(f"num_stages must be from 1 to 8, got {self.num_stages!r}")

    def divides(self, num_columns: int, depth: int) -> bool:
        """Whether no block is cut off at the end."""
        return num_columns % self.block_n == 0 and depth % self.block_k == 0

    def shared_bytes(self, block_m: int, halves: int, element_bytes: int, is_hip: bool) -> int:
        """An upper bound of the shared memory that the loads in flight take."""
        step = (block_m + halves * self.block_n) * self.block_k * element_bytes
        return step * max(1, self.num_stages - is_hip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameters:
    """How one call is cut.

    block_m: rows of one expert that a program takes together, at least 16; `ROWS_ALONE`: no sort,
    each program takes one row. group_m: tiles of rows that run side by side before the next
    columns. gate_up, down: the first projection, the second.
    """

    block_m: int
    group_m: int
    gate_up: Tile
    down: Tile

    def __post_init__(self) -> None:
        rows_fit = self.block_m == ROWS_ALONE or self.block_m >= _MIN_DOT
        if not (_is_power_of_two(self.block_m) and rows_fit):
            raise ValueError(f"block_m must be 1 or a power of two from 16, got {self.block_m!r}")
        if not (isinstance(self.group_m, int) and self.group_m >= 1):
            raise ValueError(f"group_m must be at least 1, got {self.group_m!r}")
        smallest = min(
            t for tile in (self.gate_up, self.down) for t in (tile.block_n, tile.block_k)
        )
        if self.block_m != ROWS_ALONE and smallest < _MIN_DOT:
            raise ValueError(f"tiles of {self.block_m} rows need blocks of 16 up, got {smallest}")


Table = Mapping[str, Mapping[str, Mapping[int, Parameters]]]
"""Device name -> str(Shape) -> bucket -> parameters."""


def bucket_of(tokens: int) -> int:
    """The power of two that stands for a number of tokens, at least 1, at most `LARGEST_BUCKET`."""
    return min(_power_of_two_from(tokens), LARGEST_BUCKET)


def buckets() -> tuple[int, ...]:
    """Every bucket, in order."""
    return tuple(1 << bit for bit in range(LARGEST_BUCKET.bit_length()))


@functools.cache
def parameters_for(device: Device, shape: Shape, bucket: int) -> Parameters:
    """The parameters of a call, cut down to what the device's shared memory holds.

    The user's file is read once in a process. Raises ValueError for a file that cannot be read.
    """
    rows = user_table().get(device.name, {}).get(str(shape), {})
    chosen = rows.get(bucket) or default_parameters(device, shape, bucket)
    return fitted(chosen, device, shape)


@functools.cache
def user_table() -> Table:
    """The rows of the user's file; empty where there is none."""
    path = triton_parameters_file()
    return read_file(path) if path.exists() else {}


def default_parameters(device: Device, shape: Shape, bucket: int) -> Parameters:
    """The rule for a shape that nobody has tuned.

    A tile takes as many rows as an expert gets when routing is even, so that an expert's weights
    are read once and few rows of the tile stay empty. Up to 8 tokens, unless experts are so few
    that rows would share them, every row goes alone.
    """
    rows = bucket * shape.top_k
    if bucket <= 8 and rows <= shape.num_experts:
        # Long along the side that is contiguous in memory.
        block_n, block_k = (32, 64) if shape.is_transposed else (8, 256)
        return Parameters(
            block_m=ROWS_ALONE,
            group_m=1,
            gate_up=Tile(block_n=block_n, block_k=block_k, num_warps=4, num_stages=1),
            down=Tile(block_n=block_n, block_k=block_k, num_warps=8, num_stages=1),
        )
    block_m = _power_of_two_from(-(-rows // shape.num_experts))
    if shape.element_bytes() == 4:  # full precision has no tensor cores: sums live in registers
        tile = Tile(block_n=32, block_k=32, num_warps=4, num_stages=2)
        return Parameters(block_m=min(max(block_m, 16), 32), group_m=4, gate_up=tile, down=tile)
    chosen = _DEFAULTS[min(max(block_m, 16), 128)]
    if device.wide_tiles or chosen.block_m < 128:
        return chosen
    return dataclasses.replace(chosen, gate_up=_halved(chosen.gate_up), down=_halved(chosen.down))


def _halved(tile: Tile) -> Tile:
    return dataclasses.replace(tile, block_n=tile.block_n // 2)


_DEFAULTS: Mapping[int, Parameters] = {
    16: Parameters(
        block_m=16,
        group_m=1,
        gate_up=Tile(block_n=64, block_k=64, num_warps=4, num_stages=4),
        down=Tile(block_n=128, block_k=64, num_warps=4, num_stages=4),
    ),
    32: Parameters(
        block_m=32,
        group_m=1,
        gate_up=Tile(block_n=64, block_k=64, num_warps=4, num_stages=4),
        down=Tile(block_n=128, block_k=64, num_warps=4, num_stages=4),
    ),
    64: Parameters(
        block_m=64,
        group_m=4,
        gate_up=Tile(block_n=128, block_k=64, num_warps=8, num_stages=3),
        down=Tile(block_n=128, block_k=64, num_warps=4, num_stages=4),
    ),
    128: Parameters(
        block_m=128,
        group_m=8,
        gate_up=Tile(block_n=128, block_k=64, num_warps=8, num_stages=3),
        down=Tile(block_n=256, block_k=64, num_warps=8, num_stages=3),
    ),
}


def candidates(device: Device, shape: Shape, bucket: int) -> tuple[Parameters, ...]:
    """What is worth measuring for a bucket: the default first, then its neighbours, each once.

    Both projections vary together, since the layer's time is the sum of theirs; the rows of a tile
    vary around the default.
    """
    default = fitted(default_parameters(device, shape, bucket), device, shape)
    found = {default: None}
    for parameters in _neighbours(device, shape, bucket):
        found.setdefault(fitted(parameters, device, shape))
    return tuple(found)


def _neighbours(device: Device, shape: Shape, bucket: int) -> Iterator[Parameters]:
    default = default_parameters(device, shape, bucket)
    if bucket <= 8:
        for short, long, num_warps in ((4, 512, 4), (8, 512, 8), (16, 128, 4), (16, 256, 8)):
            for num_stages in (1, 3):
                block_n, block_k = (long // 4, 4 * short) if shape.is_transposed else (short, long)
                tile = Tile(
                    block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages
                )
                yield Parameters(block_m=ROWS_ALONE, group_m=1, gate_up=tile, down=tile)
    tile_rows = max(default.block_m, _MIN_DOT)
    for block_m in sorted({max(tile_rows // 2, _MIN_DOT), tile_rows, min(2 * tile_rows, 128)}):
        for block_n, block_k, num_warps, num_stages in (
            (32, 128, 4, 4),
            (64, 128, 4, 3),
            (64, 64, 4, 4),
            (128, 64, 4, 3),
            (128, 64, 8, 4),
            (128, 128, 8, 2),
        ):
            tile = Tile(
                block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages
            )
            yield Parameters(block_m=block_m, group_m=default.group_m, gate_up=tile, down=tile)


def fitted(parameters: Parameters, device: Device, shape: Shape) -> Parameters:
    """The parameters with blocks no larger than the shape, stages no more than memory holds."""
    hidden, intermediate = shape.hidden_size, shape.intermediate_size
    return dataclasses.replace(
        parameters,
        gate_up=_fitted_tile(
            parameters, parameters.gate_up, 1 + shape.is_gated, intermediate, hidden, device, shape
        ),
        down=_fitted_tile(parameters, parameters.down, 1, hidden, intermediate, device, shape),
    )


def _fitted_tile(
    parameters: Parameters,
    tile: Tile,
    halves: int,
    num_columns: int,
    depth: int,
    device: Device,
    shape: Shape,
) -> Tile:
    least = 1 if parameters.block_m == ROWS_ALONE else _MIN_DOT
    tile = dataclasses.replace(
        tile,
        block_n=min(tile.block_n, max(_power_of_two_from(num_columns), least)),
        block_k=min(tile.block_k, max(_power_of_two_from(depth), least)),
    )
    while (
        tile.shared_bytes(parameters.block_m, halves, shape.element_bytes(), device.is_hip)
        > device.shared_bytes
    ):
        if tile.num_stages > 2:
            tile = dataclasses.replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > 2 * _MIN_DOT:
            tile = dataclasses.replace(tile, block_k=tile.block_k // 2)
        elif tile.block_n > _MIN_DOT:
            tile = dataclasses.replace(tile, block_n=tile.block_n // 2)
        else:
            break
    return tile


def write_file(path: Path, table: Table) -> None:
    """Writes rows that `read_file` gives back, one line a bucket; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    devices = []
    for device, shapes in table.items():
        blocks = []
        for shape, rows in shapes.items():
            lines = (
                f'      "{bucket}": {json.dumps(dataclasses.asdict(row))}'
                for bucket, row in sorted(rows.items())
            )
            blocks.append(f"    {json.dumps(shape)}: {{\n" + ",\n".join(lines) + "\n    }")
        devices.append(f"  {json.dumps(device)}: {{\n" + ",\n".join(blocks) + "\n  }")
    path.write_text("{\n" + ",\n".join(devices) + "\n}\n")


def read_file(path: Path) -> Table:
    """The rows of a file. Raises ValueError that names the file, the row, what is wrong with it."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a file of Triton parameters: {error}") from error
    table: dict[str, dict[str, dict[int, Parameters]]] = {}
    try:
        for device, shapes in content.items():
            for shape, rows in shapes.items():
                where = table.setdefault(device, {}).setdefault(shape, {})
                for bucket, row in rows.items():
                    where[_bucket_from(bucket)] = _parameters_from(row)
    except (AttributeError, TypeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{path} is not a file of Triton parameters: {error}; "
            "remove it, or write it anew with python -m bench tune"
        ) from error
    return table


def _bucket_from(text: str) -> int:
    bucket = int(text)
    if bucket not in buckets():
        raise ValueError(f"bucket {text} is not a power of two from 1 to {LARGEST_BUCKET}")
    return bucket


def _parameters_from(row: Mapping[str, Any]) -> Parameters:
    tiles = {name: Tile(**row[name]) for name in ("gate_up", "down")}
    return Parameters(**{**row, **tiles})
