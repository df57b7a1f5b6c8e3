"""`python -m bench cudagraph`: capture, replay, first calls, memory held, eager beside compiled."""

from __future__ import annotations

import argparse

import torch

from bench import cudagraph, tables
from bench.flags import Values
from bench.peers import PEERS
from bench.progress import Progress
from bench.shapes import DTYPES, shape_from_text


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the flags."""
    parser = commands.add_parser("cudagraph", help=__doc__.partition(": ")[2])
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument(
        "--tokens", nargs="+", action=Values, type=int, default=[1, 4, 16, 64, 256, 1024, 4096]
    )
    parser.add_argument(
        "--impl", nargs="+", action=Values, default=["cmoe:auto", "transformers:grouped_mm"]
    )
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Prints the table; without CUDA a line that says what is missing."""
    shape = shape_from_text(options.shape)
    unknown = [impl for impl in options.impl if impl not in PEERS]
    if unknown:
        raise ValueError(f"unknown implementation {unknown[0]!r}; choose of {', '.join(PEERS)}")
    if not torch.cuda.is_available():
        print("cudagraph: left out, CUDA graphs need a CUDA device and this machine has none")
        return 0
    torch.set_grad_enabled(False)
    progress = Progress([1.0] * len(options.impl))
    rows = []
    for impl in options.impl:
        progress.step(f"{shape.name} {impl}")
        rows += cudagraph.measure(shape, options.dtype, impl, options.tokens)
        progress.done()
    print(tables.table(cudagraph.HEADER, [cost.columns() for cost in rows]))
    return 0
