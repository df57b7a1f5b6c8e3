"""Latency over tokens as an SVG, with the machine's floor drawn in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from bench.peers import CONTROL
from bench.record import Cell
from bench.tables import column_of

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 250, 40, 50

# Colours that people with colour blindness can tell apart: Okabe, Ito, 2008.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#555555")


def latency_svg(title: str, cells: Sequence[Cell]) -> str:
    """One chart, both axes logarithmic. Raises ValueError where nothing was timed."""
    timed = [cell for cell in cells if cell.ms_median is not None and cell.impl != CONTROL]
    if not timed:
        raise ValueError(f"{title}: no cell was timed, there is nothing to plot")
    curves = _curves(timed)
    floors = {cell.tokens: cell.floor_ms for cell in timed if cell.floor_ms is not None}
    values = [ms for points in curves.values() for _, ms in points] + list(floors.values())
    x = _log_scale([cell.tokens for cell in timed], LEFT, WIDTH - RIGHT)
    y = _log_scale(values, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=15),
        *_axes(sorted({cell.tokens for cell in timed}), values, x, y),
    ]
    for index, (name, points) in enumerate(curves.items()):
        parts += _curve(index, name, points, x, y)
    if floors:
        parts += _floor(sorted(floors.items()), len(curves), x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curves(cells: Sequence[Cell]) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for cell in sorted(cells, key=lambda cell: cell.tokens):
        curves.setdefault(column_of(cell), []).append((cell.tokens, cell.ms_median or 0.0))
    return curves


def _log_scale(values: Sequence[float], start: float, end: float) -> Callable[[float], float]:
    low, high = math.log(min(values)), math.log(max(values))
    margin = 0.05 * (high - low) or 0.5
    low, high = low - margin, high + margin
    return lambda value: start + (math.log(value) - low) / (high - low) * (end - start)


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}"'
    return f'<text {place} font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def _path(points: Sequence[tuple[float, float]], style: str) -> str:
    steps = " L ".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return f'<path d="M {steps}" fill="none" {style}/>'


def _axes(
    tokens: Sequence[int],
    values: Sequence[float],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[str]:
    grid = 'stroke="#dddddd"'
    parts = []
    for count in tokens:
        parts.append(_line(x(count), TOP, x(count), HEIGHT - BOTTOM, grid))
        parts.append(_text(x(count), HEIGHT - BOTTOM + 18, str(count), anchor="middle"))
    for power in range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1):
        for factor in (1, 3):
            ms = factor * 10.0**power
            if TOP <= y(ms) <= HEIGHT - BOTTOM:
                parts.append(_line(LEFT, y(ms), WIDTH - RIGHT, y(ms), grid))
                parts.append(_text(LEFT - 6, y(ms) + 4, f"{ms:g}", anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, "tokens", anchor="middle"))
    parts.append(_text(8, TOP - 4, "ms"))
    return parts


def _curve(
    index: int,
    name: str,
    points: Sequence[tuple[int, float]],
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[str]:
    colour = COLOURS[index % len(COLOURS)]
    dash = ' stroke-dasharray="2 3"' if index >= len(COLOURS) else ""
    style = f'stroke="{colour}" stroke-width="2"{dash}'
    places = [(x(tokens), y(ms)) for tokens, ms in points]
    dots = [f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>' for cx, cy in places]
    return [_path(places, style), *dots, *_legend(index, name, style)]


def _floor(
    points: Sequence[tuple[int, float]],
    row: int,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> list[str]:
    style = 'stroke="black" stroke-width="1.5" stroke-dasharray="6 4"'
    return [
        _path([(x(tokens), y(ms)) for tokens, ms in points], style),
        *_legend(row, "the machine's floor", style),
    ]


def _legend(row: int, name: str, style: str) -> list[str]:
    left, height = WIDTH - RIGHT + 16, TOP + 12 + 19 * row
    return [_line(left, height - 4, left + 22, height - 4, style), _text(left + 28, height, name)]
