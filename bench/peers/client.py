"""The near end of a process that holds arms."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.arm import Started
from bench.inputs import Case
from bench.peers.wire import case_to_json, started_from_json
from bench.shapes import Shape

_ROOT = Path(__file__).resolve().parents[2]


class ServerError(RuntimeError):
    """The process ended, or could not do what was asked."""


class ArmServer:
    """A running `bench.peers.server`."""

    def __init__(
        self,
        python: str = sys.executable,
        *,
        threads: int,
        cache_bytes: int,
        path: Path = _ROOT,
        environment: Mapping[str, str] | None = None,
        peers_from: str | None = None,
    ) -> None:
        command = [python, "-m", "bench.peers.server"]
        command += ["--threads", str(threads), "--cache-bytes", str(cache_bytes)]
        if peers_from:
            command += ["--peers-from", str(Path(peers_from).resolve())]
        self._what = python
        self._num_arms = 0
        try:
            self._process = subprocess.Popen(
                command,
                cwd=path,
                env={**os.environ, "PYTHONPATH": str(path), **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                # Ctrl-C is for the caller, which ends this process when it has saved its cells.
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"cannot start {python}: {error.strerror}") from error

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends one request, waits for its answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            status = self._process.wait()
            raise ServerError(f"the process of {self._what} ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise ServerError(answer["failed"])
        return answer

    def new_arm(self, impl: str, mode: str) -> RemoteArm:
        """An arm in that process."""
        self._num_arms += 1
        self.ask(do="new", arm=self._num_arms, impl=impl, mode=mode)
        return RemoteArm(self, self._num_arms, impl, mode)

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # A process that has ended already takes no last line.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class RemoteArm:
    """An arm in another process; see `bench.arm.Arm`."""

    def __init__(self, server: ArmServer, number: int, impl: str, mode: str) -> None:
        self.impl = impl
        self.mode = mode
        self._server = server
        self._number = number

    def open(self, shape: Shape, dtype: str, seed: int) -> str | None:
        """Takes in the weights of one shape; the reason where that does not work."""
        try:
            answer = self._server.ask(
                do="open",
                arm=self._number,
                shape=dataclasses.asdict(shape),
                dtype=dtype,
                seed=seed,
            )
        except ServerError as error:
            return str(error)
        return answer["reason"]

    def begin(self, case: Case) -> Started:
        """Warms up on one case."""
        try:
            answer = self._server.ask(do="begin", arm=self._number, case=case_to_json(case))
        except ServerError as error:
            return Started(impl=self.impl, error=str(error))
        return started_from_json(answer)

    def time(self, first: int, calls: int) -> list[float]:
        """Milliseconds of `calls` calls on the case's draws, from draw number `first` on."""
        answer = self._server.ask(do="time", arm=self._number, first=first, calls=calls)
        return answer["ms"]

    def close(self) -> None:
        """Lets the weights go."""
        self._server.ask(do="close", arm=self._number)
