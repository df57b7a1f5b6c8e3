"""The C++ experts against the naive loop in fp64, in every kernel set."""

from __future__ import annotations

import itertools
import mmap
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from cmoe.activation import ACTIVATIONS
from cmoe.custom_ops.backends import Kernels
from cmoe.custom_ops.fused_experts import SCHEMA, fused_experts_reference
from tests.custom_ops.cpu.calls import Call, call, check
from tests.oracle import GATED, naive_experts

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of bfloat16 weights, where both are tried: packed ones are a layout too.
LAYOUTS = ("columns", "packed")
NAN = float("nan")


def test_the_schema_is_that_of_every_backend(cpu_kernels: Kernels) -> None:
    assert str(cpu_kernels.fused_experts._schema) == f"cmoe_cpu::fused_experts{SCHEMA}"


@pytest.mark.parametrize("seed", range(24))
def test_random_shapes(kernel_set: str, seed: int) -> None:
    choose = random.Random(seed)
    E = choose.choice([1, 2, 3, 5, 7, 13, 16])
    activation = choose.choice(ACTIVATIONS)
    c = call(
        choose.choice([1, 2, 3, 5, 8, 17, 70]),
        E,
        choose.randint(1, E),
        choose.choice([1, 3, 16, 31, 33, 64, 95, 130]),
        choose.choice([1, 2, 15, 17, 48, 50, 97, 131]),
        dtype=choose.choice(DTYPES),
        activation=activation,
        bias=choose.random() < 0.5,
        layout=choose.choice(["columns", "rows"]),
        limit=choose.choice([None, 0.5]),
        interleaved=activation in GATED and choose.random() < 0.5,
    )
    if choose.random() < 0.5:  # some slots without an expert
        c = c.but(topk_ids=torch.where(torch.rand(c.topk_ids.shape) < 0.3, -1, c.topk_ids))
    if choose.random() < 0.5:
        c = c.but(topk_ids=c.topk_ids.long())
    check(c)


@pytest.mark.parametrize("seed", range(12))
def test_long_rows(kernel_set: str, seed: int) -> None:
    """Weights that stream, two rows side by side: gate and up, or halves that need not be even."""
    choose = random.Random(seed)
    activation = choose.choice(ACTIVATIONS)
    c = call(
        choose.choice([1, 2, 4, 7, 24, 30]),
        3,
        2,
        choose.choice([33, 515, 1025, 2049, 4100]),
        choose.choice([33, 515, 1025, 2047]),
        dtype=choose.choice(DTYPES),
        activation=activation,
        bias=choose.random() < 0.5,
        interleaved=activation in GATED and choose.random() < 0.5,
    )
    if choose.random() < 0.5:  # rows cut from longer ones
        c = c.but(
            w13=torch.nn.functional.pad(c.w13, (0, 5), value=NAN)[..., :-5],
            w2=torch.nn.functional.pad(c.w2, (0, 31), value=NAN)[..., :-31],
        )
    check(c)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["columns", "rows"])
@pytest.mark.parametrize(("H", "I"), [(2100, 40), (40, 2100), (4097, 17)])
def test_several_blocks_of_k(
    kernel_set: str,
    H: int,
    I: int,  # noqa: E741
    layout: str,
    dtype: torch.dtype,
) -> None:
    check(call(5, 3, 2, H, I, dtype=dtype, layout=layout))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(kernel_set: str, activation: str, dtype: torch.dtype) -> None:
    for limit in (None, 0.7):
        c = call(9, 4, 2, 24, 33, dtype=dtype, activation=activation, bias=True, limit=limit)
        check(c.but(x=c.x * 8))
        if activation in GATED:
            check(c.but(interleaved=True))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_the_ends_of_the_range(kernel_set: str, activation: str) -> None:
    """Pre-activations far beyond where exponentials overflow; zero, one exactly; NaN stays NaN."""
    g = torch.tensor(
        [-3e38, -1e4, -200.0, -90.0, -20.0, -1.0, -0.0, 0.0, 1e-30, 1.0, 20.0, 90.0, 1e4, NAN]
    )
    parts = 2 if activation in GATED else 1
    c = Call(
        x=g[:, None],
        w13=torch.ones(1, parts, 1),
        w2=torch.ones(1, 1, 1),
        topk_weights=torch.ones(len(g), 1),
        topk_ids=torch.zeros(len(g), 1, dtype=torch.int32),
        activation=activation,
    )
    for limit in (None, 7.0):
        y, exact = c.but(limit=limit).run(), naive_experts(*c.but(limit=limit).arguments())
        # A few rounding steps of the exponential, the quotient, the product.
        torch.testing.assert_close(y[:-1].double(), exact[:-1], rtol=1e-6, atol=1e-6)
        assert y[-1].isnan()


def accurate_activation(g: Tensor, name: str, alpha: float) -> tuple[Tensor, Tensor]:
    """The activation of g (with an up part of 1) without cancellation; the exponent in it.

    The exponent is given as zero where the kernels have it without a rounding.
    """
    none = torch.zeros_like(g)
    if name == "silu":
        return g * g.sigmoid(), none
    if name == "gelu":
        return g * 0.5 * torch.special.erfc(-g / 2**0.5), none
    if name == "relu2":
        return g.clamp(min=0).square(), none
    if name == "swigluoai":
        return 2 * g * (alpha * g).sigmoid(), alpha * g
    assert name == "gelu_tanh"
    twice_z = 2 * (2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)
    return g * twice_z.sigmoid(), twice_z


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_exact_to_a_few_roundings(kernel_set: str, activation: str) -> None:
    """Relative error against fp64 down to where fp32 has no normal numbers left, either tail."""
    g = torch.cat([torch.linspace(-90, 90, 4001), torch.linspace(-15, 5, 4001), torch.randn(2000)])
    parts = 2 if activation in GATED else 1
    # The up part is 1 by its bias.
    bias = torch.tensor([[0.0, 1.0]]) if parts == 2 else None
    c = Call(
        x=g[:, None],
        w13=torch.tensor([1.0, 0.0])[:parts, None].expand(1, -1, 1),
        w2=torch.ones(1, 1, 1),
        topk_weights=torch.ones(len(g), 1),
        topk_ids=torch.zeros(len(g), 1, dtype=torch.int32),
        w13_bias=bias,
        activation=activation,
    )
    y = c.run()[:, 0].double()
    exact, exponent = accurate_activation(g.double(), activation.removesuffix("_no_mul"), c.alpha)
    # Some eight roundings of the result, some six of the exponent, half an ulp each.
    steps = 8 + 6 * exponent.abs()
    assert torch.all((y - exact).abs() <= steps * 2**-24 * exact.abs() + 1e-36)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*itertools.product(["columns", "rows"], DTYPES), ("packed", torch.bfloat16)],
)
def test_a_token_is_the_same_in_every_batch(
    kernel_set: str, layout: str, dtype: torch.dtype
) -> None:
    """To the bit: one or more streamed tiles, panels, widened ones, blocks of rows, parts of K."""
    E, K, H, I = 3, 2, 2100, 530  # noqa: E741
    c = call(257, E, K, H, I, dtype=dtype, bias=True, layout=layout)
    whole = c.run()
    for T in (1, 2, 3, 7, 12, 20, 33, 64):
        for first in (0, 101, 257 - T):
            part = slice(first, first + T)
            y = c.but(
                x=c.x[part], topk_weights=c.topk_weights[part], topk_ids=c.topk_ids[part]
            ).run()
            assert torch.equal(y, whole[part]), f"{T} tokens from {first} on"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
def test_the_number_of_threads_changes_nothing(
    kernel_set: str, num_threads: int, layout: str
) -> None:
    c = call(19, 5, 3, 100, 130, layout=layout)
    expected = c.run()
    torch.set_num_threads(num_threads)
    assert torch.equal(c.run(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_python_threads_at_once(cpu_kernels: Kernels, layout: str) -> None:
    calls = [call(T, 4, 2, 96, 80, layout=layout) for T in (1, 5, 40, 130)]
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


def test_old_scratch_does_not_leak_in(kernel_set: str) -> None:
    """A call whose every value is NaN leaves NaN in the scratch that the next call gets."""
    for dtype, layout in [*itertools.product(DTYPES, ["columns"]), (torch.bfloat16, "packed")]:
        c = call(33, 4, 2, 45, 50, dtype=dtype, bias=True, layout=layout)
        expected = c.run()
        bad = call(70, 4, 3, 77, 90, dtype=dtype, bias=True, layout=layout)
        assert bad.but(x=torch.full_like(bad.x, NAN)).run().isnan().all()
        assert torch.equal(c.run(), expected)


def test_values_beside_the_tensors_are_not_read_in(kernel_set: str) -> None:
    """Views into NaN: what lies after a row, beside a column, never reaches the result."""

    def inside_nan(t: Tensor) -> Tensor:
        big = torch.full([size + 3 for size in t.shape], NAN, dtype=t.dtype)
        window = big[tuple(slice(1, 1 + size) for size in t.shape)]
        return window.copy_(t)

    for dtype in DTYPES:
        for layout in ("columns", "rows"):
            c = call(9, 3, 2, 45, 37, dtype=dtype, bias=True, layout=layout)
            w13, w2 = (
                inside_nan(w) if layout == "columns" else inside_nan(w.mT).mT for w in (c.w13, c.w2)
            )
            y = c.but(
                x=inside_nan(c.x),
                w13=w13,
                w2=w2,
                w13_bias=inside_nan(c.w13_bias),
                w2_bias=inside_nan(c.w2_bias),
                topk_weights=inside_nan(c.topk_weights),
            ).run()
            assert torch.equal(y, c.run())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_of_one_expert_stays_with_its_tokens(kernel_set: str, layout: str) -> None:
    c = call(12, 4, 1, 40, 40, layout=layout)
    w13 = c.w13.clone()
    w13[2] = NAN
    y = c.but(w13=w13).run()
    mine = (c.topk_ids == 2).squeeze(1)
    assert mine.any()
    assert y[mine].isnan().all()
    assert torch.equal(y[~mine], c.run()[~mine])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_x(kernel_set: str, layout: str) -> None:
    c = call(8, 4, 2, 50, 40, layout=layout)
    expected = c.run()
    assert torch.equal(c.but(x=c.x.T.contiguous().T).run(), expected)
    assert torch.equal(c.but(x=c.x.repeat_interleave(2, 0)[::2]).run(), expected)
    one = c.x[:1].expand(8, -1)
    assert torch.equal(c.but(x=one).run(), c.but(x=one.contiguous()).run())


def test_weights_with_no_contiguous_dimension(kernel_set: str) -> None:
    c = call(8, 4, 2, 50, 40)
    w13 = c.w13.repeat_interleave(2, 1).repeat_interleave(2, 2)[:, ::2, ::2]
    assert torch.equal(c.but(w13=w13).run(), c.run())


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [*itertools.product(["columns"], DTYPES), ("packed", torch.bfloat16)],
)
def test_router_weight_on_input(kernel_set: str, layout: str, dtype: torch.dtype) -> None:
    options = dict(dtype=dtype, layout=layout, apply_router_weight_on_input=True)
    c = call(11, 5, 1, 40, 30, bias=True, **options)
    check(c)
    check(c.but(topk_ids=torch.where(torch.arange(11)[:, None] % 3 == 0, -1, c.topk_ids)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_expert_map(kernel_set: str, layout: str) -> None:
    c = call(20, 4, 3, 40, 30, layout=layout)
    expert_map = torch.tensor([2, -1, 0, -1, 3, 1, -1], dtype=torch.int32)
    ids = torch.rand(20, 7).argsort(1)[:, :3].to(torch.int32)
    ids[3, 1] = -1
    y = check(c.but(expert_map=expert_map, topk_ids=ids))
    local = torch.where(ids < 0, -1, expert_map[ids.clamp_min(0).long()])
    assert torch.equal(y, c.but(topk_ids=local).run())


@pytest.mark.parametrize("other", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_routing_weights_and_biases_of_another_dtype(
    cpu_kernels: Kernels, other: torch.dtype
) -> None:
    c = call(9, 4, 2, 40, 30, bias=True)
    c = c.but(topk_weights=c.topk_weights.to(other), w13_bias=torch.randn(4, 60).to(other))
    check(c.but(w2_bias=torch.randn(4, 40).to(other)))


def test_biases_are_not_rounded_to_the_dtype_of_x(cpu_kernels: Kernels) -> None:
    c = call(9, 2, 2, 40, 30)
    c = c.but(w2=torch.zeros_like(c.w2), topk_weights=torch.ones(9, 2))
    bias = torch.tensor([1 + 2**-9, -1.0])[:, None].expand(2, 40)  # bfloat16 has 1 for the first
    assert torch.equal(c.but(w2_bias=bias).run(), torch.full_like(c.x, 2**-9))


def test_slots_without_an_expert_contribute_exactly_nothing(kernel_set: str) -> None:
    c = call(6, 4, 3, 40, 30)
    ids = c.topk_ids.clone()
    ids[:, 1] = -1
    weights = c.topk_weights.clone()
    weights[:, 1] = NAN
    y = c.but(topk_ids=ids, topk_weights=weights).run()
    kept = c.but(topk_ids=ids[:, [0, 2]], topk_weights=c.topk_weights[:, [0, 2]]).run()
    assert torch.equal(y, kept)
    none = torch.full_like(ids, -1)
    assert torch.equal(c.but(topk_ids=none).run(), torch.zeros_like(c.x))


def test_one_expert_twice_in_a_token(kernel_set: str) -> None:
    c = call(6, 4, 2, 40, 30)
    check(c.but(topk_ids=c.topk_ids[:, :1].expand(-1, 2)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_tokens(kernel_set: str, layout: str) -> None:
    c = call(0, 4, 2, 40, 30, layout=layout)
    assert c.run().shape == c.x.shape


@pytest.mark.parametrize("T", [1, 7, 64])
def test_error_is_at_most_that_of_the_grouped_matmul(kernel_set: str, T: int) -> None:
    """Root mean square against fp64 on data of a real layer's scale; torch rounds h twice more."""
    c = call(T, 8, 2, 512, 384)
    exact = naive_experts(*c.arguments())

    def rms(y: Tensor) -> float:
        return (y.double() - exact).square().mean().sqrt().item()

    assert rms(c.run()) <= rms(fused_experts_reference(*c.arguments()))


@pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1])
def test_ids_out_of_range(cpu_kernels: Kernels, bad: int) -> None:
    c = call(3, 4, 2, 8, 8)
    for dtype in (torch.int32, torch.int64):
        ids = c.topk_ids.to(dtype).clone()
        ids[2, 1] = bad
        with pytest.raises(ValueError, match=rf"topk_ids must be in \[-1, 4\); got {bad}"):
            c.but(topk_ids=ids).run()


def test_ids_beyond_32_bits(cpu_kernels: Kernels) -> None:
    c = call(3, 4, 2, 8, 8)
    with pytest.raises(ValueError, match=r"got 4294967296"):
        c.but(topk_ids=torch.full((3, 2), 2**32)).run()


def test_a_map_that_points_past_the_weights(cpu_kernels: Kernels) -> None:
    c = call(3, 4, 2, 8, 8)
    with pytest.raises(ValueError, match=r"expert_map must be in \[-1, 4\); got 9"):
        c.but(expert_map=torch.full((4,), 9, dtype=torch.int32)).run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(w13=torch.zeros(4, 15, 8)), r"w13 must be \[4, 16, 8\]"),
        (dict(x=torch.zeros(3, 9)), r"x must be \[T, 8\]"),
        (dict(x=torch.zeros(3, 8, 1)), r"fused_experts needs x \[T, H\]"),
        (dict(x=torch.zeros(3, 8).half()), "x, w13, w2 must share a dtype"),
        (dict(topk_ids=torch.zeros(2, 2, dtype=torch.int32)), r"topk_ids must be \[T, K\]"),
        (dict(topk_ids=torch.zeros(3, 2)), "topk_ids must be int32 or int64"),
        (dict(topk_weights=torch.zeros(3, 1)), "must have the same shape"),
        (dict(w13_bias=torch.zeros(4, 15)), r"w13_bias must be \[4, 16\]"),
        (dict(w2_bias=torch.zeros(4, 9)), r"w2_bias must be \[4, 8\]"),
        (dict(apply_router_weight_on_input=True), "needs top_k = 1, got 2"),
        (dict(expert_map=torch.zeros(4)), r"expert_map must be a contiguous int32 \[P\]"),
        (dict(activation="swish"), "unknown activation 'swish'"),
    ],
)
def test_mistakes(cpu_kernels: Kernels, changes: dict[str, Any], message: str) -> None:
    c = call(3, 4, 2, 8, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        c.but(**changes).run()


def test_doubles_are_refused(cpu_kernels: Kernels) -> None:
    c = call(3, 4, 2, 8, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="take bfloat16, float16, float32"):
        c.run()


@pytest.mark.parametrize("dtype", DTYPES)
def test_scratch_is_what_the_formula_says(kernel_set: str, dtype: torch.dtype) -> None:
    T, K, H, I = 50, 3, 100, 130  # noqa: E741
    ops = torch.ops.cmoe_cpu
    ops.release_scratch()
    c = call(T, 5, K, H, I, dtype=dtype)
    c.run()
    c.run()
    c.but(x=c.x[:1], topk_ids=c.topk_ids[:1], topk_weights=c.topk_weights[:1]).run()
    held = ops.release_scratch()
    needed = ops.scratch_bytes(T, K, H, I, dtype, True, False, torch.get_num_threads())
    page = 2**21 if needed >= 2**21 else 4096  # a slot is whole pages, huge ones if it fills one
    assert held == -(-needed // page) * page
    assert ops.release_scratch() == 0


def test_under_opcheck(cpu_kernels: Kernels) -> None:
    c = call(5, 4, 2, 16, 24, bias=True)
    torch.library.opcheck(cpu_kernels.fused_experts, c.arguments())
    empty = call(0, 4, 2, 16, 24)
    torch.library.opcheck(cpu_kernels.fused_experts, empty.arguments())


def test_in_a_graph(cpu_kernels: Kernels, count_compiles: Any) -> None:
    c = call(9, 4, 2, 16, 24)

    @torch.compile(fullgraph=True)
    def f(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return cpu_kernels.fused_experts(
            *c.but(x=x, topk_weights=weights, topk_ids=ids).arguments()
        )

    for T in (9, 5, 3, 7):
        part = (c.x[:T], c.topk_weights[:T], c.topk_ids[:T])
        assert torch.equal(f(*part), c.run()[:T])
    assert count_compiles() <= 2


def test_experts_further_apart_than_32_bits_count(cpu_kernels: Kernels) -> None:
    """Element offsets of 2^32 and more; only the pages in use are ever touched."""
    c = call(9, 3, 2, 32, 16)
    stride = 2**31 + 64
    memory = mmap.mmap(-1, 2 * (2 * stride + c.w13[0].numel()))
    far = torch.frombuffer(memory, dtype=torch.bfloat16)
    w13 = far.as_strided(c.w13.shape, (stride, 32, 1)).copy_(c.w13)
    assert torch.equal(c.but(w13=w13).run(), c.run())
