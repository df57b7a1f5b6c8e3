"""`python -m bench`: the command line of the harness."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import (
    command_compare,
    command_compile,
    command_cudagraph,
    command_report,
    command_run,
    command_tune,
)

_COMMANDS = (
    command_run,
    command_compare,
    command_cudagraph,
    command_compile,
    command_tune,
    command_report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. 0: done, 1: a slowdown was found, 2: a mistake in the call."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in _COMMANDS:
        command.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.execute(options))
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
