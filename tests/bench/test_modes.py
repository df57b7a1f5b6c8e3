"""The mode axis."""

from __future__ import annotations

import pytest
import torch

from bench import modes


@pytest.mark.parametrize("mode", ["reduce-overhead", "cudagraph", "compile-cudagraph"])
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


def test_a_plain_function_is_bound_to_its_arguments() -> None:
    x = torch.ones(3)
    assert torch.equal(modes.bind(torch.add, (x, x))(), x + x)


def test_a_graph_is_bound_to_a_replay_of_what_was_staged() -> None:
    """Recorded on paper: the stand-in's capture keeps clones, its replay computes from them."""

    class OnPaper(modes.CapturedGraph):
        def _capture(self, *arguments: torch.Tensor) -> None:
            self._inputs = [argument.clone() for argument in arguments]
            self._graph = self  # type: ignore[assignment]

        def replay(self) -> torch.Tensor:
            return self._function(*self._inputs)

    graph = OnPaper(torch.neg)
    replay = modes.bind(graph, (torch.ones(3),))
    modes.bind(graph, (torch.full((3,), 5.0),))
    assert torch.equal(replay(), torch.full((3,), -5.0))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cudagraph", "compile-cudagraph"])
def test_a_captured_function_computes_from_each_call_s_arguments(mode: str) -> None:
    graph = modes.apply(mode, lambda x: x.sin() * 2)
    for _ in range(3):
        x = torch.randn(5, device="cuda")
        torch.testing.assert_close(graph(x), x.sin() * 2)
