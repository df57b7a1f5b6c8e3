"""The `compare` command: records, revisions."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bench import compare, peers
from bench.__main__ import main
from bench.record import Cell, Record, save
from bench.verdict import Outcome
from tests.bench.fakes import cell

FAKES = str(Path(__file__).with_name("peers_for_tests.py"))
NOISE = tuple(1 + step / 500 for step in (-4, 3, 0, -1, 2, 4, -3, 1, -2, 0))


def _record(cmoe_ms: float, control_ms: float | None = 1.0, *more: Cell) -> Record:
    def timed(impl: str, ms: float) -> Cell:
        return cell(impl=impl, ms=ms, ms_samples=tuple(ms * noise for noise in NOISE))

    cells = [timed("cmoe:cpu", cmoe_ms)]
    if control_ms is not None:
        cells.append(timed("control:dense", control_ms))
    return Record(environment={}, limits=None, cells=(*cells, *more))


def _outcome(a: Record, b: Record) -> Outcome:
    (row,) = compare.compare_records(a, b, threshold=0.05)
    assert row.verdict is not None
    return row.verdict.outcome


def test_a_record_against_itself_is_the_same() -> None:
    assert _outcome(_record(2.0), _record(2.0)) == Outcome.SAME


def test_ten_per_cent_between_records_are_caught() -> None:
    assert _outcome(_record(2.0), _record(2.2)) == Outcome.SLOWER
    assert _outcome(_record(2.2), _record(2.0)) == Outcome.FASTER


def test_a_slower_machine_is_taken_out_by_the_control() -> None:
    assert _outcome(_record(2.0, 1.0), _record(2.6, 1.3)) == Outcome.SAME
    assert _outcome(_record(2.0, None), _record(2.6, None)) == Outcome.SLOWER


def test_cells_of_one_record_alone_are_not_compared() -> None:
    extra = cell(impl="torch:grouped_mm", ms=9.0)
    assert len(compare.compare_records(_record(2.0), _record(2.0, 1.0, extra), threshold=0.05)) == 1
    with pytest.raises(ValueError, match="no timed cell in common"):
        compare.compare_records(
            _record(2.0), Record(environment={}, limits=None, cells=(extra,)), threshold=0.05
        )


@pytest.mark.parametrize(("b_ms", "status"), [(2.0, 0), (2.2, 1), (1.0, 0)])
def test_the_exit_status_tells_of_a_slowdown_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], b_ms: float, status: int
) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, ms in zip(paths, (2.0, b_ms), strict=True):
        save(_record(ms), path)
    assert main(["compare", *map(str, paths)]) == status
    assert "95 % interval" in capsys.readouterr().out


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two revisions of a `cmoe` that sleeps: `fast` 10 ms a call, `slow` 11 ms."""
    monkeypatch.setattr(peers, "PEERS", dict(peers.PEERS))
    root = tmp_path / "repository"
    (root / "cmoe").mkdir(parents=True)

    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)

    git("init")
    for tag, seconds in (("fast", 0.010), ("slow", 0.011)):
        (root / "cmoe" / "__init__.py").write_text(f"SECONDS = {seconds}\n")
        git("add", ".")
        git("commit", "-m", tag)
        git("tag", tag)
    return root


def _compare(repository: Path, a: str, b: str) -> int:
    command = ["compare", a, b, "--repository", str(repository), "--peers-from", FAKES]
    case = ["--shape", "E5K2H32I16", "--tokens", "1", "--impl", "test:sleeper"]
    return main([*command, *case, "--threads", "1", "--rounds", "9"])


def _worktrees(repository: Path) -> int:
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=repository, capture_output=True, text=True, check=True
    )
    return len(listed.stdout.splitlines())


@pytest.mark.slow
def test_a_revision_against_itself(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(repository, "fast", "fast") == 0
    assert "| same " in capsys.readouterr().out
    assert _worktrees(repository) == 1


@pytest.mark.slow
def test_a_slower_revision_fails(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare(repository, "fast", "slow") == 1
    assert "| slower " in capsys.readouterr().out
    assert _worktrees(repository) == 1


@pytest.mark.parametrize(
    ("b", "message"),
    [("nowhere", "invalid reference: nowhere"), ("empty", "empty has no folder cmoe")],
)
def test_a_revision_that_cannot_be_had_is_named(
    repository: Path, capsys: pytest.CaptureFixture[str], b: str, message: str
) -> None:
    empty_tree = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", "commit-tree"]
    tree = subprocess.run(
        [*command, "-m", "x", empty_tree],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    subprocess.run(["git", "tag", "empty", tree.stdout.strip()], cwd=repository, check=True)
    assert _compare(repository, "fast", b) == 2
    assert message in capsys.readouterr().err
    assert _worktrees(repository) == 1
