"""The script for a machine with a GPU, in the form that it has without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.record import load

REPOSITORY = Path(__file__).parents[2]


def collected(*flags: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *flags, "tests/bench/test_verdict.py"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_processes_that_share_the_tests_run_each_once() -> None:
    whole = collected("-k", "not faster")
    shares = [collected("-k", "not faster", "--share", f"{index}/2") for index in range(2)]
    assert [shares[number % 2][number // 2] for number in range(len(whole))] == whole
    assert min(map(len, shares)) > 0


@pytest.mark.slow
def test_every_step_works_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = {name: value for name, value in os.environ.items() if name != "OUT"}
    done = subprocess.run(
        ["bash", str(REPOSITORY / "bench" / "device_check.sh"), str(tmp_path)],
        env={**environment, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    report = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, report
    for step in ("environment", "tests", "captures", "headline", "verified", "cudagraph", "tune"):
        assert f"| {step} | ok |" in report
    cells = {cell.impl for cell in load(tmp_path / "headline.json").cells if cell.ms_median}
    assert cells >= {"cmoe:triton", "torch:grouped_mm", "control:dense"}
    assert "### E8K2H64I32, bf16, experts, uniform routing" in report
    assert "of 2 sizes have parameters measurably better than the default." in report
