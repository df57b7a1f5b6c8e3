"""Flags that take several values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


class Values(argparse.Action):
    """Values of `nargs="+"`; a flag that is given again adds to them instead of replacing them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option_string: str | None = None,
    ) -> None:
        assert not isinstance(values, str)
        before = getattr(namespace, self.dest)
        earlier = [] if before is self.default else before
        setattr(namespace, self.dest, [*earlier, *(values or ())])
