"""`python -m bench compare A B`: two record files or two git revisions, a verdict for each cell."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch

from bench import compare, cpu, record, revisions, run
from bench.command_run import add_machine_flags, fitting, suite_of
from bench.flags import Values
from bench.pairs import PairEffort
from bench.peers import add_peers_from
from bench.peers.client import ArmServer
from bench.progress import Progress


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the flags."""
    parser = commands.add_parser("compare", help=__doc__.partition(": ")[2])
    parser.add_argument("a", metavar="A", help="a record file, a git revision")
    parser.add_argument("b", metavar="B", help="the same; `.` is the working tree")
    parser.add_argument("--threshold", type=float, default=0.05, help="what counts, 0.05 = 5 %%")
    parser.add_argument("--suite", default="compare")
    parser.add_argument("--shape", nargs="+", action=Values)
    parser.add_argument("--tokens", nargs="+", action=Values, type=int)
    parser.add_argument("--dtype", nargs="+", action=Values)
    parser.add_argument("--impl", nargs="+", action=Values)
    parser.add_argument("--mode", nargs="+", action=Values)
    parser.add_argument("--routing", nargs="+", action=Values)
    parser.add_argument("--rounds", type=int, default=PairEffort().rounds)
    parser.add_argument("--repository", type=Path, default=Path(__file__).parents[1])
    add_machine_flags(parser)
    parser.set_defaults(execute=execute, seconds=None)


def execute(options: argparse.Namespace) -> int:
    """Prints the table; 1 when a cell is slower by more than the threshold, else 0."""
    if Path(options.a).is_file() and Path(options.b).is_file():
        a, b = record.load(Path(options.a)), record.load(Path(options.b))
        rows = compare.compare_records(a, b, threshold=options.threshold)
    else:
        rows = _compare_revisions(options)
    print(compare.rows_text(rows))
    return 1 if compare.has_slowdown(rows) else 0


def _compare_revisions(options: argparse.Namespace) -> list[compare.Row]:
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if options.peers_from:
        add_peers_from(options.peers_from)
    # Each side holds its own copy of the weights.
    suite, refused = fitting(suite_of(options), {"a": "A", "b": "B"})
    for cell in refused:
        print(f"bench: {cell.error}", file=sys.stderr)
    groups = run.groups_of(suite)
    weights = [run.weight_of(group, suite) for group in groups for _ in suite.competitors]
    effort = dataclasses.replace(PairEffort(), rounds=options.rounds)
    with revisions.checked_out(options.repository, (options.a, options.b)) as (tree_a, tree_b):

        def start() -> tuple[ArmServer, ArmServer]:
            servers = [
                tree.start(
                    threads=options.threads,
                    cache_bytes=cpu.last_level_cache_bytes(),
                    peers_from=options.peers_from,
                )
                for tree in (tree_a, tree_b)
            ]
            return servers[0], servers[1]

        return compare.compare_groups(
            groups,
            suite.competitors,
            start=start,
            effort=effort,
            threshold=options.threshold,
            progress=Progress(weights),
        )
