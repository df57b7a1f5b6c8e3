"""The two models side by side: tokens checked first, costs measured in turn."""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from cmoe.checkpoint.folder import Checkpoint
from cmoe.config import moe_part
from cmoe.demo.client import Worker, WorkerError
from cmoe.demo.options import DemoOptions
from cmoe.demo.progress import Progress
from cmoe.demo.table import Row, render
from cmoe.demo.verdict import (
    LogitsError,
    Verdict,
    check_results,
    check_rounding,
    check_tokens,
)

_ROUNDS = 5


class Measurement:
    """One run: a folder, a prompt, a work folder for caches and logits."""

    def __init__(
        self, options: DemoOptions, checkpoint: Checkpoint, work: Path, progress: Progress
    ) -> None:
        self._options = options
        self._checkpoint = checkpoint
        self._work = work
        self._progress = progress
        self._num_workers = 0
        self._loaded: dict[str, Any] = {}  # what the last worker said of its model

    def run(self) -> tuple[str, list[Verdict]]:
        """The table, the checks."""
        with contextlib.ExitStack() as float32:
            theirs = float32.enter_context(self._worker("transformers", "float32"))
            tokens, reference = self._generate(theirs, "transformers, float32", None)
            ours = float32.enter_context(self._worker("cmoe", "float32"))
            cold = self._compile(ours, "cmoe, float32")
            own_tokens, logits = self._generate(ours, "cmoe, float32", None)
            error = LogitsError.between(logits, reference)
            verdicts = [
                check_tokens(own_tokens, tokens, error)
                if self._loaded["predicts_tokens"]
                else check_results(error)
            ]
            if self._options.dtype == "float32":
                return self._measure(theirs, ours, cold, tokens, reference, verdicts)
        dtype = self._options.dtype
        with self._worker("transformers", dtype) as theirs, self._worker("cmoe", dtype) as ours:
            cold = self._compile(ours, f"cmoe, {dtype}")
            return self._measure(theirs, ours, cold, tokens, reference, verdicts)

    def _measure(
        self,
        theirs: Worker,
        ours: Worker,
        cold: dict[str, Any],
        tokens: list[int],
        reference: Tensor,
        verdicts: list[Verdict],
    ) -> tuple[str, list[Verdict]]:
        with self._progress.step("transformers: trying its implementations, two of them compiled"):
            chosen = theirs.ask("choose")
        for mode, outcome in chosen["trials"].items():
            self._progress.note(f"{mode}: {outcome}")
        errors = []
        for worker, name in ((theirs, "transformers"), (ours, "cmoe")):
            _, logits = self._generate(worker, f"{name}, on the tokens of the float32 run", tokens)
            errors.append(LogitsError.between(logits, reference))
        if self._options.dtype != "float32":
            verdicts.append(check_rounding(self._options.dtype, errors[1], errors[0]))
        prefill, decode = self._times(theirs, ours)
        peaks = [worker.ask("peak") for worker in (theirs, ours)]
        warm = self._warm(theirs, ours)
        compiled = chosen["num_graphs"] > 0
        rows = [
            Row(
                name=_peer_name(chosen["prefill"], chosen["decode"]),
                prefill_ms=prefill[0],
                decode_ms=decode[0],
                num_graphs=chosen["num_graphs"],
                cold_compile_s=chosen["compile_seconds"] if compiled else None,
                warm_compile_s=None,
                peak_bytes=peaks[0]["bytes"],
                largest_difference=errors[0].largest,
            ),
            Row(
                name=f"cmoe {cold['backend']}",
                prefill_ms=prefill[1],
                decode_ms=decode[1],
                num_graphs=peaks[1]["num_graphs"],
                cold_compile_s=cold["seconds"],
                warm_compile_s=warm["seconds"],
                peak_bytes=peaks[1]["bytes"],
                largest_difference=errors[1].largest,
            ),
        ]
        table = render(rows, num_prompt_tokens=self._options.num_prompt_tokens)
        return f"{table}\n\n{self._legend(cold, warm)}", verdicts

    def _legend(self, cold: dict[str, Any], warm: dict[str, Any]) -> str:
        options, part = self._options, moe_part(self._checkpoint.config)
        return (
            f"{part['model_type']}, {part.get('num_hidden_layers', '?')} layers, "
            f"{self._checkpoint.num_bytes() / 1e6:.0f} MB on disk, {options.dtype}, "
            f"{options.device}, {torch.get_num_threads()} threads; medians, the two models in "
            f"turn. {cold['legend']} "
            f"Cold compile: empty caches; warm: a second process, "
            f"{warm['cache_hits']} of {warm['cache_hits'] + warm['cache_misses']} graphs from the "
            "FX cache. Peak memory: of the model's process, while it loads and runs. Logit "
            "difference: to transformers in float32, on the same tokens."
        )

    def _times(self, theirs: Worker, ours: Worker) -> tuple[list[float], list[float]]:
        """Median ms of prefill, of a decode step; transformers' first."""
        medians = []
        for phase in ("prefill", "decode"):
            with self._progress.step(f"timing {phase}, {_ROUNDS} rounds, the two models in turn"):
                times: list[list[float]] = [[], []]
                for worker in (theirs, ours):
                    worker.ask(f"time_{phase}")
                    worker.ask("reset_peak")
                for _ in range(_ROUNDS):
                    for worker, kept in zip((theirs, ours), times, strict=True):
                        kept.extend(worker.ask(f"time_{phase}")["ms"])
                medians.append([statistics.median(kept) for kept in times])
        return medians[0], medians[1]

    def _warm(self, theirs: Worker, ours: Worker) -> dict[str, Any]:
        """The compilation once more, in a second process."""
        theirs.close()
        ours.close()
        with self._worker("cmoe", self._options.dtype) as second:
            return self._compile(second, "cmoe in a second process, caches warm")

    def _compile(self, worker: Worker, what: str) -> dict[str, Any]:
        with self._progress.step(f"{what}: compiling prefill, decode"):
            return {**worker.ask("compile"), "backend": self._loaded["backend"]}

    def _generate(
        self, worker: Worker, what: str, forced: list[int] | None
    ) -> tuple[list[int], Tensor]:
        path = self._work / "logits.safetensors"
        with self._progress.step(f"{what}: generating {self._options.num_tokens} tokens"):
            answer = worker.ask("generate", {"forced": forced, "path": str(path)})
        # A copy: the next answer is written to the same file.
        return answer["tokens"], load_file(path)["logits"].clone()

    @contextlib.contextmanager
    def _worker(self, name: str, dtype: str) -> Iterator[Worker]:
        """A process with the model loaded."""
        options = self._options
        self._num_workers += 1
        cache = self._work / f"{name}-{dtype}"
        log = self._work / f"worker-{self._num_workers}.log"
        with Worker(compile_cache=cache, log=log) as worker:
            with self._progress.step(f"{name}, {dtype}: loading"):
                request = {
                    "folder": str(self._checkpoint.folder),
                    "is_cmoe": name == "cmoe",
                    "dtype": dtype,
                    "device": options.device,
                    "seed": options.seed,
                    "num_prompt_tokens": options.num_prompt_tokens,
                    "num_steps": options.num_tokens,
                }
                answer = worker.ask("load", request)
            self._loaded = self._judged(name, answer)
            yield worker

    def _judged(self, name: str, answer: dict[str, Any]) -> dict[str, Any]:
        """What a worker has loaded; WorkerError where the two models would be run differently."""
        before = self._loaded.get("legend", answer["legend"])
        if answer["legend"] != before:
            raise WorkerError(f"{name}: {answer['legend']}; but the model before: {before}")
        return answer


def _peer_name(prefill: str, decode: str) -> str:
    modes = prefill if prefill == decode else f"{prefill} (prefill), {decode} (decode)"
    return f"transformers {importlib.metadata.version('transformers')} {modes}"
