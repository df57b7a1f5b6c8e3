"""Two versions of the library side by side, each in processes of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.peers.client import ArmServer

_BENCH = Path(__file__).resolve().parent
WORKING_TREE = "."
"""The name of the sources as they lie, with changes that were not committed."""


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A folder in which `bench` is this harness, `cmoe` that of a revision."""

    revision: str
    root: Path
    package: Path  # where cmoe really lies
    cache: Path  # compiled kernels of this revision alone

    def start(
        self,
        *,
        threads: int,
        cache_bytes: int,
        python: str = sys.executable,
        peers_from: str | None,
    ) -> ArmServer:
        """A process that imports this tree's cmoe. Raises ValueError if it gets another one."""
        server = ArmServer(
            python,
            threads=threads,
            cache_bytes=cache_bytes,
            path=self.root,
            environment={
                "CMOE_CACHE_DIR": str(self.cache / "cmoe"),
                "TORCHINDUCTOR_CACHE_DIR": str(self.cache / "inductor"),
            },
            peers_from=peers_from,
        )
        found = Path(server.ask(do="source", module="cmoe")["file"])
        if self.package not in found.parents:
            server.stop()
            raise ValueError(f"{self.revision}: cmoe came from {found}, not from {self.package}")
        return server


@contextmanager
def checked_out(repository: Path, revisions: tuple[str, str]) -> Iterator[tuple[Tree, Tree]]:
    """Both revisions in temporary worktrees, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="bench-compare-") as folder:
        trees = []
        added: list[Path] = []
        try:
            for side, revision in zip("ab", revisions, strict=True):
                root = Path(folder) / side
                root.mkdir()
                source = repository.resolve()
                if revision != WORKING_TREE:
                    source = root / "source"
                    _git(repository, "worktree", "add", "--detach", str(source), revision)
                    added.append(source)
                package = (source / "cmoe").resolve()
                if not package.is_dir():
                    raise ValueError(f"{revision} has no folder cmoe")
                (root / "cmoe").symlink_to(package)
                (root / "bench").symlink_to(_BENCH)
                trees.append(
                    Tree(revision=revision, root=root, package=package, cache=root / "cache")
                )
            yield trees[0], trees[1]
        finally:
            for source in added:
                _git(repository, "worktree", "remove", "--force", str(source))


def _git(repository: Path, *arguments: str) -> None:
    done = subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True
    )
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
