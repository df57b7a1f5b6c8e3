"""The table of what each model cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One model's costs. None: nothing was compiled, or the system does not tell."""

    name: str
    prefill_ms: float
    decode_ms: float  # a token
    num_graphs: int
    cold_compile_s: float | None
    warm_compile_s: float | None
    peak_bytes: int | None
    largest_difference: float


def render(rows: Sequence[Row], *, num_prompt_tokens: int) -> str:
    """A Markdown table, one line a model."""
    header = [
        "",
        f"prefill, {num_prompt_tokens} tokens",
        "decode, a token",
        "graphs",
        "compile cold / warm",
        "peak memory",
        "largest logit difference",
    ]
    lines = [
        [
            row.name,
            f"{row.prefill_ms:.1f} ms, {1e3 * num_prompt_tokens / row.prefill_ms:.0f} tok/s",
            f"{row.decode_ms:.2f} ms, {1e3 / row.decode_ms:.0f} tok/s",
            str(row.num_graphs),
            f"{_seconds(row.cold_compile_s)} / {_seconds(row.warm_compile_s)}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f} MB",
            f"{row.largest_difference:.2g}",
        ]
        for row in rows
    ]
    return tabulate(lines, headers=header, tablefmt="github", disable_numparse=True)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"
