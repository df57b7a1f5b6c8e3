"""Arms in a process of their own: requests come in on stdin, answers go out on stdout.

Started as `python -m bench.peers.server --threads N --cache-bytes N`, by the interpreter that has
the library, or with the source tree that is to be measured first on its path.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any, TextIO

import torch

from bench.arm import LocalArm, TensorStore
from bench.peers import add_peers_from
from bench.peers.wire import case_from_json, started_to_json
from bench.shapes import Shape
from bench.timing import CacheFlush, NoFlush

_QUIET_SHARE = 0.05
_LONGEST_WAIT_S = 0.5


def wait_until_quiet() -> None:
    """Waits until this process' pool threads have stopped spinning, so that the next arm has the
    cores to itself."""
    deadline = time.perf_counter() + _LONGEST_WAIT_S
    while time.perf_counter() < deadline:
        before, start = time.process_time(), time.perf_counter()
        time.sleep(0.005)
        if time.process_time() - before < _QUIET_SHARE * (time.perf_counter() - start):
            return


class Server:
    """Holds the arms of this process by number."""

    def __init__(self, *, cache_bytes: int) -> None:
        self._store = TensorStore()
        self._flush = CacheFlush(cache_bytes) if cache_bytes else NoFlush()
        self._arms: dict[int, LocalArm] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does one request."""
        verb, number = request["do"], request.get("arm", 0)
        if verb == "new":
            impl, mode = request["impl"], request["mode"]
            arm = LocalArm(impl, mode, store=self._store, flush=self._flush)
            self._arms[number] = arm
            return {}
        if verb == "source":
            return {"file": _source_of(request["module"])}
        arm = self._arms[number]
        if verb == "open":
            shape = Shape(**request["shape"])
            return {"reason": arm.open(shape, request["dtype"], request["seed"])}
        if verb == "begin":
            return started_to_json(arm.begin(case_from_json(request["case"])))
        if verb == "time":
            return {"ms": arm.time(request["first"], request["calls"])}
        if verb == "close":
            arm.close()
            return {}
        raise ValueError(f"unknown request {verb!r}")


def _source_of(module: str) -> str:
    __import__(module)
    return os.path.realpath(str(sys.modules[module].__file__))


def serve(server: Server, requests: TextIO, answers: TextIO) -> None:
    """Answers each line until the input ends."""
    for line in requests:
        try:
            answer = server.answer(json.loads(line))
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        wait_until_quiet()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cache-bytes", type=int, required=True)
    parser.add_argument("--peers-from")
    options = parser.parse_args()
    # What libraries print must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if options.peers_from:
        add_peers_from(options.peers_from)
    serve(Server(cache_bytes=options.cache_bytes), sys.stdin, answers)


if __name__ == "__main__":
    main()
