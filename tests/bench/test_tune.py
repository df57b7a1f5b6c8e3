"""The choice of parameters, with times that are written down."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench import command_tune
from bench.__main__ import main
from bench.pairs import PairEffort
from bench.tune import NO_TIME, Finding, choose, tune
from cmoe.custom_ops.triton.parameters import Parameters, Tile
from cmoe.custom_ops.triton.tuned import read_file, write_file

REPOSITORY = Path(__file__).parents[2]
EFFORT = PairEffort(rounds=9, max_rounds=27, turn_ms=4.0)


class FakeClock:
    """Moves when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeTrial:
    """Candidates are names; each has a time, some have a fault."""

    def __init__(
        self,
        clock: FakeClock,
        ms: dict[str, float],
        faults: dict[str, str] | None = None,
        *,
        noise: float = 0.01,
        compile_seconds: float = 1.0,
    ) -> None:
        self._clock = clock
        self._ms = ms
        self._faults = faults or {}
        self._noise = noise
        self._compile_seconds = compile_seconds
        self._random = random.Random(0)
        self._compiled: set[str] = set()
        self.held: list[str] = []

    def prepare(self, candidates: Sequence[str], go_on: Callable[[], bool]) -> None:
        for candidate in candidates:
            if go_on():
                self._clock.now += self._compile_seconds / 8
                self._compiled.add(candidate)

    def fault(self, parameters: str) -> str | None:
        if parameters not in self._compiled:
            self._clock.now += self._compile_seconds
        if parameters not in self._faults:
            self.held.append(parameters)
        return self._faults.get(parameters)

    def time(self, parameters: str, first: int, calls: int) -> list[float]:
        assert parameters in self.held, "timed without having been verified"
        times = [
            self._ms[parameters] * (1 + self._noise * self._random.gauss(0, 1))
            for _ in range(calls)
        ]
        self._clock.now += sum(times) / 1e3
        return times

    def forget(self, parameters: str) -> None:
        self.held.remove(parameters)


def chosen(trial: FakeTrial, names: str, clock: FakeClock, seconds: float = 1e6) -> Finding:
    return choose(8, names.split(), trial, seconds=seconds, effort=EFFORT, clock=clock)


def test_the_fastest_that_beats_the_default_is_kept() -> None:
    clock = FakeClock()
    trial = FakeTrial(clock, dict(default=1.0, a=0.9, b=0.7, c=1.4))
    found = chosen(trial, "default a b c", clock)
    assert (found.best, found.tried, found.candidates) == ("b", 4, 4)
    assert found.default_ms == pytest.approx(1.0, rel=0.02)
    assert found.best_ms == pytest.approx(0.7, rel=0.02)
    assert found.verdict is not None
    assert 0.68 < found.verdict.low < found.verdict.ratio < found.verdict.high < 0.72


def test_a_gain_within_the_noise_is_no_gain() -> None:
    clock = FakeClock()
    for ms, noise in ((0.99, 0.001), (0.97, 0.3), (1.0, 0.05)):
        trial = FakeTrial(clock, dict(default=1.0, a=ms, b=ms), noise=noise)
        found = chosen(trial, "default a b", clock)
        assert found.best == "default"
        assert not found.is_better()


def test_what_computes_wrong_is_not_even_timed() -> None:
    clock = FakeClock()
    trial = FakeTrial(clock, dict(default=1.0, a=0.1, b=0.9), {"a": "wrong result"})
    found = chosen(trial, "default a b", clock)
    assert found.best == "b"
    assert found.refused == (("a", "wrong result"),)
    assert not found.is_wrong()


def test_a_wrong_default_is_an_error() -> None:
    clock = FakeClock()
    found = chosen(FakeTrial(clock, {}, {"default": "wrong result"}), "default a", clock)
    assert (found.error, found.best, found.is_wrong()) == ("wrong result", "default", True)


def test_losers_of_the_race_are_let_go() -> None:
    clock = FakeClock()
    names = ["default", *(f"c{index}" for index in range(20))]
    trial = FakeTrial(clock, {name: 1.0 - 0.03 * i for i, name in enumerate(names)})
    assert chosen(trial, " ".join(names), clock).best == "c19"
    assert sorted(trial.held) == ["c18", "c19", "default"]


@pytest.mark.parametrize(("seconds", "tried", "best"), [(20.0, 41, "c30"), (8.0, 22, "c2")])
def test_compiling_stops_in_time_for_the_measurement(seconds: float, tried: int, best: str) -> None:
    """A second for each candidate, eight side by side."""
    clock = FakeClock()
    names = ["default", *(f"c{index}" for index in range(40))]
    trial = FakeTrial(clock, dict.fromkeys(names, 1.0) | {"c2": 0.5, "c30": 0.1})
    found = chosen(trial, " ".join(names), clock, seconds=seconds)
    assert found.best == best
    assert found.candidates == 41
    assert abs(found.tried - tried) <= 2
    assert clock.now < seconds


def tuned(trial_of: Callable[[int], FakeTrial], clock: FakeClock, seconds: float) -> list[Finding]:
    reported: list[Finding] = []
    found = tune(
        (1, 2, 4, 8),
        lambda bucket: ("default", "a", "b"),
        trial_of,
        seconds=seconds,
        effort=EFFORT,
        report=reported.append,
        clock=clock,
    )
    assert reported == found
    return found


def test_all_sizes_together_stay_within_the_limit() -> None:
    clock = FakeClock()
    ms = dict(default=1.0, a=0.5, b=0.6)
    found = tuned(lambda bucket: FakeTrial(clock, ms, compile_seconds=4.0), clock, 40.0)
    assert [f.bucket for f in found] == [1, 2, 4, 8]
    assert [f.best for f in found] == ["a"] * 4
    assert clock.now < 40.0 + 4.0


def test_sizes_that_no_time_is_left_for_say_so() -> None:
    clock = FakeClock()
    ms = dict(default=1.0, a=0.5, b=0.6)
    found = tuned(lambda bucket: FakeTrial(clock, ms, compile_seconds=30.0), clock, 50.0)
    assert [f.error for f in found] == [None, None, NO_TIME, NO_TIME]
    assert not any(f.is_wrong() or f.is_better() for f in found[2:])


# --- the command ----------------------------------------------------------------------------------

TILE = Tile(block_n=64, block_k=32, num_warps=4, num_stages=3)
DEFAULT, BETTER = (
    Parameters(block_m=block_m, group_m=1, gate_up=TILE, down=TILE) for block_m in (16, 32)
)


def finding(bucket: int, best: Parameters = DEFAULT, error: str | None = None) -> Finding:
    return Finding(
        bucket=bucket,
        default=DEFAULT,
        best=best,
        default_ms=None if error else 2.0,
        best_ms=None if error else 1.0,
        error=error,
    )


def test_the_file_has_rows_only_where_something_is_better(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "parameters.json"
    command_tune.save(finding(8), path, "H200", "shape")
    assert not path.exists()
    command_tune.save(finding(8, BETTER), path, "H200", "shape")
    command_tune.save(finding(16, BETTER), path, "H200", "shape")
    command_tune.save(finding(8, BETTER), path, "A100", "shape")
    assert read_file(path) == {
        "H200": {"shape": {8: BETTER, 16: BETTER}},
        "A100": {"shape": {8: BETTER}},
    }


def test_a_new_measurement_replaces_a_row_a_missing_one_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    write_file(path, {"H200": {"shape": {8: BETTER, 16: BETTER}, "other": {8: BETTER}}})
    command_tune.save(finding(8), path, "H200", "shape")
    command_tune.save(finding(16, error=NO_TIME), path, "H200", "shape")
    assert read_file(path) == {"H200": {"shape": {16: BETTER}, "other": {8: BETTER}}}


def test_the_table_says_what_was_kept_with_every_reason() -> None:
    refused = ((BETTER, "OutOfResources: shared memory"),)
    found = Finding(bucket=4, default=DEFAULT, best=DEFAULT, refused=refused, tried=2, candidates=9)
    text = command_tune.text([finding(1, BETTER), found, finding(8, error=NO_TIME)])
    assert "| 1 | 2          | 1       |" in text
    assert "| 2 of 9 | default |" in text
    assert "- T = 4: OutOfResources: shared memory, Parameters(block_m=32" in text
    assert f"- T = 8: {NO_TIME}" in text
    assert "1 of 3 sizes have parameters measurably better than the default." in text


def test_where_the_kernels_do_not_run_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_tune, "unavailable", lambda: "torch finds no CUDA or ROCm device")
    assert main(["tune"]) == 0
    assert capsys.readouterr().out == (
        "tune: left out, the Triton kernels do not run here: torch finds no CUDA or ROCm device\n"
    )


def test_a_damaged_file_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "parameters.json"
    path.write_text('{"H200": ')
    monkeypatch.setattr(command_tune, "unavailable", lambda: None)
    assert main(["tune", "--out", str(path)]) == 2
    assert f"{path} is not a file of Triton parameters: Expecting value" in capsys.readouterr().err
    assert path.read_text() == '{"H200": '


def test_an_unknown_shape_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--shape", "gpt-5"]) == 2
    assert "unknown shape 'gpt-5'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_whole_run_in_the_interpreter(tmp_path: Path) -> None:
    """Every candidate is verified; the times mean nothing."""
    pytest.importorskip("triton", reason="Triton is not installed")
    path = tmp_path / "parameters.json"
    flags = ["--shape", "E5K2H32I16", "--tokens", "1", "20", "--seconds", "20", "--out", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", "tune", *flags],
        cwd=REPOSITORY,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "[2/2] E5K2H32I16 bf16 T=32 on interpreter" in done.stderr
    assert "its times say nothing about a GPU" in done.stdout
    assert "of 2 sizes have parameters measurably better than the default." in done.stdout
    assert "wrong result" not in done.stdout
    assert "Error" not in done.stdout
    if path.exists():
        ((_, shapes),) = read_file(path).items()
        assert list(shapes) == ["E5K2H32I16 bfloat16"]
