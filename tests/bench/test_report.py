"""The `report` command."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.record import Record, save
from tests.bench.conftest import KNOWN
from tests.bench.fakes import cell


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "r.json"
    cells = (cell(ms=2.0), cell(ms=4.0, impl="torch:grouped_mm"))
    save(Record(environment={"device": "a machine"}, limits=KNOWN, cells=cells), path)
    return path


def test_the_table_is_printed(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(saved)]) == 0
    assert "2.00x torch:grouped_mm" in capsys.readouterr().out


def test_blocks_of_a_document_are_renewed(saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- bench: summary -->\nold\n<!-- /bench -->\nafter\n")
    assert main(["report", str(saved), "--into", str(page)]) == 0
    once = page.read_text()
    assert "2 (50 %), 2.00x" in once
    assert "old" not in once
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    main(["report", str(saved), "--into", str(page)])
    assert page.read_text() == once


def test_percents_can_be_those_of_the_fma_floor(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # floor_ms 1.0, floor_fma_ms 1.5 for 2 ms.
    assert main(["report", str(saved), "--floor", "fma"]) == 0
    assert "2 (75 %)" in capsys.readouterr().out


def test_plots_are_written(saved: Path, tmp_path: Path) -> None:
    assert main(["report", str(saved), "--plots", str(tmp_path / "plots")]) == 0
    names = [path.name for path in (tmp_path / "plots").iterdir()]
    assert names == ["experts-olmoe-bf16-uniform.svg"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing\n", "has no block <!-- bench: NAME -->"),
        ("<!-- bench: poem -->\n<!-- /bench -->", "unknown block 'poem'; choose one of summary"),
    ],
)
def test_a_document_without_a_known_block_is_refused(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    assert main(["report", str(saved), "--into", str(page)]) == 2
    assert message in capsys.readouterr().err


def test_records_of_two_machines_do_not_mix(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "o.json"
    save(Record(environment={"device": "another"}, limits=KNOWN, cells=(cell(),)), other)
    assert main(["report", str(saved), str(other)]) == 2
    assert "records of different machines do not mix: a machine, another" in capsys.readouterr().err


def test_a_damaged_record_is_a_line_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    path.write_text("{}")
    assert main(["report", str(path)]) == 2
    assert "is not a benchmark record" in capsys.readouterr().err
