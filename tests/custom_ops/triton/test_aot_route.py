"""The router's kernel compiles for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

REPOSITORY = Path(__file__).parents[3]
# 65,536 registers of a multiprocessor leave 128 to each of 16 warps.
MOST_REGISTERS = 128


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, int]]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    command = [sys.executable, "-m", "tests.custom_ops.triton.aot_route"]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "hip:gfx942"])
def test_nothing_is_spilled(target: str, table: dict[str, dict[str, dict[str, int]]]) -> None:
    assert len(table[target]) == 6
    for router, taken in table[target].items():
        assert taken["spilled_bytes"] == 0, (router, taken)
        assert 0 < taken["registers"] <= MOST_REGISTERS, (router, taken)
