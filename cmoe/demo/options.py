"""What the user of the demo can choose."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cmoe.demo.seeded import SeededSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoOptions:
    """model: a checkpoint's folder; None: a seeded one is written, to `keep` or for this run only.

    num_tokens, num_prompt_tokens: generated, read. dtype: of the timed run; the tokens are checked
    in float32 in any case. sizes: of the seeded model.
    """

    model: Path | None = None
    keep: Path | None = None
    num_tokens: int = 32
    num_prompt_tokens: int = 128
    dtype: str = "bfloat16"
    seed: int = 0
    device: str = "cpu"
    sizes: SeededSizes = field(default_factory=SeededSizes)
