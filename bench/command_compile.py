"""`python -m bench compile`: graphs, recompilations, cold start, warm start of whole models."""

from __future__ import annotations

import argparse

from bench import compile_cost
from bench.flags import Values
from bench.progress import Progress
from bench.stacks import LAYERS


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the flags."""
    parser = commands.add_parser("compile", help=__doc__.partition(": ")[2])
    parser.add_argument(
        "--impl", nargs="+", action=Values, default=list(LAYERS), choices=tuple(LAYERS)
    )
    parser.add_argument("--layers", nargs="+", action=Values, type=int, default=[1, 12, 48])
    parser.add_argument("--how", nargs="+", action=Values, default=list(compile_cost.HOWS))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one process")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Prints the table; what was measured before Ctrl-C is printed too."""
    todo = [
        (impl, layers, how)
        for layers in options.layers
        for impl in options.impl
        for how in options.how
    ]
    progress = Progress([10.0 + layers for _, layers, _ in todo])
    costs: list[compile_cost.Cost] = []
    status = 0
    try:
        for impl, layers, how in todo:
            progress.step(f"{impl} {layers} layers, {how}")
            costs.append(compile_cost.measure(impl, layers, how, timeout_s=options.timeout))
            progress.done()
    except KeyboardInterrupt:
        progress.note("interrupted: the finished rows are kept")
        status = 130
    print(compile_cost.text(costs))
    return status
