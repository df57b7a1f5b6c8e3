"""`python -m bench tune`: parameters of the Triton kernels for one shape on this device, a file."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import cpu, tables
from bench.arm import to_device
from bench.flags import Values
from bench.inputs import Case, make_weights
from bench.pairs import PairEffort
from bench.progress import Progress
from bench.shapes import DTYPES, Shape, shape_from_text
from bench.timing import CudaCacheFlush, NoFlush
from bench.triton_trial import TritonTrial, kernel_shape, unavailable
from bench.tune import Finding, tune

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
EFFORT = PairEffort(rounds=9, max_rounds=27, turn_ms=20.0)

HEADER = ("T", "default ms", "best ms", "best / default", "95 % interval", "tried", "kept")


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the flags."""
    parser = commands.add_parser("tune", help=__doc__.partition(": ")[2])
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--dtype", default="bf16", choices=tuple(DTYPES))
    parser.add_argument("--tokens", nargs="+", action=Values, type=int, default=list(TOKENS))
    parser.add_argument("--seconds", type=float, default=110.0, help="for all sizes together")
    parser.add_argument("--out", type=Path, help="default: the file that cmoe reads")
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Prints the table, writes the file; 1 when a default computes something wrong."""
    start = time.monotonic()
    shape = shape_from_text(options.shape)
    reason = unavailable()
    if reason is not None:
        print(f"tune: left out, the Triton kernels do not run here: {reason}")
        return 0
    from cmoe.custom_ops.triton.parameters import bucket_of
    from cmoe.custom_ops.triton.tuned import read_file
    from cmoe.environment import triton_parameters_file

    torch.set_grad_enabled(False)
    torch.set_num_threads(cpu.num_cpus())
    if not torch.cuda.is_available():
        print("tune: Triton's interpreter runs the kernels; its times say nothing about a GPU")
    path = options.out or triton_parameters_file()
    if path.exists():
        read_file(path)  # a mistake in it is told now, not after the first measurement
    findings = _findings(
        shape,
        options.dtype,
        sorted({bucket_of(tokens) for tokens in options.tokens}),
        path,
        seconds_left=lambda: options.seconds - (time.monotonic() - start),
    )
    print(text(findings))
    print(f"\nParameters: {path}" if path.exists() else "\nNo file is needed.")
    return 1 if any(found.is_wrong() for found in findings) else 0


def _findings(
    shape: Shape,
    dtype: str,
    buckets: Sequence[int],
    path: Path,
    *,
    seconds_left: Callable[[], float],
) -> list[Finding]:
    """Tunes bucket after bucket; the file is brought up to date after each one."""
    from cmoe.custom_ops.triton.fused_experts import device_of
    from cmoe.custom_ops.triton.parameters import candidates

    weights = to_device(make_weights(shape, dtype, seed=0))
    device = device_of(weights.w2.device)
    kernels = kernel_shape(shape, weights, dtype)
    cuda = torch.cuda.is_available()
    flush = CudaCacheFlush(torch.cuda.get_device_properties(0).L2_cache_size) if cuda else NoFlush()
    progress = Progress([1.0] * len(buckets))

    def trial_of(tokens: int) -> TritonTrial:
        progress.step(f"{shape.name} {dtype} T={tokens} on {device.name}")
        case = Case(shape=shape, tokens=tokens, dtype=dtype)
        return TritonTrial(shape, weights, case, flush=flush)

    def report(found: Finding) -> None:
        save(found, path, device.name, str(kernels))
        progress.done()

    return tune(
        buckets,
        lambda tokens: candidates(device, kernels, tokens),
        trial_of,
        seconds=seconds_left(),
        effort=EFFORT,
        report=report,
    )


def save(found: Finding, path: Path, device: str, shape: str) -> None:
    """Brings the file's row up to date: there is one only where something beat the default."""
    from cmoe.custom_ops.triton.tuned import read_file, write_file

    if found.error is not None:
        return
    table = dict(read_file(path)) if path.exists() else {}
    shapes = dict(table.get(device, {}))
    before = shapes.get(shape, {})
    rows = {bucket: row for bucket, row in before.items() if bucket != found.bucket}
    if found.is_better():
        rows[found.bucket] = found.best
    if rows != before:
        write_file(path, {**table, device: {**shapes, shape: rows}})


def text(findings: Sequence[Finding]) -> str:
    """The table, then what was refused, then what is left to say."""
    lines = [tables.table(HEADER, [_columns(found) for found in findings])]
    for found in findings:
        if found.error is not None:
            lines.append(f"- T = {found.bucket}: {found.error}")
        lines += [f"- T = {found.bucket}: {why}, {what}" for what, why in found.refused]
    better = sum(found.is_better() for found in findings)
    lines.append(
        f"{better} of {len(findings)} sizes have parameters measurably better than the default."
    )
    return "\n".join(lines)


def _columns(found: Finding) -> list[str]:
    tried = f"{found.tried} of {found.candidates}"
    if found.default_ms is None or found.best_ms is None:
        return [str(found.bucket), "-", "-", "-", "-", tried, "default"]
    ratio, interval = "1", ""
    if found.verdict is not None:
        ratio = f"{found.verdict.ratio:.3f}"
        interval = f"{found.verdict.low:.3f} to {found.verdict.high:.3f}"
    return [
        str(found.bucket),
        tables.ms_text(found.default_ms),
        tables.ms_text(found.best_ms),
        ratio,
        interval,
        tried,
        "tuned" if found.is_better() else "default",
    ]
