"""The reference against a loop over tokens, the refusal of wrong results."""

from __future__ import annotations

import pytest
import torch

from bench.inputs import Case, make_draws, make_weights
from bench.shapes import Shape
from bench.verify import NUM_ROWS, Reference, activate, checked_rows, naive

SHAPES = [
    Shape(name="silu", num_experts=5, top_k=2, hidden_size=24, intermediate_size=16),
    Shape(
        name="gpt-oss",
        num_experts=5,
        top_k=2,
        hidden_size=24,
        intermediate_size=16,
        activation="swigluoai",
        has_bias=True,
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_naive_is_the_sum_over_experts(shape: Shape) -> None:
    weights = make_weights(shape, "fp32", seed=0)
    draw = make_draws(Case(shape=shape, tokens=7, dtype="fp32"))[0]
    expected = torch.zeros(7, 24, dtype=torch.float64)
    for token in range(7):
        for slot in range(2):
            expert = int(draw.topk_ids[token, slot])
            h = weights.w13[expert].double() @ draw.x[token].double()
            if weights.w13_bias is not None:
                h = h + weights.w13_bias[expert].double()
            y = weights.w2[expert].double() @ activate(h, shape.activation)
            if weights.w2_bias is not None:
                y = y + weights.w2_bias[expert].double()
            expected[token] += draw.topk_weights[token, slot].double() * y
    got = naive(shape, weights, draw, torch.arange(7), torch.float64)
    # The routing weights are float32 in both, all other arithmetic is float64.
    torch.testing.assert_close(got, expected)


def test_a_few_rows_of_a_large_batch_are_checked() -> None:
    assert checked_rows(3).tolist() == [0, 1, 2]
    rows = checked_rows(1024)
    assert len(rows) == NUM_ROWS
    assert (int(rows[0]), int(rows[-1])) == (0, 1023)


def test_a_right_result_passes_a_wrong_one_does_not() -> None:
    shape = SHAPES[0]
    weights = make_weights(shape, "bf16", seed=0)
    draw = make_draws(Case(shape=shape, tokens=4))[0]
    reference = Reference(shape, weights, draw)
    good = naive(shape, weights, draw, torch.arange(4), torch.bfloat16).float()
    assert reference.fault(good)[1] is None
    assert "wrong result: relative error 0.1, allowed" in str(reference.fault(good * 1.1)[1])
    assert "relative error inf" in str(reference.fault(good * float("nan"))[1])
    assert reference.fault(good[:2])[1] == "output rows (2, 24), not (4, 24)"
    # An expert's neighbour is another expert: taking it for the right one must show.
    moved = draw._replace(topk_ids=(draw.topk_ids + 1) % 5)
    other = naive(shape, weights, moved, torch.arange(4), torch.bfloat16).float()
    assert reference.fault(other)[1] is not None


@pytest.mark.gpu
def test_a_case_on_a_gpu_is_checked_on_the_host() -> None:
    weights = make_weights(SHAPES[1], "bf16", seed=0)
    draw = make_draws(Case(shape=SHAPES[1], tokens=4))[0]
    there = [type(t)(*(x if x is None else x.cuda() for x in t)) for t in (weights, draw)]
    reference = Reference(SHAPES[1], *there)
    good = naive(SHAPES[1], weights, draw, torch.arange(4), torch.bfloat16).float()
    assert reference.fault(good)[1] is None


def test_an_activation_without_a_formula_is_refused() -> None:
    with pytest.raises(ValueError, match="no reference for activation 'relu'"):
        activate(torch.ones(1, 4), "relu")
