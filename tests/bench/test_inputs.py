"""The tensors of a case."""

from __future__ import annotations

import torch

from bench.inputs import NUM_DRAWS, Case, make_draws, make_weights
from bench.shapes import Shape, shape_from_text

SHAPE = shape_from_text("E5K2H48I32")


def test_every_expert_has_weights_of_its_own() -> None:
    weights = make_weights(SHAPE, "fp32", seed=0)
    assert weights.w13.shape == (5, 64, 48)
    assert weights.w2.shape == (5, 48, 32)
    for a in range(5):
        for b in range(a):
            assert not torch.equal(weights.w13[a], weights.w13[b])
            assert not torch.equal(weights.w2[a], weights.w2[b])


def test_projections_keep_the_scale_of_their_input() -> None:
    weights = make_weights(SHAPE, "fp32", seed=0)
    assert 0.9 < float(weights.w13.std()) * 48**0.5 < 1.1
    assert 0.9 < float(weights.w2.std()) * 32**0.5 < 1.1


def test_biases_where_the_shape_has_them() -> None:
    shape = Shape(
        name="x", num_experts=3, top_k=1, hidden_size=8, intermediate_size=4, has_bias=True
    )
    weights = make_weights(shape, "bf16", seed=0)
    assert weights.w13_bias is not None
    assert weights.w2_bias is not None
    assert weights.w13_bias.shape == (3, 8)
    assert weights.w2_bias.shape == (3, 8)
    assert make_weights(SHAPE, "bf16", seed=0).w2_bias is None


def test_every_process_makes_the_same_tensors() -> None:
    case = Case(shape=SHAPE, tokens=3)
    first, second = make_draws(case), make_draws(case)
    assert len(first) == NUM_DRAWS
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(first[0].x, first[1].x)
    weights, again = make_weights(SHAPE, "bf16", seed=7), make_weights(SHAPE, "bf16", seed=7)
    assert torch.equal(weights.w13, again.w13)


def test_weights_of_a_token_add_up_to_one() -> None:
    draw = make_draws(Case(shape=SHAPE, tokens=3))[0]
    assert draw.topk_weights.dtype == torch.float32
    torch.testing.assert_close(draw.topk_weights.sum(1), torch.ones(3))
