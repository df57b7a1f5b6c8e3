"""`python -m bench run`: a suite by name or by flags, one record file, one table."""

from __future__ import annotations

import argparse
import dataclasses
import os
from contextlib import nullcontext
from pathlib import Path

import torch

from bench import (
    cpu,
    environment,
    floor,
    limits,
    modes,
    record,
    run,
    shapes,
    small_layer,
    suites,
    tables,
)
from bench.flags import Values
from bench.peers import PEERS, add_peers_from
from bench.progress import Progress
from bench.timing import CacheFlush, CudaCacheFlush, NoFlush


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the flags."""
    parser = commands.add_parser("run", help=__doc__.partition(": ")[2])
    parser.add_argument(
        "suite",
        nargs="?",
        default="headline",
        help=f"{', '.join(suites.suites(cuda=torch.cuda.is_available()))}, small-layer"
        " (default: headline)",
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        action=Values,
        help=f"sizes as E16K4H256I128, or {', '.join(shapes.SHAPES)}",
    )
    parser.add_argument("--tokens", nargs="+", action=Values, type=int, help="batch sizes T")
    parser.add_argument("--dtype", nargs="+", action=Values, choices=tuple(shapes.DTYPES))
    parser.add_argument(
        "--impl", nargs="+", action=Values, help=f"implementations: {', '.join(PEERS)}"
    )
    parser.add_argument(
        "--mode", nargs="+", action=Values, choices=modes.MODES, help="needs --impl"
    )
    parser.add_argument(
        "--routing", nargs="+", action=Values, help="uniform, skewed, a file of recorded ids"
    )
    parser.add_argument("--seconds", type=float, help="time for one cell")
    parser.add_argument("--no-flush", action="store_true", help="leave the caches warm")
    add_machine_flags(parser)
    parser.add_argument("--out", type=Path, default=Path("bench-records/latest.json"))
    parser.set_defaults(execute=execute)


def add_machine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of every command that runs implementations."""
    parser.add_argument("--threads", type=int, default=cpu.num_cpus())
    parser.add_argument(
        "--vllm-python",
        default=os.environ.get("BENCH_VLLM_PYTHON"),
        help="an interpreter that has vllm (default: $BENCH_VLLM_PYTHON)",
    )
    parser.add_argument("--peers-from", help="a Python file with further adapters")


def suite_of(options: argparse.Namespace) -> suites.Suite:
    """The suite asked for, with what the flags replace."""
    known = suites.suites(cuda=torch.cuda.is_available())
    if options.suite not in known:
        raise ValueError(
            f"unknown suite {options.suite!r}; choose one of {', '.join(known)}, small-layer"
        )
    suite = known[options.suite]
    changes: dict[str, object] = {}
    for flag, name in (
        ("shape", "shapes"),
        ("tokens", "tokens"),
        ("dtype", "dtypes"),
        ("routing", "routings"),
    ):
        if getattr(options, flag) is not None:
            changes[name] = tuple(getattr(options, flag))
    if options.mode is not None and options.impl is None:
        raise ValueError("--mode says how the implementations of --impl run; give --impl too")
    if options.impl is not None:
        changes["competitors"] = tuple(
            suites.Competitor(impl=impl, mode=mode)
            for impl in options.impl
            for mode in options.mode or ("eager",)
        )
    if options.seconds is not None:
        changes["effort"] = dataclasses.replace(suite.effort, min_seconds=options.seconds)
    return dataclasses.replace(suite, **changes)  # type: ignore[arg-type]


def fitting(suite: suites.Suite, pythons: dict[str, str]) -> tuple[suites.Suite, list[record.Cell]]:
    """The suite without the shapes that are too large, with a cell saying so for each of those."""
    kept, refused = [], []
    for name in suite.shapes:
        shape = shapes.shape_from_text(name)
        copies = run.layouts_of(suite, shape, pythons)
        try:
            for dtype in suite.dtypes:
                shapes.refuse_if_too_large(
                    shape, dtype, num_copies=copies, available=shapes.available_bytes()
                )
            kept.append(name)
        except ValueError as error:
            refused += [
                record.Cell(
                    shape=name,
                    tokens=tokens,
                    dtype=suite.dtypes[0],
                    impl="all",
                    mode="eager",
                    error=str(error),
                )
                for tokens in suite.tokens
            ]
    if not kept:
        raise ValueError(refused[0].error)
    return dataclasses.replace(suite, shapes=tuple(kept)), refused


def execute(options: argparse.Namespace) -> int:
    """Measures, saves after every group, prints the table."""
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if options.peers_from:
        add_peers_from(options.peers_from)
    if options.suite == "small-layer":
        return _execute_small_layer(options)
    pythons = {"vllm": options.vllm_python} if options.vllm_python else {}
    suite, cells = fitting(suite_of(options), pythons)
    described = environment.describe(threads=options.threads, command=environment.command_line())
    measured = limits.measure(threads=options.threads)

    def keep(new: list[record.Cell], versions: dict[str, str]) -> None:
        nonlocal measured
        cells.extend(new)
        described["versions"].update(versions)
        measured = limits.best_of(measured, limits.measure(threads=options.threads))
        floored = tuple(floor.with_floors(cell, measured) for cell in cells)
        made = record.Record(environment=described, limits=measured, cells=floored)
        record.save(made, options.out)

    groups = run.groups_of(suite)
    progress = Progress([run.weight_of(group, suite) for group in groups])
    interrupted = False
    try:
        with limits.open_read_stream(threads=options.threads) or nullcontext() as stream:
            run.run_suite(
                suite,
                threads=options.threads,
                cache_bytes=measured.cache_bytes,
                flush=_flush(options.no_flush, measured),
                remote_pythons=pythons,
                progress=progress,
                keep=keep,
                read=None if stream is None else (lambda: stream.gbps(2)),
            )
    except KeyboardInterrupt:
        interrupted = True
        progress.note("interrupted: the finished cells are kept")
    if cells:
        keep([], {})
        print(tables.record_text(record.load(options.out)))
        print(f"\nRecord: {options.out}")
    return 130 if interrupted else 0


def _execute_small_layer(options: argparse.Namespace) -> int:
    progress = Progress([1.0])
    progress.step("small layers, T=1")
    described = environment.describe(threads=options.threads, command=environment.command_line())
    cells = tuple(small_layer.measure(progress=progress))
    made = record.Record(environment=described, limits=None, cells=cells)
    record.save(made, options.out)
    print(tables.machine_text(made))
    print(f"\n{small_layer.text(cells)}\n\nRecord: {options.out}")
    return 0


def _flush(off: bool, measured: limits.Limits):  # type: ignore[no-untyped-def]
    if off:
        return NoFlush()
    kind = CudaCacheFlush if torch.cuda.is_available() else CacheFlush
    return kind(measured.cache_bytes)
