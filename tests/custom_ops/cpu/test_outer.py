"""The C++ experts with packed weights, in every kernel set."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cmoe.activation import ACTIVATIONS
from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.fused_experts import fused_experts_reference
from cmoe.custom_ops.packing import unpack
from tests.custom_ops.cpu.calls import call, check
from tests.oracle import GATED, naive_experts


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(kernel_set: str, seed: int) -> None:
    """Whole tiles, several, parts of them; one strip, two side by side, an odd number."""
    choose = random.Random(seed)
    E = choose.choice([1, 2, 3, 5, 7, 13])
    activation = choose.choice(ACTIVATIONS)
    c = call(
        choose.choice([1, 2, 3, 5, 6, 7, 13, 17, 70]),
        E,
        choose.randint(1, E),
        32 * choose.choice([1, 2, 3, 5, 8, 9, 33]),
        32 * choose.choice([1, 2, 3, 4, 7, 17]),
        activation=activation,
        bias=choose.random() < 0.5,
        layout="packed",
        limit=choose.choice([None, 0.5]),
        interleaved=activation in GATED and choose.random() < 0.5,
    )
    if choose.random() < 0.5:  # some slots without an expert
        c = c.but(topk_ids=torch.where(torch.rand(c.topk_ids.shape) < 0.3, -1, c.topk_ids))
    check(c)


@pytest.mark.parametrize("T", [1, 7, 64])
def test_error_is_at_most_that_of_the_grouped_matmul(kernel_set: str, T: int) -> None:
    """Root mean square against fp64, at a real layer's K; torch rounds h twice more."""
    c = call(T, 8, 2, 2048, 768, layout="packed")
    lies = c.but(w13=unpack(c.w13), w2=unpack(c.w2))
    exact = naive_experts(*lies.arguments())

    def rms(y: Tensor) -> float:
        return (y.double() - exact).square().mean().sqrt().item()

    assert rms(c.run()) <= rms(fused_experts_reference(*lies.arguments()))


def test_the_op_of_the_whole_layer_takes_them(cpu_kernels: Kernels) -> None:
    c = call(5, 4, 2, 64, 32, layout="packed")
    route = (None, 2, "softmax", False, True, 0.0, 1, 1, 1.0)
    logits = torch.randn(5, 4)
    weights, ids = torch.ops.cmoe_cpu.route(logits, *route)
    experts = (c.w13, c.w2, *c.arguments()[5:])
    whole = torch.ops.cmoe_cpu.fused_moe(c.x, logits, *route, *experts)
    assert torch.equal(whole, c.but(topk_weights=weights, topk_ids=ids).run())


def odd(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(w13=odd(4, 64, 64)), "both as they are or both packed"),
        (dict(w2=odd(4, 64, 32)), "both as they are or both packed"),
        (dict(w13=odd(4, 1, 32, 32, 2)), r"w13 must be \[4, 64, 64\].*got \[4, 32, 64\]"),
        (dict(w13=odd(4, 4, 32, 16, 2)), r"a packed w13 must be contiguous bfloat16"),
        (dict(w2=odd(4, 2, 8, 32, 2)), r"a packed w2 must be .* columns a multiple of 32"),
        (dict(w2=odd(4, 2, 16, 64, 2)[..., ::2, :]), r"a packed w2 must be contiguous"),
        (dict(w2=odd(4, 2, 16, 32, 2, dtype=torch.float32)), r"got Float \[4, 2, 16, 32, 2\]"),
        (dict(x=odd(3, 32)), r"x must be \[T, 64\] for w2 \[4, 64, 32\]"),
        (dict(w13_bias=odd(4, 32)), r"w13_bias must be \[4, 64\]"),
        (dict(w2_bias=odd(4, 2)), r"w2_bias must be \[4, 64\]"),
    ],
)
def test_bad_arguments(cpu_kernels: Kernels, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(3, 4, 2, 64, 32, layout="packed").but(**changes).run()
