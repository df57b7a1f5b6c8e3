"""The demo from the options to the exit code."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from pathlib import Path
from typing import TextIO

from cmoe.checkpoint.folder import Checkpoint, open_checkpoint
from cmoe.checkpoint.load import family_in, model_type_of
from cmoe.demo.measurement import Measurement
from cmoe.demo.options import DemoOptions
from cmoe.demo.progress import Progress
from cmoe.demo.seeded import write_seeded_checkpoint
from cmoe.families import SWITCH_ONLY
from cmoe.machine import available_bytes

_PROCESS_BYTES = 1_000_000_000
"""What a process takes for torch with transformers, beside the weights."""


class DemoError(ValueError):
    """The demo cannot run as it was asked to."""


def run_demo(options: DemoOptions, out: TextIO, err: TextIO) -> int:
    """Prints the table to `out`, progress to `err`; 0, or 1 when the two models disagree.

    DemoError, LoadError for what cannot be run at all, before any work; WorkerError when a model
    fails.
    """
    _check_installed()
    progress = Progress(err)
    with tempfile.TemporaryDirectory(prefix="cmoe-demo-") as temporary:
        folder = _model_folder(options, Path(temporary), progress)
        checkpoint = open_checkpoint(folder)
        if model_type_of(checkpoint) not in SWITCH_ONLY:
            family_in(checkpoint)
        _check_memory(checkpoint)
        table, verdicts = Measurement(options, checkpoint, Path(temporary), progress).run()
    out.write(f"\n{table}\n\n")
    for verdict in verdicts:
        out.write(f"{'ok' if verdict.passed else 'WRONG'}  {verdict.text}\n")
    return 0 if all(verdict.passed for verdict in verdicts) else 1


def _model_folder(options: DemoOptions, temporary: Path, progress: Progress) -> Path:
    """The folder given, or one with a seeded checkpoint."""
    if options.model is not None:
        return options.model
    folder = temporary / "checkpoint" if options.keep is None else options.keep
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise DemoError(f"{folder} is not empty; keep the checkpoint in a new folder")
    with progress.step(f"writing a seeded Qwen3-MoE checkpoint to {folder}"):
        num_bytes = write_seeded_checkpoint(folder, seed=options.seed, sizes=options.sizes)
    progress.note(f"{num_bytes / 1e6:.0f} MB, {options.sizes}")
    return folder


def _check_installed() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise DemoError(
            "the demo compares with transformers, which is not installed; "
            "pip install 'cmoe[transformers]'"
        )


def _check_memory(checkpoint: Checkpoint) -> None:
    """Two models are in memory at a time: two in float32, at the worst."""
    parameters = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    needed, available = 2 * (4 * parameters + _PROCESS_BYTES), available_bytes()
    if available is not None and needed > available:
        raise DemoError(
            f"{checkpoint.folder} has {parameters / 1e9:.1f} billion parameters: transformers with "
            f"cmoe in float32 take about {needed / 1e9:.0f} GB, {available / 1e9:.0f} GB are "
            "available; try a smaller model"
        )
