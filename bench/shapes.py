"""The sizes of real models' MoE layers, by name.

E experts, K experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The names that the command line and the records use."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The geometry of one layer's routed experts."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    has_bias: bool = False

    def expert_numel(self) -> int:
        """Weights of one expert: 3 * H * I, with biases 2 * I + H more."""
        matrices = 3 * self.hidden_size * self.intermediate_size
        biases = 2 * self.intermediate_size + self.hidden_size
        return matrices + (biases if self.has_bias else 0)

    def expert_bytes(self, dtype: str) -> int:
        """Bytes of one expert's weights."""
        return self.expert_numel() * DTYPES[dtype].itemsize

    def weight_bytes(self, dtype: str) -> int:
        """Bytes of all experts' weights."""
        return self.num_experts * self.expert_bytes(dtype)


def _shape(name: str, e: int, k: int, h: int, i: int, **extra: object) -> Shape:
    return Shape(
        name=name,
        num_experts=e,
        top_k=k,
        hidden_size=h,
        intermediate_size=i,
        **extra,  # type: ignore[arg-type]
    )


_GPT_OSS = {"activation": "swigluoai", "has_bias": True}

SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        _shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        _shape("qwen3-235b-a22b", 128, 8, 4096, 1536),
        _shape("mixtral-8x7b", 8, 2, 4096, 14336),
        _shape("mixtral-half", 8, 2, 4096, 7168),
        _shape("olmoe", 64, 8, 2048, 1024),
        _shape("deepseek-v2-lite", 64, 6, 2048, 1408),
        _shape("deepseek-v3", 256, 8, 7168, 2048),
        _shape("gpt-oss-20b", 32, 4, 2880, 2880, **_GPT_OSS),
        _shape("gpt-oss-120b", 128, 4, 2880, 2880, **_GPT_OSS),
        _shape("glm-4.5-air", 128, 8, 4096, 1408),
        _shape("llama-4-scout", 16, 1, 5120, 8192),
        _shape("small", 16, 4, 256, 128),
    )
}
"""Sizes as in each model's published config.json; mixtral-half is one half of Mixtral by tensor
parallelism, `small` a layer whose kernels take less time than the call around them."""

_CUSTOM = re.compile(r"E(\d+)K(\d+)H(\d+)I(\d+)")


def shape_from_text(text: str) -> Shape:
    """A named shape, or sizes written as E16K4H256I128. Raises ValueError for anything else."""
    if text in SHAPES:
        return SHAPES[text]
    match = _CUSTOM.fullmatch(text)
    if match is None:
        raise ValueError(
            f"unknown shape {text!r}; choose one of {', '.join(SHAPES)}, "
            "or write the sizes as E16K4H256I128"
        )
    e, k, h, i = map(int, match.groups())
    if not 1 <= k <= e:
        raise ValueError(f"shape {text!r} needs 1 <= K <= E, got K = {k}, E = {e}")
    return _shape(text, e, k, h, i)


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that can be taken without swapping; None where the system does not tell."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def refuse_if_too_large(
    shape: Shape, dtype: str, *, num_copies: int, available: int | None
) -> None:
    """Raises ValueError when `num_copies` layouts of the weights leave no room to work in.

    A quarter of the memory is kept for activations, scratch, the float32 reference of one expert.
    """
    needed = shape.weight_bytes(dtype) * num_copies
    if available is None or needed <= available * 3 // 4:
        return
    raise ValueError(
        f"shape {shape.name} in {dtype} needs {needed:,} bytes "
        f"({num_copies} x {shape.weight_bytes(dtype):,} for {num_copies} weight layouts), "
        f"but three quarters of the available memory are {available * 3 // 4:,} bytes; "
        "choose a smaller shape, or fewer implementations with --impl"
    )
