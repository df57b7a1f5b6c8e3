"""How a case, an answer cross a pipe: one JSON object a line, tensors in base64."""

from __future__ import annotations

import base64
import dataclasses
from typing import Any

import torch
from torch import Tensor

from bench.arm import Started
from bench.inputs import Case
from bench.shapes import Shape


def case_to_json(case: Case) -> dict[str, Any]:
    """Plain data of a case."""
    return dataclasses.asdict(case)


def case_from_json(data: dict[str, Any]) -> Case:
    """The case again."""
    return Case(**{**data, "shape": Shape(**data["shape"])})


def started_to_json(started: Started) -> dict[str, Any]:
    """Plain data of a warm-up's result."""
    data = {**vars(started)}
    if started.rows is not None:
        raw = bytes(started.rows.float().contiguous().view(torch.uint8).flatten().tolist())
        data["rows"] = [base64.b64encode(raw).decode(), list(started.rows.shape)]
    return data


def started_from_json(data: dict[str, Any]) -> Started:
    """The result again."""
    rows: Tensor | None = None
    if data["rows"] is not None:
        text, shape = data["rows"]
        raw = bytearray(base64.b64decode(text))
        rows = torch.frombuffer(raw, dtype=torch.float32).view(shape)
    return Started(**{**data, "rows": rows})
