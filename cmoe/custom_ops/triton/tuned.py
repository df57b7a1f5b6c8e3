"""The choice of kernel parameters: rows that were measured, else the default.

The choice is a function of (device, shape, bucket). Nothing is timed inside a call, so that a
captured graph cannot freeze a chance result. Measured rows come from a file of the user's, written
by `python -m bench tune`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cmoe.custom_ops.triton.parameters import (
    LARGEST_BUCKET,
    Device,
    Parameters,
    Shape,
    Tile,
    buckets,
    default_parameters,
    fitted,
    refusal,
)
from cmoe.environment import triton_parameters_file

Table = Mapping[str, Mapping[str, Mapping[int, Parameters]]]
"""Device name -> str(Shape) -> bucket -> parameters."""


@functools.cache
def parameters_for(device: Device, shape: Shape, bucket: int) -> Parameters:
    """The parameters of a call, cut down to what the device's shared memory holds.

    The user's file is read once in a process. Raises ValueError for a file that cannot be read, for
    a row of it that cannot run.
    """
    row = user_table().get(device.name, {}).get(str(shape), {}).get(bucket)
    if row is None:
        return fitted(default_parameters(device, shape, bucket), device, shape)
    if reason := refusal(row, device, shape):
        raise ValueError(
            f"{triton_parameters_file()} has a row for {device.name}, {shape}, {bucket} tokens "
            f"that cannot run: {reason}; remove it, or write it anew with python -m bench tune"
        )
    return fitted(row, device, shape)


@functools.cache
def user_table() -> Table:
    """The rows of the user's file; empty where there is none."""
    path = triton_parameters_file()
    return read_file(path) if path.exists() else {}


def write_file(path: Path, table: Table) -> None:
    """Writes rows that `read_file` gives back, one line a bucket; the folder is made.

    Whoever reads meanwhile finds the former file or the new one, whole.
    """
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
    written = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        written.write_text("{\n" + ",\n".join(devices) + "\n}\n")
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


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
