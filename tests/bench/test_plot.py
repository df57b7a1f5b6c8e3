"""The chart as XML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from bench.plot import latency_svg
from tests.bench.fakes import cell

SVG = "{http://www.w3.org/2000/svg}"


def test_a_curve_each_with_the_floor() -> None:
    cells = [
        cell(ms=2.0 * tokens, impl=impl, tokens=tokens, floor_ms=1.0 * tokens)
        for impl in ("cmoe:cpu", "torch:<grouped>")
        for tokens in (1, 4, 16)
    ]
    root = ElementTree.fromstring(latency_svg("olmoe & others", cells))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"olmoe & others", "cmoe:cpu", "torch:<grouped>", "the machine's floor"} <= set(texts)
    assert {"1", "4", "16", "tokens", "ms"} <= set(texts)
    assert len(list(root.iter(f"{SVG}path"))) == 3
    assert len(list(root.iter(f"{SVG}circle"))) == 6


def test_both_axes_are_logarithmic() -> None:
    cells = [cell(ms=float(tokens), tokens=tokens, floor_ms=None) for tokens in (1, 10, 100)]
    root = ElementTree.fromstring(latency_svg("x", cells))
    path = next(root.iter(f"{SVG}path")).get("d")
    assert path is not None
    numbers = [float(text) for text in re.findall(r"[\d.]+", path)]
    (x0, y0), (x1, y1), (x2, y2) = zip(numbers[::2], numbers[1::2], strict=True)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y2


def test_nothing_timed_nothing_plotted() -> None:
    with pytest.raises(ValueError, match="olmoe: no cell was timed"):
        latency_svg("olmoe", [cell(ms=None, error="no")])


def test_one_size_alone_can_be_plotted() -> None:
    ElementTree.fromstring(latency_svg("x", [cell(ms=1.0, floor_ms=1.0)]))
