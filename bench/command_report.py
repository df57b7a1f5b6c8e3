"""`python -m bench report`: from record files to Markdown tables, SVG plots."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from bench import plot, record, tables
from bench.flags import Values

_BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n).*?(<!-- /bench -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[record.Record], str]] = {
    "summary": lambda made: tables.summary_table(made.cells),
    "full": tables.record_text,
    "machine": tables.machine_text,
}
"""What can stand between `<!-- bench: NAME -->` and `<!-- /bench -->` in a document."""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the flags."""
    parser = commands.add_parser("report", help=__doc__.partition(": ")[2])
    parser.add_argument("records", nargs="+", type=Path)
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write an SVG a shape there")
    parser.add_argument(
        "--into",
        nargs="+",
        action=Values,
        type=Path,
        default=[],
        metavar="FILE",
        help="renew the blocks between <!-- bench: NAME --> and <!-- /bench -->",
    )
    parser.add_argument(
        "--floor",
        choices=("best", "fma"),
        default="best",
        help="percent of the floor at the fastest multiplication, or at float32 FMA",
    )
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Prints the tables; writes the plots, the blocks that were asked for."""
    records = [record.load(path) for path in options.records]
    made = merged(records)
    if options.floor == "fma":
        made = at_fma_floor(made)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
        for key, cells in tables.grouped(made.cells).items():
            path = options.plots / f"{'-'.join(key)}.svg"
            path.write_text(plot.latency_svg(tables.title_of(key), cells))
            print(f"wrote {path}")
    for path in options.into:
        path.write_text(renewed(path.read_text(), made, path))
        print(f"renewed {path}")
    if options.plots is None and not options.into:
        print(tables.record_text(made))
    return 0


def at_fma_floor(made: record.Record) -> record.Record:
    """The record with the floor at the float32 FMA rate in place of the other one."""
    cells = (dataclasses.replace(cell, floor_ms=cell.floor_fma_ms) for cell in made.cells)
    return dataclasses.replace(made, cells=tuple(cells))


def merged(records: list[record.Record]) -> record.Record:
    """One record with the cells of all, the later of two equal cells. The first one's machine."""
    cells = {cell.key(): cell for made in records for cell in made.cells}
    first = records[0]
    devices = {str(made.environment.get("device")) for made in records}
    if len(devices) > 1:
        raise ValueError(f"records of different machines do not mix: {', '.join(sorted(devices))}")
    return record.Record(
        environment=first.environment, limits=first.limits, cells=tuple(cells.values())
    )


def renewed(text: str, made: record.Record, path: Path) -> str:
    """The document with every block written anew. Raises ValueError where it has none."""

    def block(match: re.Match[str]) -> str:
        name = match.group(2)
        if name not in BLOCKS:
            raise ValueError(f"{path}: unknown block {name!r}; choose one of {', '.join(BLOCKS)}")
        return f"{match.group(1)}{BLOCKS[name](made)}\n{match.group(3)}"

    if not _BLOCK.search(text):
        raise ValueError(f"{path} has no block <!-- bench: NAME --> ... <!-- /bench -->")
    return _BLOCK.sub(block, text)
