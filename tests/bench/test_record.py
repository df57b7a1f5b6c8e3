"""The record file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.record import SCHEMA, Record, RecordError, load, save
from tests.bench.conftest import KNOWN
from tests.bench.fakes import cell

RECORD = Record(
    environment={"device": "a machine"},
    limits=KNOWN,
    cells=(cell(), cell(impl="torch:grouped_mm", ms=None, error="not installed")),
)


def _changed(path: Path, **changes: object) -> Path:
    save(RECORD, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "r.json"
    save(RECORD, path)
    assert load(path) == RECORD
    assert json.loads(path.read_text())["schema"] == SCHEMA == 1


def test_saving_leaves_no_half_written_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    save(RECORD, path)
    save(RECORD, path)
    assert list(tmp_path.iterdir()) == [path]


def test_another_schema_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="has schema 2, this version reads schema 1; run the"):
        load(_changed(tmp_path / "r.json", schema=2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a benchmark record: it has no schema number"),
        ('{"cells": []}', "is not a benchmark record: it has no schema number"),
        ('{"schema": 1}', "is damaged: environment must be a dict, got None"),
        ('{"schema": 1, "environment": {}, "cells": {}}', "cells must be a list"),
        ('{"schema": 1, "environment": {}, "cells": [3]}', "cell 0 must be an object, got 3"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=message):
        load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ms_median": "fast"}, "cell 0: ms_median must be a positive number, got 'fast'"),
        ({"ms_min": -1}, "cell 0: ms_min must be a positive number, got -1"),
        ({"ms_median": None}, "cell 0 has neither ms_median nor error"),
        ({"colour": "red"}, "cell 0: .*unexpected keyword argument 'colour'"),
    ],
)
def test_a_damaged_cell_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "r.json"
    save(RECORD, path)
    data = json.loads(path.read_text())
    data["cells"][0].update(change)
    with pytest.raises(RecordError, match=message):
        load(_changed(path, cells=data["cells"]))


def test_a_cut_off_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    save(RECORD, path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(RecordError, match="is not JSON"):
        load(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"nothing\.json: No such file"):
        load(tmp_path / "nothing.json")
