"""The demo from end to end, on a tiny checkpoint."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from cmoe.demo import run
from cmoe.demo.client import Worker, WorkerError
from cmoe.demo.options import DemoOptions
from cmoe.demo.run import DemoError, run_demo
from cmoe.demo.seeded import write_seeded_checkpoint
from tests.demo.test_seeded import TINY


@pytest.mark.slow
def test_from_end_to_end(tmp_path: Path) -> None:
    options = DemoOptions(
        keep=tmp_path / "kept",
        num_tokens=4,
        num_prompt_tokens=8,
        sizes=dataclasses.replace(TINY, num_layers=1),
    )
    out, err = io.StringIO(), io.StringIO()
    assert run_demo(options, out, err) == 0, out.getvalue()
    text = out.getvalue()
    assert "ok  float32: all 4 greedy tokens are the same as transformers'" in text
    assert "ok  bfloat16: relative error of the logits" in text
    assert "a second process, 2 of 2 graphs from the FX cache" in text
    rows = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    assert [row[1].split()[0] for row in rows[1:]] == ["transformers", "cmoe"]
    assert rows[2][4].strip() == "2"
    assert re.search(
        r"\[ +\d+ s\] cmoe, bfloat16: compiling prefill, decode \.\.\.", err.getvalue()
    )
    assert (tmp_path / "kept" / "config.json").exists()


def test_too_little_memory_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_seeded_checkpoint(tmp_path, sizes=TINY)
    monkeypatch.setattr(run, "available_bytes", lambda: 10**9)
    with pytest.raises(DemoError, match=r"take about 2 GB, 1 GB are available"):
        run_demo(DemoOptions(model=tmp_path), io.StringIO(), io.StringIO())


def test_transformers_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"pip install 'cmoe\[transformers\]'"):
        run_demo(DemoOptions(model=tmp_path), io.StringIO(), io.StringIO())


def test_a_worker_says_why_it_failed(tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor: cmoe's own error crosses the process."""
    write_seeded_checkpoint(tmp_path, sizes=TINY)
    (tmp_path / "model.safetensors.index.json").unlink()
    (shard,) = tmp_path.glob("*.safetensors")
    tensors = load_file(shard)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    shard.unlink()
    request = {
        "folder": str(tmp_path),
        "is_cmoe": True,
        "dtype": "float32",
        "device": "cpu",
        "seed": 0,
        "num_prompt_tokens": 2,
        "num_steps": 2,
    }
    with Worker(compile_cache=tmp_path / "cache", log=tmp_path / "log") as worker:
        with pytest.raises(
            WorkerError, match=r"missing model.layers.1.mlp.experts.3.up_proj.weight \(for model"
        ):
            worker.ask("load", request)
        with pytest.raises(WorkerError, match="KeyError: 'bake'"):
            worker.ask("bake")
    worker.close()
