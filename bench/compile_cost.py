"""What torch.compile costs a model of L layers: graphs, recompilations, seconds.

Every measurement is a process of its own with an empty cache for Inductor; a second process with
the cache that the first one left is the warm start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.shapes import shape_from_text
from bench.stacks import stack
from bench.tables import table

SHAPE = "E8K2H64I32"
"""What compiling costs does not depend on the sizes of the weights."""

TOKENS = (4, 5, 17, 1)
"""Sizes that a served model sees: a prompt, another one, a longer one, a single token."""

HOWS = ("whole", "blocks")
_ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process saw; seconds are those of the first call at each size, added up."""

    impl: str
    layers: int
    how: str
    graphs: int = 0
    recompilations: int = 0
    breaks: int = 0
    cold_s: float = 0.0
    warm_s: float = 0.0
    error: str | None = None


def measure(impl: str, layers: int, how: str, *, timeout_s: float) -> Cost:
    """Cold, then warm, each in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="bench-compile-") as cache:
        seen = []
        for _ in range(2):
            answer = _process(impl, layers, how, cache, timeout_s)
            if "error" in answer:
                return Cost(impl=impl, layers=layers, how=how, error=answer["error"])
            seen.append(answer)
    cold, warm = seen
    return Cost(
        impl=impl,
        layers=layers,
        how=how,
        graphs=cold["graphs"],
        recompilations=cold["recompilations"],
        breaks=cold["breaks"],
        cold_s=cold["seconds"],
        warm_s=warm["seconds"],
    )


def _process(impl: str, layers: int, how: str, cache: str, timeout_s: float) -> dict:  # type: ignore[type-arg]
    command = [sys.executable, "-m", "bench.compile_cost", impl, str(layers), how]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(_ROOT)}
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=_ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took more than {timeout_s:.0f} s"}
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def observe(impl: str, layers: int, how: str) -> dict[str, float]:
    """Compiles in this process, counts."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    warnings.simplefilter("ignore")
    torch.set_grad_enabled(False)
    model = stack(impl, shape_from_text(SHAPE), "bf16", layers)
    if how == "whole":
        model.compile()
    else:
        for layer in model.layers:
            layer.compile()
    seconds = 0.0
    for tokens in TOKENS:
        x = torch.randn(tokens, 64, dtype=torch.bfloat16)
        start = time.perf_counter()
        model(x)
        seconds += time.perf_counter() - start
    metrics = get_compilation_metrics()
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "recompilations": sum(1 for entry in metrics if entry.recompile_reason),
        "breaks": sum(counters["graph_break"].values()),
        "seconds": seconds,
    }


def text(costs: Sequence[Cost]) -> str:
    """The table."""
    header = [
        "impl",
        "L",
        "compiled",
        "graphs",
        "recompilations",
        "graph breaks",
        "cold s",
        "warm s",
    ]
    rows = []
    for cost in costs:
        values = ["-"] * 4 + [cost.error or ""]
        if cost.error is None:
            values = [
                str(cost.graphs),
                str(cost.recompilations),
                str(cost.breaks),
                f"{cost.cold_s:.1f}",
                f"{cost.warm_s:.1f}",
            ]
        rows.append([cost.impl, str(cost.layers), cost.how, *values])
    return table(header, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("impl")
    parser.add_argument("layers", type=int)
    parser.add_argument("how", choices=HOWS)
    given = parser.parse_args()
    print(json.dumps(observe(given.impl, given.layers, given.how)))
