"""Sizes by name, refusals of what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.shapes import (
    SHAPES,
    available_bytes,
    refuse_if_too_large,
    shape_from_text,
)


def test_bytes_of_an_expert() -> None:
    # 3 * 2048 * 768 weights of two bytes.
    assert SHAPES["qwen3-30b-a3b"].expert_bytes("bf16") == 9_437_184
    assert SHAPES["qwen3-30b-a3b"].weight_bytes("fp32") == 128 * 9_437_184 * 2


def test_biases_count() -> None:
    # 3 * 2880 * 2880 weights, 2 * 2880 + 2880 biases.
    assert SHAPES["gpt-oss-20b"].expert_numel() == 24_883_200 + 8_640


def test_sizes_can_be_written_out() -> None:
    shape = shape_from_text("E16K4H256I128")
    assert (shape.num_experts, shape.top_k) == (16, 4)
    assert (shape.hidden_size, shape.intermediate_size) == (256, 128)


@pytest.mark.parametrize("text", ["qwen4", "E16K4H256", "E4K8H64I64"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"choose one of|needs 1 <= K <= E, got K = 8, E = 4"):
        shape_from_text(text)


def test_too_large_a_shape_is_refused_with_its_bytes() -> None:
    shape = SHAPES["deepseek-v3"]
    with pytest.raises(ValueError, match=r"needs 45,097,156,608 bytes \(2 x 22,548,578,304"):
        refuse_if_too_large(shape, "bf16", num_copies=2, available=24 << 30)


def test_a_shape_that_fits_is_not_refused() -> None:
    refuse_if_too_large(SHAPES["olmoe"], "bf16", num_copies=2, available=24 << 30)
    refuse_if_too_large(SHAPES["deepseek-v3"], "bf16", num_copies=9, available=None)


def test_available_memory_is_read_from_meminfo(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 10 kB\nMemAvailable:    7 kB\n")
    assert available_bytes(meminfo) == 7 * 1024
    assert available_bytes(tmp_path / "nothing") is None
