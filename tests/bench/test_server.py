"""Arms in a process of their own."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
import torch

from bench import peers
from bench.arm import Started
from bench.inputs import Case
from bench.peers.client import ArmServer, ServerError
from bench.peers.server import Server, serve
from bench.peers.wire import case_from_json, case_to_json, started_from_json, started_to_json
from bench.shapes import shape_from_text

FAKES = str(Path(__file__).with_name("peers_for_tests.py"))
CASE = Case(shape=shape_from_text("E5K2H32I16"), tokens=3)


def test_a_case_crosses_the_pipe() -> None:
    assert case_from_json(json.loads(json.dumps(case_to_json(CASE)))) == CASE


def test_an_output_crosses_the_pipe() -> None:
    rows = torch.randn(3, 4)
    sent = json.dumps(started_to_json(Started(impl="x", version="1", rows=rows, call_ms=2.0)))
    got = started_from_json(json.loads(sent))
    assert got.rows is not None
    assert torch.equal(got.rows, rows)
    assert (got.impl, got.version, got.call_ms) == ("x", "1", 2.0)
    refused = started_from_json(started_to_json(Started(impl="x", error="no")))
    assert (refused.rows, refused.error) == (None, "no")


def test_requests_are_answered_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PEERS", dict(peers.PEERS))
    peers.add_peers_from(FAKES)
    requests = [
        {"do": "new", "arm": 1, "impl": "test:right", "mode": "eager"},
        {
            "do": "open",
            "arm": 1,
            "shape": dataclasses.asdict(CASE.shape),
            "dtype": "bf16",
            "seed": 0,
        },
        {"do": "begin", "arm": 1, "case": case_to_json(CASE)},
        {"do": "time", "arm": 1, "first": 0, "calls": 2},
        {"do": "close", "arm": 1},
        {"do": "dance", "arm": 1},
        {"do": "new", "arm": 2, "impl": "test:none", "mode": "eager"},
    ]
    answers = io.StringIO()
    lines = io.StringIO("".join(json.dumps(request) + "\n" for request in requests))
    serve(Server(cache_bytes=0), lines, answers)
    new, opened, begun, timed, closed, unknown, missing = map(
        json.loads, answers.getvalue().splitlines()
    )
    assert new == closed == {}
    assert opened == {"reason": None}
    assert begun["version"] == "1.2.3"
    assert len(timed["ms"]) == 2
    assert unknown == {"failed": "ValueError: unknown request 'dance'"}
    assert "unknown implementation 'test:none'" in missing["failed"]


def test_a_process_that_ends_is_an_error_with_its_status(tmp_path: Path) -> None:
    ending = tmp_path / "python"
    ending.write_text("#!/bin/sh\nexit 3\n")
    ending.chmod(0o755)
    server = ArmServer(str(ending), threads=1, cache_bytes=0)
    with pytest.raises(ServerError, match="ended with status 3"):
        server.new_arm("test:right", "eager")
    server.stop()


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerError, match="cannot start /nowhere/python: No such file"):
        ArmServer("/nowhere/python", threads=1, cache_bytes=0)


def test_an_arm_runs_in_a_real_process() -> None:
    server = ArmServer(sys.executable, threads=1, cache_bytes=1 << 16, peers_from=FAKES)
    try:
        arm = server.new_arm("test:right", "eager")
        assert arm.open(CASE.shape, "bf16", 0) is None
        started = arm.begin(CASE)
        assert started.error is None
        assert started.rows is not None
        assert started.rows.shape == (3, 32)
        assert len(arm.time(0, 3)) == 3
        absent = server.new_arm("test:absent", "eager")
        assert absent.open(CASE.shape, "bf16", 0) == "ImportError: test is not installed"
    finally:
        server.stop()
