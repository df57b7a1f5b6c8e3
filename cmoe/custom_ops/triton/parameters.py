"""How the Triton kernels cut a layer into programs, by the bucket of the token count.

Parameters say how sums are cut into blocks, in which order the blocks run, how they are copied:
they change the rounding of those sums, never what is computed. `default_parameters` is the rule for
shapes that nobody has tuned, `candidates` what `python -m bench tune` measures.

T tokens, K experts per token, E experts, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

LARGEST_BUCKET = 16384
ROWS_ALONE = 1
"""The `block_m` of the kernels without a sort: each program takes the rows one by one."""

_MIN_DOT = 16
"""Tensor cores take no smaller tiles."""

THREADS, TMA, TMA_WARPS = "threads", "tma", "tma warps"
COPIES = (THREADS, TMA, TMA_WARPS)
"""How blocks come into shared memory: each thread copies its share; the tensor memory accelerator
(TMA), a copy engine, moves whole blocks; it is told to by warps that do nothing else."""

TMA_CAPABILITY = (9, 0)
"""The oldest with that engine. Own warps are made for this generation alone: the next ones multiply
in another way."""

_OWN_WARPS_ROWS, _OWN_WARPS_NUM_WARPS = 128, 4
"""What Triton 3.6 to 3.8 make two groups of multiplying warps of, each with half of the rows. With
64 rows both groups do the same work; with 8 warps there are no groups; a program of one tile, which
may have to return at once, does not compile."""

_BARRIER_BYTES = 1024
"""At most, of the copy engine's barriers."""


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1  # a bool is none


def _is_power_of_two(value: object) -> bool:
    return _is_count(value) and value & (value - 1) == 0  # type: ignore[operator]


def _power_of_two_from(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a choice needs to know of a device.

    name: as torch prints it. shared_bytes: the shared memory (LDS) that one program can have.
    capability: of an NVIDIA device; (0, 0) of others. is_hip: an AMD device, where the stage that
    is being loaded waits in registers. num_processors: programs that surely run side by side.
    """

    name: str
    shared_bytes: int
    capability: tuple[int, int] = (0, 0)
    is_hip: bool = False
    num_processors: int = 1

    def wide_tiles(self) -> bool:
        """Whether tensor cores read both operands from shared memory (Hopper, B200).

        That leaves the registers to the sums.
        """
        return self.capability[0] in (9, 10)

    def has_tma(self) -> bool:
        """Whether there is a copy engine for blocks."""
        return self.capability >= TMA_CAPABILITY


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """The sizes that make one class of layers.

    dtype: `bfloat16`, `float16` or `float32`. is_transposed: in memory the weights are [E, K, N].
    is_aligned: weights, rows of activations begin at multiples of 16 bytes.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    is_gated: bool = True
    is_transposed: bool = False
    is_aligned: bool = True

    def __str__(self) -> str:
        sizes = f"E{self.num_experts}K{self.top_k}H{self.hidden_size}I{self.intermediate_size}"
        gated = "" if self.is_gated else " non-gated"
        transposed = " transposed" if self.is_transposed else ""
        aligned = "" if self.is_aligned else " unaligned"
        return f"{sizes} {self.dtype}{gated}{transposed}{aligned}"

    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return 4 if self.dtype == "float32" else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """How one of the two projections is cut.

    block_n: output columns of a program (of both halves, where gate and up run together).
    block_k: elements of the reduction in a step. num_stages: steps whose loads are in flight.
    copies: one of `COPIES`. num_programs: each takes tile after tile; None: one program a tile.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    copies: str = THREADS
    num_programs: int | None = None

    def __post_init__(self) -> None:
        for name in ("block_n", "block_k", "num_warps"):
            value = getattr(self, name)
            if not _is_power_of_two(value):
                raise ValueError(f"{name} must be a power of two, got {value!r}")
        if not (_is_count(self.num_stages) and self.num_stages <= 8):
            raise ValueError(f"num_stages must be from 1 to 8, got {self.num_stages!r}")
        if self.copies not in COPIES:
            raise ValueError(f"copies must be one of {', '.join(COPIES)}; got {self.copies!r}")
        if not (self.num_programs is None or _is_count(self.num_programs)):
            raise ValueError(f"num_programs must be at least 1 or None, got {self.num_programs!r}")

    def programs(self, num_tiles: int, num_columns: int) -> int:
        """How many programs to launch for so many tiles of rows, each of all columns."""
        blocks = num_tiles * -(-num_columns // self.block_n)
        return blocks if self.num_programs is None else min(blocks, self.num_programs)

    def divides(self, num_columns: int, depth: int) -> bool:
        """Whether no block is cut off at the end."""
        return num_columns % self.block_n == 0 and depth % self.block_k == 0

    def shared_bytes(self, block_m: int, halves: int, element_bytes: int, is_hip: bool) -> int:
        """An upper bound of the shared memory that the loads in flight take."""
        step = (block_m + halves * self.block_n) * self.block_k * element_bytes
        loads = step * max(1, self.num_stages - is_hip)
        if self.copies == THREADS:
            return loads
        # Own warps hand the results over through memory of their own.
        results = block_m * self.block_n * element_bytes if self.copies == TMA_WARPS else 0
        return loads + results + _BARRIER_BYTES


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
        if not _is_count(self.group_m):
            raise ValueError(f"group_m must be at least 1, got {self.group_m!r}")
        smallest = min(
            t for tile in (self.gate_up, self.down) for t in (tile.block_n, tile.block_k)
        )
        if self.block_m != ROWS_ALONE and smallest < _MIN_DOT:
            raise ValueError(f"tiles of {self.block_m} rows need blocks of 16 up, got {smallest}")
        if self.block_m == ROWS_ALONE and any(
            tile.copies != THREADS or tile.num_programs is not None
            for tile in (self.gate_up, self.down)
        ):
            raise ValueError("block_m 1 has no tiles: copies must be 'threads', num_programs None")
        if self.gate_up.copies == TMA_WARPS:
            raise ValueError(
                f"gate_up gathers x, which Triton cannot leave to warps of their own: "
                f"copies must be 'threads' or 'tma', got {TMA_WARPS!r}"
            )
        down = self.down
        if down.copies == TMA_WARPS and (
            (self.block_m, down.num_warps) != (_OWN_WARPS_ROWS, _OWN_WARPS_NUM_WARPS)
            or down.num_programs is None
        ):
            raise ValueError(
                f"copies {TMA_WARPS!r} need block_m {_OWN_WARPS_ROWS}, num_warps "
                f"{_OWN_WARPS_NUM_WARPS}, num_programs; "
                f"got {self.block_m}, {down.num_warps}, {down.num_programs}"
            )

    def copies(self) -> frozenset[str]:
        """How its two projections copy."""
        return frozenset((self.gate_up.copies, self.down.copies))


def bucket_of(tokens: int) -> int:
    """The power of two that stands for a number of tokens, at least 1, at most `LARGEST_BUCKET`."""
    return min(_power_of_two_from(tokens), LARGEST_BUCKET)


def buckets() -> tuple[int, ...]:
    """Every bucket, in order."""
    return tuple(1 << bit for bit in range(LARGEST_BUCKET.bit_length()))


def refusal(parameters: Parameters, device: Device, shape: Shape) -> str | None:
    """Why parameters cannot serve layers of that shape on that device, or None."""
    copies = parameters.copies()
    if copies == {THREADS}:
        return None
    named = " or ".join(repr(way) for way in COPIES if way in copies - {THREADS})
    have = ".".join(map(str, device.capability)) if any(device.capability) else "none"
    if not device.has_tma():
        return f"copies {named} need compute capability 9.0 up, {device.name} has {have}"
    if TMA_WARPS in copies and device.capability[0] != TMA_CAPABILITY[0]:
        return f"copies {TMA_WARPS!r} are made for compute capability 9, {device.name} has {have}"
    if shape.is_transposed:
        return f"copies {named} need weights that lie as [E, N, K]"
    if not shape.is_aligned:
        return f"copies {named} need rows that begin at multiples of 16 bytes"
    if TMA_WARPS in copies and shape.dtype == "float32":
        return f"copies {TMA_WARPS!r} need tensor cores, which float32 does not use"
    return None


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
    return _by_rows(device, shape, _power_of_two_from(-(-rows // max(shape.num_experts, 1))))


def _by_rows(device: Device, shape: Shape, block_m: int) -> Parameters:
    """The default whose tiles have about `block_m` rows."""
    if shape.element_bytes() == 4:  # full precision has no tensor cores: sums live in registers
        tile = Tile(block_n=32, block_k=32, num_warps=4, num_stages=2)
        return Parameters(block_m=min(max(block_m, 16), 32), group_m=4, gate_up=tile, down=tile)
    chosen = _DEFAULTS[min(max(block_m, 16), 128)]
    if device.wide_tiles() or chosen.block_m < 128:
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
    for parameters in (
        *_rows_alone(shape, bucket),
        *_other_copies(device, shape, bucket),
        *_other_tiles(device, shape, bucket),
    ):
        if refusal(parameters, device, shape) is None:
            found.setdefault(fitted(parameters, device, shape))
    return tuple(found)


def _rows_alone(shape: Shape, bucket: int) -> Iterator[Parameters]:
    if bucket > 8:
        return
    for short, long, num_warps in ((4, 512, 4), (8, 512, 8), (16, 128, 4), (16, 256, 8)):
        for num_stages in (1, 3):
            block_n, block_k = (long // 4, 4 * short) if shape.is_transposed else (short, long)
            tile = Tile(
                block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages
            )
            yield Parameters(block_m=ROWS_ALONE, group_m=1, gate_up=tile, down=tile)


def _other_copies(device: Device, shape: Shape, bucket: int) -> Iterator[Parameters]:
    """Tiles as the default has them, copied or shared out in another way."""
    programs = device.num_processors
    for block_m in _rows_of_a_tile(device, shape, bucket):
        row = _by_rows(device, shape, block_m)
        yield _copied(row, TMA, TMA, None)
        yield _copied(row, TMA, TMA, programs)
        yield _copied(row, THREADS, THREADS, programs)
        if row.block_m == _OWN_WARPS_ROWS:
            few = dataclasses.replace(row.down, num_warps=_OWN_WARPS_NUM_WARPS)
            yield _copied(dataclasses.replace(row, down=few), TMA, TMA_WARPS, programs)


def _copied(row: Parameters, gate_up: str, down: str, num_programs: int | None) -> Parameters:
    return dataclasses.replace(
        row,
        gate_up=dataclasses.replace(row.gate_up, copies=gate_up, num_programs=num_programs),
        down=dataclasses.replace(row.down, copies=down, num_programs=num_programs),
    )


def _other_tiles(device: Device, shape: Shape, bucket: int) -> Iterator[Parameters]:
    default = default_parameters(device, shape, bucket)
    for block_m in _rows_of_a_tile(device, shape, bucket):
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


def _rows_of_a_tile(device: Device, shape: Shape, bucket: int) -> tuple[int, ...]:
    """The default's, or the least there is, first; then half of it, twice as many."""
    rows = max(default_parameters(device, shape, bucket).block_m, _MIN_DOT)
    return tuple(dict.fromkeys((rows, max(rows // 2, _MIN_DOT), min(2 * rows, 128))))


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
