"""The C++ experts with packed weights, in every kernel set."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from cmoe.activation import ACTIVATIONS
from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.fused_experts import fused_experts_reference
from cmoe.custom_ops.packing import pack
from tests.custom_ops import cases
from tests.custom_ops.cpu.calls import Call, call
from tests.oracle import GATED, naive_experts

NAN = float("nan")


def packed(c: Call) -> Call:
    return c.but(w13=pack(c.w13), w2=pack(c.w2))


def op(x: Tensor, w13: Tensor, w2: Tensor, *rest: Any) -> Tensor:
    return torch.ops.cmoe_cpu.fused_experts(x, pack(w13), pack(w2), *rest)


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
        limit=choose.choice([None, 0.5]),
        interleaved=activation in GATED and choose.random() < 0.5,
    )
    if choose.random() < 0.5:  # some slots without an expert
        c = c.but(topk_ids=torch.where(torch.rand(c.topk_ids.shape) < 0.3, -1, c.topk_ids))
    cases.check(op, c)


def test_a_token_is_the_same_in_every_batch(kernel_set: str) -> None:
    """To the bit: one tile, several, blocks of rows, parts of K."""
    c = packed(call(257, 3, 2, 1056, 544, bias=True))
    whole = c.run()
    for T in (1, 2, 3, 7, 12, 20, 33, 64):
        for first in (0, 101, 257 - T):
            part = slice(first, first + T)
            routing = dict(topk_weights=c.topk_weights[part], topk_ids=c.topk_ids[part])
            y = c.but(x=c.x[part], **routing).run()
            assert torch.equal(y, whole[part]), f"{T} tokens from {first} on"


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_the_number_of_threads_changes_nothing(kernel_set: str, num_threads: int) -> None:
    c = packed(call(19, 5, 3, 96, 160))
    expected = c.run()
    torch.set_num_threads(num_threads)
    assert torch.equal(c.run(), expected)


def test_several_python_threads_at_once(cpu_kernels: Kernels) -> None:
    calls = [packed(call(T, 4, 2, 96, 64)) for T in (1, 5, 40, 130)]
    expected = [c.run() for c in calls]
    wrong: list[int] = []

    def work(index: int) -> None:
        torch.set_num_threads(1 + index % 2)
        for _ in range(50):
            if not torch.equal(calls[index].run(), expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_router_weight_on_input(kernel_set: str) -> None:
    c = call(11, 5, 1, 64, 32, bias=True, apply_router_weight_on_input=True)
    cases.check(op, c)
    cases.check(op, c.but(topk_ids=torch.where(torch.arange(11)[:, None] % 3 == 0, -1, c.topk_ids)))


def test_strides_of_x(kernel_set: str) -> None:
    c = packed(call(8, 4, 2, 64, 32))
    expected = c.run()
    assert torch.equal(c.but(x=c.x.T.contiguous().T).run(), expected)
    assert torch.equal(c.but(x=c.x.repeat_interleave(2, 0)[::2]).run(), expected)


def test_expert_map(kernel_set: str) -> None:
    c = call(20, 4, 3, 64, 32)
    expert_map = torch.tensor([2, -1, 0, -1, 3, 1, -1], dtype=torch.int32)
    ids = torch.rand(20, 7).argsort(1)[:, :3].to(torch.int32)
    cases.check(op, c.but(expert_map=expert_map, topk_ids=ids))


def test_a_nan_of_one_expert_stays_with_its_tokens(kernel_set: str) -> None:
    c = packed(call(12, 4, 1, 64, 32))
    w13 = c.w13.clone()
    w13[2] = NAN
    y = c.but(w13=w13).run()
    mine = (c.topk_ids == 2).squeeze(1)
    assert mine.any()
    assert y[mine].isnan().all()
    assert torch.equal(y[~mine], c.run()[~mine])


def test_old_scratch_does_not_leak_in(kernel_set: str) -> None:
    c = packed(call(33, 4, 2, 64, 96, bias=True))
    expected = c.run()
    bad = packed(call(70, 4, 3, 96, 160, bias=True))
    assert bad.but(x=torch.full_like(bad.x, NAN)).run().isnan().all()
    assert torch.equal(c.run(), expected)


@pytest.mark.parametrize("T", [1, 7, 64])
def test_error_is_at_most_that_of_the_grouped_matmul(kernel_set: str, T: int) -> None:
    """Root mean square against fp64, at a real layer's K; torch rounds h twice more."""
    c = call(T, 8, 2, 2048, 768)
    exact = naive_experts(*c.arguments())

    def rms(y: Tensor) -> float:
        return (y.double() - exact).square().mean().sqrt().item()

    assert rms(packed(c).run()) <= rms(fused_experts_reference(*c.arguments()))


def test_no_tokens(kernel_set: str) -> None:
    assert packed(call(0, 4, 2, 64, 32)).run().shape == (0, 64)


def test_the_op_of_the_whole_layer_takes_them(cpu_kernels: Kernels) -> None:
    c = call(5, 4, 2, 64, 32)
    route = (None, 2, "softmax", False, True, 0.0, 1, 1, 1.0)
    logits = torch.randn(5, 4)
    weights, ids = torch.ops.cmoe_cpu.route(logits, *route)
    w13, w2, rest = pack(c.w13), pack(c.w2), c.arguments()[5:]
    whole = torch.ops.cmoe_cpu.fused_moe(c.x, logits, *route, w13, w2, *rest)
    parts = torch.ops.cmoe_cpu.fused_experts(c.x, w13, w2, weights, ids, *rest)
    assert torch.equal(whole, parts)


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
        packed(call(3, 4, 2, 64, 32)).but(**changes).run()
