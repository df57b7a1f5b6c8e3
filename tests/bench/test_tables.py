"""What people read of a record."""

from __future__ import annotations

from bench import tables
from bench.record import Record
from tests.bench.conftest import KNOWN
from tests.bench.fakes import cell

CELLS = (
    cell(ms=2.0),
    cell(ms=1.6, mode="compile"),
    cell(impl="torch:grouped_mm", ms=4.0),
    cell(impl="vllm:cpu_fused_moe", ms=None, error="not installed"),
    cell(impl="control:dense", ms=0.5, floor_ms=None),
)


def test_a_row_has_times_floor_gain() -> None:
    lines = tables.latency_table(CELLS).splitlines()
    assert [text.strip() for text in lines[0].split("|")[1:4]] == ["T", "active", "floor ms"]
    row = [text.strip() for text in lines[2].split("|")[1:-1]]
    assert row == [
        "4",
        "26",
        "1",
        "2 (50 %)",
        "1.6 (62 %)",
        "4 (25 %)",
        "-",
        "0.5",
        "2.50x torch:grouped_mm",
    ]


def test_the_control_is_nobodys_peer() -> None:
    best = tables.best(CELLS, ours=False)
    assert best is not None
    assert best.impl == "torch:grouped_mm"


def test_an_empty_cell_gives_its_reason() -> None:
    assert tables.reasons_text(CELLS) == "- vllm:cpu_fused_moe, T = 4: not installed"


def test_the_summary_has_a_line_a_shape() -> None:
    lines = tables.summary_table([*CELLS, cell(ms=3.0, shape="mixtral-half")]).splitlines()
    assert len(lines) == 4
    assert "1.6 (62 %), 2.50x" in lines[2]
    assert "3 (33 %)" in lines[3]


def test_the_spread_of_the_worst_cell_is_named() -> None:
    wild = cell(impl="torch:grouped_mm", ms=2.0, ms_samples=(1.0, 1.0, 2.0, 3.0, 3.0))
    assert tables.spread_text([cell(), cell(), wild]).endswith(
        "at most 100 % (olmoe T=4 torch:grouped_mm)."
    )
    assert tables.spread_text([cell(), wild, wild]).endswith("do not trust these times, run again.")
    assert tables.spread_text([]) == "Nothing was timed."


def test_a_record_says_where_it_was_made() -> None:
    environment = {
        "device": "a machine",
        "threads": 2,
        "commit": "abc",
        "versions": {"torch": "2.13"},
        "command": "python -m bench run",
    }
    text = tables.record_text(Record(environment=environment, limits=KNOWN, cells=CELLS))
    assert "a machine, 2 threads, commit abc" in text
    assert "read 10 GB/s, fp32 FMA 0.1, bf16 dot 0.2, torch bf16 matmul 0.15 TFLOP/s" in text
    assert "Command: `python -m bench run`" in text
    assert "### olmoe, bf16, experts, uniform routing" in text
    assert "Left out:" in text
