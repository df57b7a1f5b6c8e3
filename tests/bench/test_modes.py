"""The mode axis."""

from __future__ import annotations

import pytest
import torch

from bench import modes


@pytest.mark.parametrize("mode", ["reduce-overhead", "cudagraph"])
def test_graph_modes_say_why_they_are_left_out(mode: str) -> None:
    assert modes.left_out(mode, cuda=False) == (
        f"mode {mode} needs CUDA graphs, this machine has no CUDA device"
    )
    assert modes.left_out(mode, cuda=True) is None


def test_the_other_modes_run_anywhere() -> None:
    assert all(modes.left_out(m, cuda=False) is None for m in ("eager", "compile", "max-autotune"))


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown mode 'fast'; choose one of eager, compile"):
        modes.left_out("fast")


def test_compiled_is_the_same_function() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.ones(3)
    assert modes.apply("eager", double) is double
    assert torch.equal(modes.apply("compile", double)(x), x * 2)
