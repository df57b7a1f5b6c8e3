"""The `cudagraph` command on a machine without CUDA, its table."""

from __future__ import annotations

import pytest
import torch

from bench.__main__ import main
from bench.cudagraph import HEADER, GraphCost


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_without_cuda_it_says_so_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cudagraph"]) == 0
    assert "CUDA graphs need a CUDA device and this machine has none" in capsys.readouterr().out


def test_an_unknown_implementation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cudagraph", "--impl", "x"]) == 2
    assert "unknown implementation 'x'; choose of cmoe:auto" in capsys.readouterr().err


def test_a_row_has_every_column() -> None:
    done = GraphCost(impl="x", tokens=4, eager_ms=2.0, replay_ms=1.0, graph_bytes=3 << 20)
    assert done.columns() == ["x", "4", "2", "-", "1", "-", "-", "-", "3.0", "yes"]
    failed = GraphCost(impl="x", tokens=4, error="no: a host sync")
    assert len(failed.columns()) == len(HEADER)
    assert failed.columns()[-1] == "no: a host sync"


@pytest.mark.gpu
def test_a_layer_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cudagraph", "--shape", "E8K2H64I64", "--tokens", "1", "5", "--impl", "cmoe:auto"]
    assert main(command) == 0
    assert capsys.readouterr().out.count("yes") == 2
