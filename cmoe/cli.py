"""The `cmoe` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from cmoe.demo.client import WorkerError
from cmoe.demo.options import DemoOptions
from cmoe.demo.run import run_demo
from cmoe.errors import UnsupportedError
from cmoe.inspection.report import inspect_folder
from cmoe.machine import describe

USER_ERROR = 2


class _Parser(argparse.ArgumentParser):
    """argparse prints its usage with each error; one line is enough."""

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(USER_ERROR, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0; 1 when the demo's models disagree, when the inspected folder cannot be
    loaded; 2 for an error of the user.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.command == "env":
            print(describe())
            return 0
        if options.command == "inspect":
            text, is_loadable = inspect_folder(options.folder)
            print(text)
            return 0 if is_loadable else 1
        return run_demo(_demo_options(options), sys.stdout, sys.stderr)
    except (ValueError, OSError, UnsupportedError, WorkerError) as error:
        line = " ".join(str(error).split())
        print(f"cmoe {options.command}: {line}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cmoe", description="Mixture-of-Experts layers for compiled PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("env", help="versions, processor, devices, backends with their reasons")
    inspect = commands.add_parser("inspect", help="what a checkpoint is, from its headers alone")
    inspect.add_argument("folder", type=Path, metavar="DIR", help="a folder in Hugging Face format")
    demo = commands.add_parser("demo", help="run a checkpoint, compared with transformers")
    demo.add_argument(
        "model",
        nargs="?",
        type=Path,
        metavar="MODEL_DIR",
        help="a folder in Hugging Face format; without it a seeded Qwen3-MoE checkpoint is written",
    )
    demo.add_argument("--tokens", type=_positive, default=32, help="tokens to generate (32)")
    demo.add_argument("--prompt-tokens", type=_positive, default=128, help="tokens to read (128)")
    demo.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="of the timed run (bfloat16); the tokens are checked in float32 first in any case",
    )
    demo.add_argument("--seed", type=int, default=0, help="of weights, of the prompt (0)")
    demo.add_argument(
        "--keep", type=Path, metavar="DIR", help="where to leave the generated checkpoint"
    )
    demo.add_argument("--device", choices=("cpu", "cuda"), help="cuda where there is one")
    return parser


def _demo_options(options: argparse.Namespace) -> DemoOptions:
    if options.model is not None and options.keep is not None:
        raise ValueError("--keep is for the generated checkpoint; leave it out with MODEL_DIR")
    has_cuda = torch.cuda.is_available()
    if options.device == "cuda" and not has_cuda:
        raise ValueError("--device cuda: torch finds no CUDA device here")
    return DemoOptions(
        model=options.model,
        keep=options.keep,
        num_tokens=options.tokens,
        num_prompt_tokens=options.prompt_tokens,
        dtype=options.dtype,
        seed=options.seed,
        device=options.device or ("cuda" if has_cuda else "cpu"),
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
