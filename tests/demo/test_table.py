"""The table: one line a model, in Markdown."""

from __future__ import annotations

from cmoe.demo.table import Row, render


def test_two_rows() -> None:
    peer = Row(
        name="transformers eager",
        prefill_ms=200.0,
        decode_ms=10.0,
        num_graphs=0,
        cold_compile_s=None,
        warm_compile_s=None,
        peak_bytes=None,
        largest_difference=0.0,
    )
    ours = Row(
        name="cmoe reference",
        prefill_ms=100.0,
        decode_ms=4.0,
        num_graphs=2,
        cold_compile_s=20.04,
        warm_compile_s=3.0,
        peak_bytes=1_500_000_000,
        largest_difference=1.234e-5,
    )
    lines = render([peer, ours], num_prompt_tokens=128).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(cells) == 4
    assert cells[0][1] == "prefill, 128 tokens"
    assert cells[2][1:6] == ["200.0 ms, 640 tok/s", "10.00 ms, 100 tok/s", "0", "- / -", "-"]
    assert cells[3][1:] == [
        "100.0 ms, 1280 tok/s",
        "4.00 ms, 250 tok/s",
        "2",
        "20.0 s / 3.0 s",
        "1500 MB",
        "1.2e-05",
    ]
