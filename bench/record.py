"""The record file: what one run measured, in JSON of a stated version."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.limits import Limits

SCHEMA = 1


class RecordError(ValueError):
    """A file that is not a record this version can read."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One implementation on one problem: its times, or an error where none were taken."""

    shape: str
    tokens: int
    dtype: str
    impl: str
    mode: str
    routing: str = "uniform"
    part: str = "experts"  # or "layer": gate, routing, experts
    active_experts: int = 0  # median over the timed draws, like the floors
    bytes: int = 0
    flops: int = 0
    ms_median: float | None = None
    ms_min: float | None = None
    ms_samples: tuple[float, ...] = ()  # in the order they were taken
    runs: int = 0
    first_call_ms: float | None = None
    read_gbps: float | None = None  # taken between the calls of this cell and its neighbours
    floor_ms: float | None = None  # at the fastest multiplication of the dtype
    floor_fma_ms: float | None = None  # at the float32 FMA rate
    limited_by: str | None = None
    relative_error: float | None = None
    error: str | None = None
    extra: dict[str, float] = field(default_factory=dict)  # what one suite alone measures

    def key(self) -> tuple[str, int, str, str, str, str, str]:
        """What makes two cells of two records the same cell."""
        return (
            self.shape,
            self.tokens,
            self.dtype,
            self.routing,
            self.part,
            self.impl,
            self.mode,
        )

    def fraction_of_floor(self) -> float | None:
        """floor / time: 1 is the machine's limit."""
        if self.ms_median is None or self.floor_ms is None:
            return None
        return self.floor_ms / self.ms_median


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run: where, against which limits, what came out."""

    environment: dict[str, Any]
    limits: Limits | None
    cells: tuple[Cell, ...]
    schema: int = SCHEMA


def save(record: Record, path: Path) -> None:
    """Writes the file as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    building = path.with_name(f".{path.name}.{os.getpid()}")
    building.write_text(json.dumps(dataclasses.asdict(record), indent=1) + "\n")
    building.replace(path)


def load(path: Path) -> Record:
    """Reads a record. Raises RecordError that says what is wrong with the file."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise RecordError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or "schema" not in data:
        raise RecordError(f"{path} is not a benchmark record: it has no schema number")
    if data["schema"] != SCHEMA:
        raise RecordError(
            f"{path} has schema {data['schema']!r}, this version reads schema {SCHEMA}; "
            "run the benchmark again"
        )
    try:
        return _record_from_json(data)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise RecordError(f"{path} is damaged: {error}") from error


def _record_from_json(data: dict[str, Any]) -> Record:
    for name, kind in (("environment", dict), ("cells", list)):
        if not isinstance(data.get(name), kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {data.get(name)!r:.60}")
    limits = data.get("limits")
    return Record(
        environment=data["environment"],
        limits=None if limits is None else Limits(**limits),
        cells=tuple(_cell_from_json(index, cell) for index, cell in enumerate(data["cells"])),
    )


_NUMBERS = ("read_gbps", "ms_median", "ms_min", "floor_ms", "floor_fma_ms")


def _cell_from_json(index: int, data: Any) -> Cell:
    if not isinstance(data, dict):
        raise ValueError(f"cell {index} must be an object, got {data!r:.60}")
    for name in _NUMBERS:
        value = data.get(name)
        if value is not None and not (isinstance(value, int | float) and value > 0):
            raise ValueError(f"cell {index}: {name} must be a positive number, got {value!r:.60}")
    if data.get("ms_median") is None and data.get("error") is None:
        raise ValueError(f"cell {index} has neither ms_median nor error")
    try:
        return Cell(**{**data, "ms_samples": tuple(data.get("ms_samples", ()))})
    except TypeError as error:
        raise ValueError(f"cell {index}: {error}") from error
