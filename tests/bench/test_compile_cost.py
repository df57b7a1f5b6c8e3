"""What torch.compile costs a model."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench import compile_cost
from bench.__main__ import main
from bench.compile_cost import Cost


def test_cold_and_warm_come_from_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(
        [
            {"graphs": 3, "recompilations": 2, "breaks": 1, "seconds": 9.0},
            {"graphs": 3, "recompilations": 2, "breaks": 1, "seconds": 4.0},
        ]
    )
    caches = []

    def process(impl: str, layers: int, how: str, cache: str, timeout_s: float) -> dict[str, float]:
        caches.append(cache)
        return next(answers)

    monkeypatch.setattr(compile_cost, "_process", process)
    cost = compile_cost.measure("cmoe", 12, "whole", timeout_s=1.0)
    assert (cost.graphs, cost.recompilations, cost.cold_s, cost.warm_s) == (3, 2, 9.0, 4.0)
    assert caches[0] == caches[1]


def test_a_process_that_takes_too_long_is_a_row() -> None:
    cost = compile_cost.measure("cmoe", 1, "whole", timeout_s=0.01)
    assert cost.error == "took more than 0 s"


def test_a_process_that_fails_gives_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    failing = subprocess.CompletedProcess([], 1, "", "Traceback\nImportError: no transformers\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failing)
    assert compile_cost.measure("x", 1, "whole", timeout_s=1.0).error == (
        "ImportError: no transformers"
    )


def test_the_table_has_a_row_each() -> None:
    text = compile_cost.text(
        [
            Cost(impl="cmoe", layers=48, how="whole", graphs=4, cold_s=7.25, warm_s=3.0),
            Cost(impl="cmoe", layers=48, how="blocks", error="took more than 600 s"),
        ]
    )
    row = [part.strip() for part in text.splitlines()[2].split("|")[1:-1]]
    assert row == ["cmoe", "48", "whole", "4", "0", "0", "7.2", "3.0"]
    assert "took more than 600 s" in text


def test_the_command_prints_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(impl: str, layers: int, how: str, *, timeout_s: float) -> Cost:
        if layers == 12:
            raise KeyboardInterrupt
        return Cost(impl=impl, layers=layers, how=how, graphs=2)

    monkeypatch.setattr(compile_cost, "measure", measure)
    assert main(["compile", "--impl", "cmoe", "--how", "whole"]) == 130
    printed = capsys.readouterr()
    assert "[1/3] cmoe 1 layers, whole" in printed.err
    assert len(printed.out.splitlines()) == 3
