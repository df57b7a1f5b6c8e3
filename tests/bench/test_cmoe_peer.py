"""cmoe's own experts as the harness measures them."""

from __future__ import annotations

import pytest
import torch

from bench.inputs import Case, make_draws, make_weights
from bench.peers import make_peer
from bench.shapes import shape_from_text
from bench.verify import naive, relative_error
from cmoe.environment import cxx_compiler

SHAPE = shape_from_text("E8K2H64I96")

needs_compiler = pytest.mark.skipif(cxx_compiler() is None, reason="no C++ compiler")


@needs_compiler
@pytest.mark.parametrize("impl", ["cmoe:cpu", "cmoe:cpu_packed"])
def test_weights_as_they_lie_and_packed(impl: str) -> None:
    peer, weights = make_peer(impl), make_weights(SHAPE, "bf16", seed=0)
    case = Case(shape=SHAPE, tokens=7)
    assert peer.unsupported(case, "eager") is None
    loaded = peer.load(SHAPE, weights)
    assert peer.impl == impl
    (draw, *_) = make_draws(case)
    rows = torch.arange(case.tokens)
    exact = naive(SHAPE, weights, draw, rows, torch.float32)
    plain = relative_error(naive(SHAPE, weights, draw, rows, torch.bfloat16), exact)
    # As the harness allows: twice plain arithmetic's error, one rounding step.
    assert relative_error(loaded.function(*loaded.arguments(draw)), exact) <= 2 * plain + 2**-8


def test_packed_weights_are_a_copy_in_the_memory_of_a_run() -> None:
    copies = [make_peer(impl).num_own_layouts(SHAPE) for impl in ("cmoe:cpu", "cmoe:cpu_packed")]
    assert copies == [0, 1]


@needs_compiler
@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ("E8K2H64I96", "fp32", "reads packed weights of bfloat16, not of torch.float32"),
        ("E8K2H80I96", "bf16", "packs by 32, of which hidden_size (80) is no multiple"),
    ],
)
def test_what_is_not_packed_is_left_out(shape: str, dtype: str, reason: str) -> None:
    case = Case(shape=shape_from_text(shape), tokens=1, dtype=dtype)
    assert make_peer("cmoe:cpu_packed").unsupported(case, "eager") == reason
    assert make_peer("cmoe:cpu").unsupported(case, "eager") is None
