"""Markdown tables of a record's cells."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.peers import CONTROL
from bench.record import Cell, Record

OURS = "cmoe:"

BUSY_SPREAD = 0.3
"""Above this typical spread a table says that it cannot be trusted. Idle machines stay below 0.1,
hosts with other guests reached 0.16 in records whose medians repeated."""


def column_of(cell: Cell) -> str:
    """The heading of an implementation under a mode."""
    return cell.impl if cell.mode == "eager" else f"{cell.impl} {cell.mode}"


def ms_text(ms: float) -> str:
    """Three significant digits."""
    if ms >= 100:
        return f"{ms:.0f}"
    return f"{ms:.3g}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, columns padded to line up in a terminal."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = [
        "| "
        + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([padded[0], rule, *padded[1:]])


def grouped(cells: Iterable[Cell]) -> dict[tuple[str, str, str, str], list[Cell]]:
    groups: dict[tuple[str, str, str, str], list[Cell]] = {}
    for cell in cells:
        key = (cell.part, cell.shape, cell.dtype, cell.routing)
        groups.setdefault(key, []).append(cell)
    return groups


def title_of(key: tuple[str, str, str, str]) -> str:
    """The heading of a group: shape, dtype, what is timed, routing."""
    part, shape, dtype, routing = key
    return f"{shape}, {dtype}, {part}, {routing} routing"


def _cell_text(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.ms_median is None:
        return "-"
    fraction = cell.fraction_of_floor()
    share = "" if fraction is None else f" ({100 * fraction:.0f} %)"
    return ms_text(cell.ms_median) + share


def best(cells: Iterable[Cell], *, ours: bool) -> Cell | None:
    """The fastest cell among cmoe's own, or among the peers'."""
    timed = [
        cell
        for cell in cells
        if cell.ms_median is not None
        and cell.impl != CONTROL
        and cell.impl.startswith(OURS) == ours
    ]
    return min(timed, key=lambda cell: cell.ms_median or 0.0, default=None)


def speedup_text(cells: Sequence[Cell]) -> str:
    """The best peer's time over cmoe's best, with the peer's name."""
    mine, theirs = best(cells, ours=True), best(cells, ours=False)
    if mine is None or theirs is None or mine.ms_median is None or theirs.ms_median is None:
        return "-"
    return f"{theirs.ms_median / mine.ms_median:.2f}x {column_of(theirs)}"


def latency_table(cells: Sequence[Cell]) -> str:
    """Tokens down, implementations across: `median ms (% of the floor)`."""
    columns = list(dict.fromkeys(column_of(cell) for cell in cells))
    header = ["T", "active", "floor ms", *columns, "best peer / cmoe"]
    rows = []
    for tokens in sorted({cell.tokens for cell in cells}):
        row = [cell for cell in cells if cell.tokens == tokens]
        by_column = {column_of(cell): cell for cell in row}
        timed = next((cell for cell in row if cell.floor_ms is not None), None)
        rows.append(
            [
                str(tokens),
                "" if timed is None else str(timed.active_experts),
                "" if timed is None or timed.floor_ms is None else ms_text(timed.floor_ms),
                *[_cell_text(by_column.get(column)) for column in columns],
                speedup_text(row),
            ]
        )
    return table(header, rows)


def summary_table(cells: Sequence[Cell]) -> str:
    """Shapes down, tokens across: cmoe's best time, percent of the floor, gain on the best peer."""
    sizes = sorted({cell.tokens for cell in cells})
    rows = []
    for key, group in grouped(cells).items():
        row = [title_of(key)]
        for tokens in sizes:
            here = [cell for cell in group if cell.tokens == tokens]
            mine, theirs = best(here, ours=True), best(here, ours=False)
            text = _cell_text(mine)
            if mine is not None and theirs is not None:
                assert mine.ms_median is not None and theirs.ms_median is not None
                text += f", {theirs.ms_median / mine.ms_median:.2f}x"
            row.append(text)
        rows.append(row)
    return table(["", *[f"T = {tokens}" for tokens in sizes]], rows)


def reasons_text(cells: Iterable[Cell]) -> str:
    """Why cells are empty, each reason once."""
    reasons: dict[tuple[str, str], list[int]] = {}
    for cell in cells:
        if cell.error is not None:
            reasons.setdefault((column_of(cell), cell.error), []).append(cell.tokens)
    lines = [
        f"- {column}, T = {', '.join(map(str, tokens))}: {error}"
        for (column, error), tokens in reasons.items()
    ]
    return "\n".join(lines)


def spread_of(cell: Cell) -> float:
    """Distance of the quartiles of a cell's samples over its median."""
    ordered = sorted(cell.ms_samples)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / (cell.ms_median or 1.0)


def spread_text(cells: Iterable[Cell]) -> str:
    """How much the samples of one cell differ: typically, at worst."""
    timed = sorted((cell for cell in cells if cell.ms_samples), key=spread_of)
    if not timed:
        return "Nothing was timed."
    typical, worst = timed[len(timed) // 2], timed[-1]
    text = (
        f"Spread (quartile distance / median): {100 * spread_of(typical):.1f} % typical, at most "
        f"{100 * spread_of(worst):.0f} % ({worst.shape} T={worst.tokens} {column_of(worst)})."
    )
    if spread_of(typical) > BUSY_SPREAD:
        text += " Something else ran on this machine: do not trust these times, run again."
    return text


def _read_text(record: Record) -> str:
    """The rates between the calls where they were taken, else the one of the run."""
    assert record.limits is not None
    rates = sorted(cell.read_gbps for cell in record.cells if cell.read_gbps is not None)
    if not rates:
        return f"{record.limits.read_gbps:.3g} GB/s"
    return f"{rates[0]:.3g} to {rates[-1]:.3g} GB/s (taken between the calls of each row)"


def machine_text(record: Record) -> str:
    """The machine, its limits in this run, the command."""
    environment, limits = record.environment, record.limits
    lines = [
        f"{environment.get('device')}, {environment.get('threads')} threads, "
        f"commit {environment.get('commit')}, {environment.get('time')}."
    ]
    if limits is not None:
        dot = f", bf16 dot {limits.dot_bf16_tflops:.3g}" if limits.dot_bf16_tflops else ""
        lines.append(
            f"Limits measured in this run: read {_read_text(record)}, fp32 FMA "
            f"{limits.fma_fp32_tflops:.3g}{dot}, torch bf16 matmul "
            f"{limits.matmul_bf16_tflops:.3g} TFLOP/s."
        )
    versions = environment.get("versions", {})
    lines.append(spread_text(record.cells))
    lines.append(
        "Versions: " + ", ".join(f"{name} {text}" for name, text in versions.items()) + "."
    )
    lines.append(f"Command: `{environment.get('command')}`")
    return "\n".join(lines)


def record_text(record: Record) -> str:
    """Everything of a record that people read."""
    parts = [machine_text(record)]
    for key, cells in grouped(record.cells).items():
        parts.append(f"### {title_of(key)}\n\n{latency_table(cells)}")
        reasons = reasons_text(cells)
        if reasons:
            parts.append("Left out:\n\n" + reasons)
    parts.append(
        "Cells: median milliseconds (percent of the floor); -: left out for the reason below the "
        "table; blank: not in the suite. "
        "Floor = max(bytes of the active experts / read bandwidth, flops / peak); the peak is the "
        "fastest multiplication measured for the dtype, float32 FMA where asked for."
    )
    return "\n\n".join(parts)
