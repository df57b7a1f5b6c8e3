"""The named sets of measurements."""

from __future__ import annotations

from dataclasses import dataclass

from bench.peers import CONTROL


@dataclass(frozen=True, kw_only=True)
class Competitor:
    """One implementation under one mode; `tokens` where not every size is worth its time."""

    impl: str
    mode: str = "eager"
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much time one cell may take."""

    min_runs: int = 3
    min_seconds: float = 0.8
    max_runs: int = 100
    turns: int = 5  # of the competitors of a cell, at least one call each

    def runs(self, call_ms: float) -> int:
        """Calls to time, given what one of them takes."""
        wanted = int(self.min_seconds * 1e3 / max(call_ms, 1e-6)) + 1
        return max(self.min_runs, min(wanted, self.max_runs))


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Shapes x tokens x competitors."""

    shapes: tuple[str, ...]
    tokens: tuple[int, ...]
    competitors: tuple[Competitor, ...]
    dtypes: tuple[str, ...] = ("bf16",)
    routings: tuple[str, ...] = ("uniform",)
    effort: Effort = Effort()


CPU_SHAPES = ("qwen3-30b-a3b", "olmoe", "deepseek-v2-lite", "mixtral-half", "gpt-oss-20b")
CPU_TOKENS = (1, 4, 16, 64, 256, 1024)
CUDA_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

# torch.compile takes seconds for each size, so the peers are compiled where it was seen to matter.
CPU_COMPETITORS = (
    Competitor(impl="cmoe:auto"),
    Competitor(impl="cmoe:auto", mode="compile"),
    Competitor(impl="cmoe:cpu_packed"),
    Competitor(impl="vllm:cpu_fused_moe"),
    Competitor(impl="vllm:fused_experts_cpu"),
    Competitor(impl="torch:grouped_mm"),
    Competitor(impl="transformers:grouped_mm"),
    Competitor(impl="transformers:grouped_mm", mode="compile", tokens=(1, 4, 16, 64)),
    Competitor(impl="transformers:batched_mm"),
    Competitor(impl="transformers:batched_mm", mode="compile", tokens=(1,)),
    Competitor(impl="transformers:eager"),
    Competitor(impl=CONTROL),
)

CUDA_COMPILED_TOKENS = (1, 8, 64, 512, 4096)
CUDA_COMPETITORS = (
    Competitor(impl="cmoe:auto", mode="cudagraph"),
    Competitor(impl="torch:grouped_mm", mode="cudagraph"),
    Competitor(
        impl="transformers:grouped_mm", mode="compile-cudagraph", tokens=CUDA_COMPILED_TOKENS
    ),
    Competitor(impl="transformers:grouped_mm", mode="compile", tokens=CUDA_COMPILED_TOKENS),
    Competitor(
        impl="transformers:batched_mm", mode="compile-cudagraph", tokens=CUDA_COMPILED_TOKENS
    ),
    Competitor(impl=CONTROL),
)

_SAME_CODE = (Competitor(impl="cmoe:auto"),)


def suites(*, cuda: bool) -> dict[str, Suite]:
    """The suites of this kind of machine, by name."""
    headline = (
        Suite(
            shapes=("qwen3-30b-a3b", "mixtral-8x7b"),
            tokens=CUDA_TOKENS,
            competitors=CUDA_COMPETITORS,
        )
        if cuda
        else Suite(shapes=CPU_SHAPES, tokens=CPU_TOKENS, competitors=CPU_COMPETITORS)
    )
    quick = Suite(
        shapes=headline.shapes,
        tokens=(1, 64, 1024),
        competitors=tuple(c for c in headline.competitors if "compile" not in c.mode),
        effort=Effort(min_seconds=0.4, turns=3),
    )
    return {
        "headline": headline,
        "quick": quick,
        "skewed": Suite(
            shapes=("qwen3-30b-a3b", "olmoe"),
            tokens=(4, 16, 64, 256),
            competitors=headline.competitors,
            routings=("uniform", "skewed"),
        ),
        "compare": Suite(
            shapes=("olmoe", "qwen3-30b-a3b"),
            tokens=(1, 16, 256),
            competitors=_SAME_CODE,
        ),
    }
