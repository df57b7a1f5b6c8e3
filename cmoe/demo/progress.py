"""What a run is doing, said before each step, with its time after it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TextIO


class Progress:
    """`[ 12 s] compiling ... 8.1 s` on a stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = time.monotonic()

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Announces a step, then says how long it took."""
        begin = time.monotonic()
        self._write(f"[{begin - self._start:3.0f} s] {what} ...")
        try:
            yield
        except BaseException:
            self._write("\n")
            raise
        self._write(f" {time.monotonic() - begin:.1f} s\n")

    def note(self, line: str) -> None:
        """A line between steps."""
        self._write(f"        {line}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
