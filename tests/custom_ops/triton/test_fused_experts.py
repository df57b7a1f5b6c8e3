"""The Triton experts against the naive loop in fp64, by each of their paths."""

from __future__ import annotations

import dataclasses
import mmap
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cmoe.activation import ACTIVATIONS
from cmoe.custom_ops.fused_experts import SCHEMA
from cmoe.custom_ops.triton.parameters import (
    ROWS_ALONE,
    THREADS,
    TMA,
    TMA_WARPS,
    Device,
    Parameters,
    Tile,
    refusal,
)
from tests.custom_ops.cases import H, I, Problem, cases, check, inside_nan, problem, strided
from tests.oracle import GATED, naive_experts

pytest.importorskip("triton", reason="Triton is not installed")

from cmoe.custom_ops.triton.fused_experts import (
    Call,
    device_of,
    fused_experts,
    fused_experts_with,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = cases(DTYPES)

# Blocks smaller than the problems, so that every loop goes round, every mask masks.
ALONE = Tile(block_n=4, block_k=4, num_warps=1, num_stages=1)
SORTED = Tile(block_n=16, block_k=16, num_warps=1, num_stages=2)
PATHS = {
    "alone": Parameters(block_m=ROWS_ALONE, group_m=1, gate_up=ALONE, down=ALONE),
    "sorted": Parameters(block_m=16, group_m=2, gate_up=SORTED, down=SORTED),
}
BOTH_PATHS = pytest.mark.parametrize("path", PATHS)
Run = Callable[..., Tensor]


def run_on(device: torch.device, parameters: Parameters | None = None) -> Run:
    """The op, or the op with given parameters, with operands that move to the device and back."""

    def run(*arguments: Any) -> Tensor:
        moved = [a.to(device) if isinstance(a, Tensor) else a for a in arguments]
        if parameters is None:
            return fused_experts(*moved).to(arguments[0].device)
        return fused_experts_with(parameters, Call(*moved)).to(arguments[0].device)

    return run


def test_the_schema_is_that_of_every_backend() -> None:
    assert str(fused_experts._schema) == f"cmoe_triton::fused_experts{SCHEMA}"


def path_of_each_case() -> list[tuple[str, str]]:
    """Every case by the sorted path; those of few tokens by the other one too."""
    with torch.random.fork_rng():
        few = [name for name, make in CASES.items() if make().x.shape[0] <= 9]
    return [("sorted", name) for name in CASES] + [("alone", name) for name in few]


@pytest.mark.parametrize(("path", "case"), path_of_each_case())
def test_against_the_oracle(kernel_device: torch.device, path: str, case: str) -> None:
    check(run_on(kernel_device, PATHS[path]), CASES[case]())


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 9, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_with_the_default_parameters(
    kernel_device: torch.device, dtype: torch.dtype, num_tokens: int
) -> None:
    check(run_on(kernel_device), problem(num_tokens, 7, dtype=dtype))


@pytest.mark.parametrize(("num_experts", "top_k"), [(0, 1), (4, 0)])
@pytest.mark.parametrize("num_tokens", [3, 40])
def test_without_experts_or_without_slots(
    kernel_device: torch.device, num_tokens: int, num_experts: int, top_k: int
) -> None:
    p = problem(num_tokens).but(
        w13=torch.zeros(num_experts, 2 * I, H),
        w2=torch.zeros(num_experts, H, I),
        w13_bias=None,
        w2_bias=None,
        topk_weights=torch.ones(num_tokens, top_k),
        topk_ids=torch.full((num_tokens, top_k), -1, dtype=torch.int32),
    )
    assert not check(run_on(kernel_device), p).any()


@pytest.mark.parametrize("seed", range(16))
def test_random_shapes(kernel_device: torch.device, seed: int) -> None:
    choose = random.Random(seed)
    num_experts = choose.choice([1, 2, 3, 5, 13, 67])
    top_k = choose.randint(1, min(num_experts, 11))
    activation = choose.choice(ACTIVATIONS)
    hidden, intermediate = choose.choice([1, 3, 16, 31, 50]), choose.choice([1, 2, 15, 33, 64])
    num_tokens = choose.choice([1, 2, 3, 5, 17, 70])
    dtype = choose.choice(DTYPES)
    rows = (2 if activation in GATED else 1) * intermediate
    p = problem(num_tokens, num_experts, top_k, dtype=dtype, activation=activation)
    p = p.but(
        x=torch.randn(num_tokens, hidden).to(dtype),
        w13=(torch.randn(num_experts, rows, hidden) / hidden**0.5).to(dtype),
        w2=(torch.randn(num_experts, hidden, intermediate) / intermediate**0.5).to(dtype),
        w13_bias=torch.randn(num_experts, rows).to(dtype) if choose.random() < 0.5 else None,
        w2_bias=torch.randn(num_experts, hidden).to(dtype) if choose.random() < 0.5 else None,
        limit=choose.choice([None, 0.5]),
        interleaved=activation in GATED and choose.random() < 0.5,
    )
    if choose.random() < 0.5:  # some slots without an expert
        p = p.but(topk_ids=torch.where(torch.rand(p.topk_ids.shape) < 0.3, -1, p.topk_ids))
    if choose.random() < 0.5:
        p = p.but(w13=strided(p.w13), w2=strided(p.w2))
    path = "alone" if num_tokens <= 3 else "sorted"
    check(run_on(kernel_device, PATHS[path]), p)


@BOTH_PATHS
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_the_ends_of_the_range(
    kernel_device: torch.device, path: str, activation: str
) -> None:
    """Pre-activations far beyond where exponentials overflow; zero; NaN stays NaN."""
    g = torch.tensor([-1e4, -200, -90, -20, -1, -0.0, 0.0, 1e-30, 1, 20, 90, 1e4, torch.nan])
    parts = 2 if activation in GATED else 1
    p = Problem(
        x=g[:, None],
        w13=torch.ones(1, parts, 1),
        w2=torch.ones(1, 1, 1),
        topk_weights=torch.ones(len(g), 1),
        topk_ids=torch.zeros(len(g), 1, dtype=torch.int32),
        activation=activation,
        alpha=1.702,
    )
    for limit in (None, 7.0):
        arguments = p.but(limit=limit).arguments()
        y = run_on(kernel_device, PATHS[path])(*arguments)
        # A few rounding steps of the exponential, the quotient, the product.
        torch.testing.assert_close(
            y[:-1].double(), naive_experts(*arguments)[:-1], rtol=2e-6, atol=1e-6
        )
        assert y[-1].isnan()


@BOTH_PATHS
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_beside_the_tensors_are_not_read_in(
    kernel_device: torch.device, path: str, dtype: torch.dtype
) -> None:
    p = problem(5, dtype=dtype)
    names = ("x", "w13", "w2", "topk_weights", "w13_bias", "w2_bias")
    window = p.but(**{name: inside_nan(getattr(p, name)) for name in names})
    turned = p.but(w13=inside_nan(p.w13.mT).mT, w2=inside_nan(p.w2.mT).mT)
    run = run_on(kernel_device, PATHS[path])
    for changed in (window, turned):
        assert torch.equal(run(*changed.arguments()), run(*p.arguments()))


@BOTH_PATHS
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_stays_alone(kernel_device: torch.device, path: str, bad: float) -> None:
    """As in a padded batch whose dead rows hold whatever was there."""
    p = problem(7, 3, dtype=torch.bfloat16)
    x, weights = p.x.clone(), p.topk_weights.clone()
    x[2], weights[4] = bad, bad
    run = run_on(kernel_device, PATHS[path])
    y, clean = run(*p.but(x=x, topk_weights=weights).arguments()), run(*p.arguments())
    good = [0, 1, 3, 5, 6]
    assert torch.equal(y[good], clean[good])
    assert not y[[2, 4]].isfinite().any()


@BOTH_PATHS
def test_a_bad_expert_stays_with_its_tokens(kernel_device: torch.device, path: str) -> None:
    p = problem(9, 4, 1, dtype=torch.bfloat16)
    w13 = p.w13.clone()
    w13[2] = torch.nan
    run = run_on(kernel_device, PATHS[path])
    y, clean = run(*p.but(w13=w13).arguments()), run(*p.arguments())
    mine = (p.topk_ids == 2).squeeze(1)
    assert mine.any()
    assert y[mine].isnan().all()
    assert torch.equal(y[~mine], clean[~mine])


@BOTH_PATHS
@pytest.mark.parametrize("on_input", [False, True])
def test_a_skipped_slot_contributes_nothing_whatever_it_holds(
    kernel_device: torch.device, path: str, on_input: bool
) -> None:
    p = problem(4, top_k=1 if on_input else 2).but(apply_router_weight_on_input=on_input)
    p.topk_ids[1] = -1
    x, weights = p.x.clone(), p.topk_weights.clone()
    x[1], weights[1] = torch.nan, torch.inf
    run = run_on(kernel_device, PATHS[path])
    y = run(*p.but(x=x, topk_weights=weights).arguments())
    assert (y[1] == 0).all()
    assert torch.equal(y, run(*p.arguments()))


@BOTH_PATHS
def test_an_infinite_weight_on_the_input_is_infinite(
    kernel_device: torch.device, path: str
) -> None:
    """It does not meet the zeros that fill a block past the end of H."""
    p = Problem(
        x=torch.ones(1, 1),
        w13=torch.ones(1, 1, 1),
        w2=torch.ones(1, 1, 1),
        topk_weights=torch.full((1, 1), torch.inf),
        topk_ids=torch.zeros(1, 1, dtype=torch.int32),
        activation="relu2_no_mul",
        apply_router_weight_on_input=True,
    )
    assert run_on(kernel_device, PATHS[path])(*p.arguments()).item() == torch.inf


@BOTH_PATHS
@pytest.mark.parametrize("with_map", [False, True])
def test_ids_out_of_range_contribute_nothing(
    kernel_device: torch.device, path: str, with_map: bool
) -> None:
    """Neither the map nor the weights are read where an id, or a row of the map, points outside."""
    expert_map = torch.tensor([0, 1, 9, -7, 4], dtype=torch.int32) if with_map else None
    bad = [2, 3, 5, -2, 2**31 - 1, -(2**31)] if with_map else [5, 6, -2, 2**31 - 1, -(2**31)]
    run = run_on(kernel_device, PATHS[path])
    for dtype in (torch.int32, torch.int64):
        p = problem(len(bad), top_k=2).but(expert_map=expert_map)
        ids = torch.tensor([[value, 1] for value in bad], dtype=dtype)
        none = torch.where(ids == 1, ids, -1)
        wild = run(*p.but(topk_ids=ids).arguments())
        assert torch.equal(wild, run(*p.but(topk_ids=none).arguments()))
    far = torch.tensor([[2**32 + 1, 1]])
    one = problem(1, top_k=2).but(expert_map=expert_map)
    alone = one.but(topk_ids=torch.tensor([[-1, 1]]))
    assert torch.equal(run(*one.but(topk_ids=far).arguments()), run(*alone.arguments()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_change_only_the_rounding(
    kernel_device: torch.device, dtype: torch.dtype
) -> None:
    p = problem(7, 3, dtype=dtype)
    large = Tile(block_n=32, block_k=32, num_warps=4, num_stages=3)
    for block_m, group_m in ((ROWS_ALONE, 1), (16, 1), (32, 8)):
        row = Parameters(block_m=block_m, group_m=group_m, gate_up=large, down=large)
        check(run_on(kernel_device, row), p)


def aligned_problem(dtype: torch.dtype, parts: str, top_k: int = 2) -> Problem:
    """Rows of multiples of 16 bytes that blocks of 16 do not divide; slots without an expert."""
    hidden, intermediate = 40, 24
    rows = intermediate if parts == "gate" else 2 * intermediate
    activation = "gelu_no_mul" if parts == "gate" else "swigluoai"
    p = problem(19, 5, top_k, dtype=dtype, activation=activation)
    return p.but(
        x=torch.randn(19, hidden).to(dtype),
        w13=(torch.randn(5, rows, hidden) / hidden**0.5).to(dtype),
        w2=(torch.randn(5, hidden, intermediate) / intermediate**0.5).to(dtype),
        topk_ids=torch.where(torch.rand(19, top_k) < 0.1, -1, p.topk_ids),
        expert_map=torch.tensor([-1, 2, 0, 4, 3], dtype=torch.int32),
        w13_bias=torch.randn(5, rows).to(dtype),
        w2_bias=torch.randn(5, hidden).to(dtype),
        interleaved=parts == "pairs",
        apply_router_weight_on_input=top_k == 1,
    )


def other_copies(num_programs: int | None, gate_up: str, down: str) -> Parameters:
    """As `PATHS["sorted"]`, but for how blocks are copied, which program does which tile."""
    first, second = (
        dataclasses.replace(SORTED, num_warps=4, copies=copies, num_programs=num_programs)
        for copies in (gate_up, down)
    )
    block_m = 128 if down == TMA_WARPS else 16
    return Parameters(block_m=block_m, group_m=2, gate_up=first, down=second)


OTHER_COPIES = (
    other_copies(3, THREADS, THREADS),
    other_copies(1000, THREADS, TMA),
    other_copies(None, TMA, TMA),
    other_copies(3, TMA, TMA),
    other_copies(3, TMA, TMA_WARPS),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", ["gate", "halves", "pairs"])
def test_copies_and_programs_change_no_bit(
    kernel_device: torch.device, parts: str, dtype: torch.dtype
) -> None:
    device = device_of(kernel_device)
    if kernel_device.type == "cpu":  # the interpreter has descriptors of blocks
        device = dataclasses.replace(device, capability=(9, 0))
    for top_k in (1, 2):
        p = aligned_problem(dtype, parts, top_k)
        plain = other_copies(None, THREADS, THREADS)
        expected = {
            block_m: run_on(kernel_device, dataclasses.replace(plain, block_m=block_m))(
                *p.arguments()
            )
            for block_m in (16, 128)  # tensor cores have one instruction for few rows, one for many
        }
        for row in OTHER_COPIES:
            if refusal(row, device, Call(*p.arguments()).shape()) is None:
                y = run_on(kernel_device, row)(*p.arguments())
                assert torch.equal(y, expected[row.block_m]), row


def test_whether_rows_are_aligned_is_told_of_every_operand() -> None:
    p = aligned_problem(torch.bfloat16, "halves")
    assert Call(*p.arguments()).shape().is_aligned
    beside = torch.zeros(p.w2.numel() + 1, dtype=torch.bfloat16)[1:].view(p.w2.shape)
    wide = torch.zeros(5, 48, 44, dtype=torch.bfloat16)[:, :, :40]
    thin = dict(w13=p.w13[:, :40], w2=torch.zeros(5, 40, 24, dtype=torch.bfloat16)[:, :, :20])
    for changes in (dict(w2=beside), dict(w13=wide), thin):
        assert not Call(*p.but(**changes).arguments()).shape().is_aligned


@BOTH_PATHS
def test_two_runs_give_the_same_bits(kernel_device: torch.device, path: str) -> None:
    arguments = problem(9, dtype=torch.bfloat16).arguments()
    run = run_on(kernel_device, PATHS[path])
    assert torch.equal(run(*arguments), run(*arguments))


def test_a_token_does_not_depend_on_its_neighbours(kernel_device: torch.device) -> None:
    """To the bit, for one choice of parameters."""
    p = problem(33, dtype=torch.bfloat16)
    run = run_on(kernel_device, PATHS["sorted"])
    whole = run(*p.arguments())
    for part in (slice(0, 1), slice(7, 19), slice(32, 33)):
        few = p.but(x=p.x[part], topk_ids=p.topk_ids[part], topk_weights=p.topk_weights[part])
        assert torch.equal(run(*few.arguments()), whole[part])


@BOTH_PATHS
def test_experts_further_apart_than_32_bits_count(kernel_device: torch.device, path: str) -> None:
    """Element offsets of 2^31 and more; only the pages in use are ever touched."""
    p = problem(3, 3, dtype=torch.bfloat16, bias=False)
    stride = 2**30 + 64  # the third expert starts past 2^31
    num_elements = 2 * stride + p.w13[0].numel()
    if kernel_device.type == "cpu":
        far = torch.frombuffer(mmap.mmap(-1, 2 * num_elements), dtype=torch.bfloat16)
    else:
        far = torch.empty(num_elements, dtype=torch.bfloat16, device=kernel_device)
    w13 = far.as_strided(p.w13.shape, (stride, H, 1)).copy_(p.w13)
    moved = [a.to(kernel_device) if isinstance(a, Tensor) else a for a in p.arguments()]
    expected = fused_experts_with(PATHS[path], Call(*moved))
    moved[1] = w13
    assert torch.equal(fused_experts_with(PATHS[path], Call(*moved)), expected)


def test_under_opcheck(kernel_device: torch.device) -> None:
    for p in (problem(5), problem(0), problem(1).but(topk_ids=torch.tensor([[1, -1]]))):
        moved = [a.to(kernel_device) if isinstance(a, Tensor) else a for a in p.arguments()]
        torch.library.opcheck(fused_experts, tuple(moved))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(w13=torch.zeros(5, 9, H)), r"w13 must be \(5, 10, 7\).*got \(5, 9, 7\)"),
        (dict(x=torch.zeros(9, H + 1)), r"x must be \[T, 7\]"),
        (dict(topk_ids=torch.zeros(8, 2).int()), "topk_ids must be"),
        (dict(topk_ids=torch.zeros(9, 2)), "topk_ids must be int32 or int64, got torch.float32"),
        (dict(topk_weights=torch.zeros(9, 2).double()), "topk_weights must be float32, got"),
        (dict(activation="gelu_new"), "unknown activation 'gelu_new'"),
        (dict(apply_router_weight_on_input=True), "needs top_k = 1, got 2"),
        (
            dict(w13=torch.zeros(5, 2, 16, 32, 2), w2=torch.zeros(5, 1, 16, 32, 2)),
            "these kernels read no packed weights: call cmoe.unpack_weights",
        ),
        (dict(w2=torch.zeros(H, I)), r"needs x \[T, H\].*\(7, 5\)$"),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fused_experts(*problem().but(**changes).arguments())


def test_operands_on_two_devices() -> None:
    for name in ("topk_weights", "w2_bias"):
        p = problem()
        p = p.but(**{name: getattr(p, name).to("meta")})
        with pytest.raises(ValueError, match=f"{name} must be on cpu, where x is; got meta"):
            fused_experts_with(PATHS["sorted"], Call(*p.arguments()))


def test_doubles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"take bfloat16, float16, float32; got torch\.float64"):
        fused_experts(*problem(dtype=torch.float64).arguments())


def test_device_of_a_cpu_is_the_interpreter() -> None:
    assert device_of(torch.device("cpu")) == Device(name="interpreter", shared_bytes=2**18)


class FakeProperties:
    """Of an H200, as torch tells them; HIP builds of torch have no `optin`."""

    name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132
    shared_memory_per_block, shared_memory_per_block_optin = 49152, 232448


@pytest.mark.parametrize("hip", [None, "7.1"])
def test_device_of_a_gpu(monkeypatch: pytest.MonkeyPatch, hip: str | None) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FakeProperties)
    told = device_of.__wrapped__(torch.device("cuda", 0))
    if hip is None:
        assert told == Device(
            name="NVIDIA H200", shared_bytes=232448, capability=(9, 0), num_processors=132
        )
    else:
        assert told == Device(
            name="NVIDIA H200", shared_bytes=49152, is_hip=True, num_processors=132
        )


def test_the_choice_is_kept_by_bucket() -> None:
    p = problem(5)
    first, second = Call(*p.arguments()).shape(), Call(*problem(9).arguments()).shape()
    assert first is second
    assert (first.hidden_size, first.intermediate_size, first.is_gated) == (H, I, True)
    assert dataclasses.replace(first, top_k=1) != first
