"""The progress line."""

from __future__ import annotations

import io

import pytest

from bench.progress import Progress, readable


def test_the_estimate_follows_the_weights() -> None:
    now = [0.0]
    stream = io.StringIO()
    progress = Progress([1.0, 3.0, 2.0], stream=stream, clock=lambda: now[0])
    progress.step("first")
    assert progress.seconds_left() is None
    now[0] = 10.0
    progress.done()
    # Ten seconds a unit of weight, five units to go.
    assert progress.seconds_left() == 50.0
    progress.step("second")
    assert stream.getvalue() == "[1/3] first  0 s\n[2/3] second  10 s, about 50 s left\n"


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.4, "12 s"), (60, "1 min 00 s"), (185, "3 min 05 s")]
)
def test_seconds_are_readable(seconds: float, text: str) -> None:
    assert readable(seconds) == text
