"""The `run` command from its flags to its record."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from bench import limits, modes, peers, run, shapes
from bench.__main__ import main
from bench.limits import Limits
from bench.record import Cell, load
from bench.suites import Competitor, Effort, Suite, suites

FAKES = str(Path(__file__).with_name("peers_for_tests.py"))


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch, known_limits: Limits) -> None:
    monkeypatch.setattr(peers, "PEERS", dict(peers.PEERS))
    monkeypatch.delenv("BENCH_VLLM_PYTHON", raising=False)


def _run(out: Path, *flags: str) -> int:
    command = ["run", "--peers-from", FAKES, "--out", str(out), "--seconds", "0.01"]
    return main([*command, "--shape", "E5K2H32I16", *flags])


def _cells(out: Path) -> dict[str, Cell]:
    return {cell.impl: cell for cell in load(out).cells}


def test_each_implementation_gets_times_or_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    impls = ["test:right", "test:wrong", "test:repeating", "test:absent", "control:dense"]
    assert _run(out, "--tokens", "3", "--impl", *impls) == 0
    cells = _cells(out)
    right = cells["test:right"]
    assert right.error is None
    assert right.runs == len(right.ms_samples) >= 3
    assert right.ms_min is not None
    assert right.ms_median is not None
    assert 0 < right.ms_min <= right.ms_median
    # Never more than the five experts, their bytes at 10 GB/s: 3 * 32 * 16 weights of two bytes.
    assert right.floor_ms == pytest.approx(right.active_experts * 3 * 32 * 16 * 2 / 1e7)
    assert right.limited_by == "bandwidth"
    assert "wrong result: relative error" in str(cells["test:wrong"].error)
    assert cells["test:wrong"].ms_median is None
    assert "wrong result: relative error" in str(cells["test:repeating"].error)
    assert cells["test:absent"].error == "ImportError: test is not installed"
    assert cells["control:dense"].ms_median is not None
    assert cells["control:dense"].floor_ms is None
    printed = capsys.readouterr()
    assert "### E5K2H32I16, bf16, experts, uniform routing" in printed.out
    assert "[1/1] E5K2H32I16 bf16 T=3" in printed.err


def test_the_record_says_where_it_was_made(tmp_path: Path, known_limits: Limits) -> None:
    out = tmp_path / "r.json"
    _run(out, "--tokens", "1", "--impl", "test:right")
    made = load(out)
    assert made.limits == known_limits
    assert made.environment["versions"]["test:right"] == "1.2.3"
    for name in ("commit", "device", "cpu_flags", "threads", "command", "time"):
        assert name in made.environment


def test_graph_modes_are_left_out_without_cuda(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    flags = ["--tokens", "1", "--impl", "test:right", "--mode", "eager", "cudagraph"]
    assert _run(out, *flags) == 0
    eager, graph = load(out).cells
    assert eager.error is None
    assert graph.error == "mode cudagraph needs CUDA graphs, this machine has no CUDA device"


def test_a_size_that_is_not_supported_has_a_reason(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    _run(out, "--tokens", "1", "9", "--impl", "test:right")
    assert [cell.error for cell in load(out).cells] == [None, "it cannot count to nine"]


def test_interruption_keeps_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    assert _run(out, "--tokens", "1", "2", "3", "--impl", "test:stopped") == 130
    assert [cell.tokens for cell in load(out).cells] == [1]
    printed = capsys.readouterr()
    assert "interrupted: the finished cells are kept" in printed.err
    assert "### E5K2H32I16" in printed.out


def test_a_shape_too_large_for_the_memory_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shapes, "available_bytes", lambda: 20_000)
    out = tmp_path / "r.json"
    # 5 experts of 3 * 32 * 16 weights of two bytes.
    assert _run(out, "--tokens", "1", "--impl", "test:right") == 2
    assert "needs 15,360 bytes (1 x 15,360 for 1 weight layouts)" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nightly"], "unknown suite 'nightly'; choose one of headline, quick"),
        (["--mode", "eager"], "--mode says how the implementations of --impl run"),
        (["--shape", "gpt-5"], "unknown shape 'gpt-5'"),
        (["--impl", "test:none"], "unknown implementation 'test:none'; choose one of cmoe:auto"),
        (["--impl", "test:right", "--routing", "x"], "routing 'x' is neither uniform"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], message: str
) -> None:
    command = ["run", "--peers-from", FAKES, "--out", str(tmp_path / "r.json")]
    assert main([*command, *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_cell_has_the_median_read_rate_of_its_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream(nullcontext):
        rates = iter([29.0, 31.0, 30.0, 28.0, 32.0, 30.0])

        def __enter__(self) -> Stream:
            return self

        def gbps(self, repeats: int) -> float:
            return next(self.rates)

    monkeypatch.setattr(limits, "open_read_stream", lambda *, threads: Stream())
    out = tmp_path / "r.json"
    assert _run(out, "--tokens", "1", "--impl", "test:right") == 0
    (cell,) = load(out).cells
    assert cell.read_gbps == 30.0
    assert cell.floor_ms == pytest.approx(cell.active_experts * 3 * 32 * 16 * 2 / 3e7)


def test_effort_is_bounded_on_both_sides() -> None:
    effort = Effort(min_runs=3, min_seconds=1.0, max_runs=100)
    assert effort.runs(call_ms=2000.0) == 3
    assert effort.runs(call_ms=100.0) == 11
    assert effort.runs(call_ms=0.01) == 100


def test_every_suite_names_known_shapes_and_implementations() -> None:
    for cuda in (False, True):
        for suite in suites(cuda=cuda).values():
            assert run.groups_of(suite)
            for competitor in suite.competitors:
                peers.make_peer(competitor.impl)
                assert competitor.mode in modes.MODES


def test_the_headline_on_a_cpu_has_the_published_cells() -> None:
    headline = suites(cuda=False)["headline"]
    assert headline.tokens == (1, 4, 16, 64, 256, 1024)
    assert len(headline.shapes) == 5
    assert suites(cuda=False)["quick"].tokens == (1, 64, 1024)


def test_memory_is_counted_for_every_layout() -> None:
    suite = Suite(
        shapes=("olmoe",),
        tokens=(1,),
        competitors=(
            Competitor(impl="cmoe:auto"),
            Competitor(impl="vllm:cpu_fused_moe"),
            Competitor(impl="vllm:fused_experts_cpu"),
            Competitor(impl="transformers:grouped_mm"),
        ),
    )
    # Ours, the other process' own, its two re-packed ones.
    assert run.layouts_of(suite, shapes.SHAPES["olmoe"], {"vllm": "python"}) == 4
    # The layout of gpt-oss in transformers is one of its own.
    assert run.layouts_of(suite, shapes.SHAPES["gpt-oss-20b"], {}) == 4
