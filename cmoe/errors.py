"""The errors that cmoe raises besides ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class UnsupportedError(RuntimeError):
    """No implementation can do what was asked; the message lists each one with its reasons."""

    @classmethod
    def from_candidates(
        cls, what: str, candidates: Mapping[str, Sequence[str]]
    ) -> UnsupportedError:
        """An error for `what`, where `candidates` maps each implementation to why it cannot run."""
        width = max((len(name) for name in candidates), default=0)
        lines = [f"no implementation of {what}"]
        for name, reasons in candidates.items():
            lines.append(
                f"  {name:<{width}} : {'; '.join(reasons) or 'can run, was not asked for'}"
            )
        return cls("\n".join(lines))


class LoadError(ValueError):
    """A checkpoint does not fit the layer: keys with no home, slots unwritten, wrong shapes."""
