"""The kernels in a process that the operating system keeps to one processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.cpu import build
from tests.custom_ops.cases import problem

PROGRAM = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import torch
from cmoe.custom_ops.cpu import build
assert build.load() is None, build.load()
assert torch.get_num_threads() == 1, torch.get_num_threads()
arguments = torch.load(sys.argv[1])
torch.set_num_threads(int(sys.argv[2]))
torch.ones(1 << 20).sum()  # torch's own threads are there
threads = len(os.listdir("/proc/self/task"))
torch.save(torch.ops.cmoe_cpu.fused_experts(*arguments), sys.argv[3])
assert len(os.listdir("/proc/self/task")) == threads, "the kernels started threads of their own"
"""


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="the system has no os.sched_setaffinity"
)
@pytest.mark.parametrize("num_threads", [1, 4])
def test_one_processor(cpu_kernels: Kernels, tmp_path: Path, num_threads: int) -> None:
    """The same bits, no more threads than torch has, whether or not it asks for too many."""
    arguments = problem().arguments()
    given, result = tmp_path / "given", tmp_path / "result"
    torch.save(arguments, given)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, given, str(num_threads), result],
        cwd=build.SOURCES.parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(result), torch.ops.cmoe_cpu.fused_experts(*arguments))
