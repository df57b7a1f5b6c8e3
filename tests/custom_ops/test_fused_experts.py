"""The experts as one function, against the naive loop in fp64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from cmoe.custom_ops.fused_experts import check_weights, fused_experts, fused_experts_reference
from cmoe.custom_ops.packing import pack, unpack
from tests.custom_ops.cases import (
    EXPERTS_ELSEWHERE,
    IDS_OF_EIGHT,
    ROUTINGS,
    H,
    I,
    Problem,
    cases,
    check,
    problem,
    strided,
)
from tests.oracle import GATED, naive_activation

IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", [fused_experts, fused_experts_reference], ids=["op", "reference"]
)
CASES = cases((torch.float32, torch.bfloat16, torch.float16, torch.float64))


@IMPLEMENTATIONS
@pytest.mark.parametrize("case", CASES)
def test_against_the_oracle(implementation: Callable[..., Tensor], case: str) -> None:
    check(implementation, CASES[case]())


@IMPLEMENTATIONS
@pytest.mark.parametrize("activation", GATED)
def test_interleaved_rows(implementation: Callable[..., Tensor], activation: str) -> None:
    p = problem(activation=activation)
    y = check(implementation, p.but(interleaved=True))
    order = [*range(0, 2 * I, 2), *range(1, 2 * I, 2)]
    halves = implementation(*p.but(w13=p.w13[:, order], w13_bias=p.w13_bias[:, order]).arguments())
    torch.testing.assert_close(y, halves)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("bias", [False, True])
def test_routings(
    implementation: Callable[..., Tensor], routing: str, dtype: torch.dtype, bias: bool
) -> None:
    ids = torch.tensor(ROUTINGS[routing], dtype=dtype)
    y = check(implementation, problem(num_tokens=3, bias=bias).but(topk_ids=ids))
    assert (y[(ids < 0).all(1)] == 0).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expert_map_with_holes(implementation: Callable[..., Tensor], dtype: torch.dtype) -> None:
    p = problem(7, 3).but(
        topk_ids=torch.tensor(IDS_OF_EIGHT, dtype=dtype), expert_map=EXPERTS_ELSEWHERE
    )
    y = check(implementation, p)
    assert (y[[2, 5]] == 0).all()
    assert (y[[0, 1, 3, 4, 6]] != 0).any(1).all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_weight_on_input(implementation: Callable[..., Tensor], dtype: torch.dtype) -> None:
    p = problem(top_k=1, dtype=dtype)
    p.topk_ids[3] = -1
    y = check(implementation, p.but(apply_router_weight_on_input=True))
    assert not torch.allclose(y, implementation(*p.arguments()), rtol=0.1)


@IMPLEMENTATIONS
@pytest.mark.parametrize("on_input", [False, True])
def test_a_skipped_slot_contributes_nothing_whatever_it_holds(
    implementation: Callable[..., Tensor], on_input: bool
) -> None:
    p = problem(num_tokens=4, top_k=1 if on_input else 2)
    clean = p.but(apply_router_weight_on_input=on_input)
    clean.topk_ids[1] = -1
    x, weights = p.x.clone(), p.topk_weights.clone()
    x[1], weights[1] = torch.nan, torch.inf
    y = implementation(*clean.but(x=x, topk_weights=weights).arguments())
    assert (y[1] == 0).all()
    assert torch.equal(y, implementation(*clean.arguments()))


def test_a_skipped_slot_sends_no_gradient_whatever_it_holds() -> None:
    p = problem(num_tokens=4)
    p.topk_ids[1] = -1
    p.topk_weights[1] = torch.inf
    parameters = [p.w13, p.w2, p.w13_bias, p.w2_bias]
    for parameter in parameters:
        parameter.requires_grad_()
    fused_experts_reference(*p.arguments()).sum().backward()
    for parameter in parameters:
        assert parameter.grad.isfinite().all()


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
def test_only_projections_round_before_the_end(
    implementation: Callable[..., Tensor], dtype: torch.dtype, bias: bool
) -> None:
    # One column everywhere, so that each step's rounding can be written down.
    num_tokens, num_experts, top_k = 33, 7, 4
    w13, b13 = (torch.randn(num_experts, 2).to(dtype) for _ in range(2))
    w2, b2 = (torch.randn(num_experts, 1).to(dtype) for _ in range(2))
    p = problem(num_tokens, num_experts, top_k).but(
        x=torch.ones(num_tokens, 1, dtype=dtype),
        w13=w13[..., None],
        w2=w2[..., None],
        w13_bias=b13 if bias else None,
        w2_bias=b2 if bias else None,
    )
    h = w13.double() + b13.double() * bias
    a = naive_activation(h[:, 0], h[:, 1], "silu", 1.0, None).to(dtype)
    out = (w2[:, 0].double() * a.double()).to(dtype).double() + b2[:, 0].double() * bias
    y = (p.topk_weights.double() * out[p.topk_ids.long()]).sum(1).to(dtype)
    assert torch.equal(implementation(*p.arguments()).flatten(), y)


@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_give_the_same_bits(
    implementation: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    p = problem(num_tokens=33, dtype=dtype)
    assert torch.equal(implementation(*p.arguments()), implementation(*p.arguments()))


def test_the_op_gives_the_bits_of_the_reference() -> None:
    p = problem(num_tokens=33)
    assert torch.equal(fused_experts(*p.arguments()), fused_experts_reference(*p.arguments()))


# --- bad input ------------------------------------------------------------------------------------

BAD_SHAPES = {
    "x of another width": (dict(x=(9, 8)), r"x must be \[T, 7\] .*\(9, 8\)"),
    "x of one dimension": (dict(x=(9,)), r"needs x \[T, H\].*\(9,\)"),
    "rows of w13": (dict(w13=(5, 9, 7)), r"w13 must be \(5, 10, 7\).*got \(5, 9, 7\)"),
    "columns of w13": (dict(w13=(5, 10, 8)), r"w13 must be \(5, 10, 7\).*got \(5, 10, 8\)"),
    "experts of w13": (dict(w13=(4, 10, 7)), r"w13 must be \(5, 10, 7\).*got \(4, 10, 7\)"),
    "two dimensions of w2": (dict(w2=(7, 5)), r"needs x \[T, H\].*\(7, 5\)"),
    "weights": (dict(topk_weights=(9, 3)), r"topk_weights \(9, 3\) and topk_ids \(9, 2\)"),
    "ids of other tokens": (dict(topk_ids=(8, 2)), r"topk_ids .* x \(9, 7\); got \(8, 2\)"),
    "ids of one dimension": (dict(topk_ids=(9,)), r"topk_ids .* x \(9, 7\); got \(9,\)"),
    "w13_bias": (dict(w13_bias=(5, 9)), r"w13_bias must be \(5, 10\); got \(5, 9\)"),
    "w13_bias that broadcasts": (
        dict(w13_bias=(5, 1)),
        r"w13_bias must be \(5, 10\); got \(5, 1\)",
    ),
    "w2_bias of too many experts": (
        dict(w2_bias=(6, 7)),
        r"w2_bias must be \(5, 7\); got \(6, 7\)",
    ),
    "expert_map": (dict(expert_map=(5, 1)), r"expert_map must be \[P\], got \(5, 1\)"),
}


@IMPLEMENTATIONS
@pytest.mark.parametrize("fault", BAD_SHAPES)
def test_bad_shapes(implementation: Callable[..., Tensor], fault: str) -> None:
    changes, message = BAD_SHAPES[fault]
    p = problem()
    integers = ("topk_ids", "expert_map")
    bad = {
        name: torch.zeros(shape, dtype=torch.int32 if name in integers else torch.float32)
        for name, shape in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        implementation(*p.but(**bad).arguments())


@IMPLEMENTATIONS
def test_bad_values(implementation: Callable[..., Tensor]) -> None:
    p = problem()
    bad: list[tuple[dict[str, Any], str]] = [
        (dict(x=p.x.bfloat16()), "share a dtype; got torch.bfloat16, torch.float32"),
        (dict(topk_ids=p.topk_ids.float()), "topk_ids must be int32 or int64, got torch.float32"),
        (dict(activation="gelu_new"), "unknown activation 'gelu_new'; choose one of silu, "),
        (dict(activation="silu_no_mul"), r"w13 must be \(5, 5, 7\).*'silu_no_mul'"),
        (dict(apply_router_weight_on_input=True), "needs top_k = 1, got 2"),
    ]
    for changes, message in bad:
        with pytest.raises(ValueError, match=message):
            implementation(*p.but(**changes).arguments())


@IMPLEMENTATIONS
@pytest.mark.parametrize("bad", [-2, 5, 2**31 - 1])
def test_ids_out_of_range(implementation: Callable[..., Tensor], bad: int) -> None:
    p = problem()
    p.topk_ids[4, 1] = bad
    with pytest.raises(ValueError, match=rf"topk_ids must be in \[-1, 5\); got .*{bad}"):
        implementation(*p.arguments())


@IMPLEMENTATIONS
def test_ids_outside_the_expert_map(implementation: Callable[..., Tensor]) -> None:
    p = problem().but(expert_map=torch.tensor([0, 1, -1], dtype=torch.int32))
    p.topk_ids[:] = 2
    assert (implementation(*p.arguments()) == 0).all()
    p.topk_ids[0, 0] = 3
    with pytest.raises(ValueError, match=r"topk_ids must be in \[-1, 3\); got 2 to 3"):
        implementation(*p.arguments())


# --- packed weights -------------------------------------------------------------------------------


def of_whole_strips(dtype: torch.dtype = torch.float32, *, gated: bool = True) -> Problem:
    """A problem whose weights can be packed."""
    p = problem(dtype=dtype, activation="silu" if gated else "relu2_no_mul")
    rows = 64 if gated else 32
    return p.but(
        x=torch.randn(9, 96).to(dtype),
        w13=torch.randn(5, rows, 96).div(10).to(dtype),
        w2=torch.randn(5, 96, 32).div(6).to(dtype),
        w13_bias=torch.randn(5, rows).to(dtype),
        w2_bias=torch.randn(5, 96).to(dtype),
    )


def packed(p: Problem) -> Problem:
    return p.but(w13=pack(p.w13), w2=pack(p.w2))


@IMPLEMENTATIONS
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_bits(
    implementation: Callable[..., Tensor], dtype: torch.dtype, gated: bool
) -> None:
    p = of_whole_strips(dtype, gated=gated)
    expected = check(implementation, p)
    assert torch.equal(implementation(*packed(p).arguments()), expected)


def test_packed_weights_are_differentiated() -> None:
    p = of_whole_strips(torch.float64)
    grads = []
    for q in (p, packed(p)):
        inputs = [tensor.detach().requires_grad_() for tensor in (q.x, q.w13, q.w2)]
        y = fused_experts_reference(
            *q.but(**dict(zip(("x", "w13", "w2"), inputs, strict=True))).arguments()
        )
        grads.append(torch.autograd.grad((y * torch.arange(96)).sum(), inputs))
    assert torch.equal(grads[1][0], grads[0][0])
    for plain, of_packed in zip(grads[0][1:], grads[1][1:], strict=True):
        assert torch.equal(unpack(of_packed), plain)


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_one_packed_weight_alone(implementation: Callable[..., Tensor], name: str) -> None:
    p = of_whole_strips()
    mixed = p.but(**{name: getattr(packed(p), name)})
    message = r"w13 and w2 must be both packed or both as .*cmoe\.pack_weights or cmoe\.unpack"
    with pytest.raises(ValueError, match=message):
        implementation(*mixed.arguments())


@IMPLEMENTATIONS
def test_packed_weights_of_another_shape(implementation: Callable[..., Tensor]) -> None:
    p = packed(of_whole_strips())
    faults = [
        (p.w2[..., :1], r"a packed weight must be .*; got \(5, 3, 16, 32, 1\)"),
        (p.w2[:, :2], r"w13 must be \(5, 64, 64\) for w2 \(5, 64, 32\).*got \(5, 64, 96\)"),
    ]
    for w2, message in faults:
        with pytest.raises(ValueError, match=message):
            implementation(*p.but(w2=w2).arguments())


def test_kernels_that_read_no_packed_weights_say_so() -> None:
    p = packed(of_whole_strips())
    message = r"got .*\(5, 3, 16, 32, 2\); these kernels read no packed weights: call cmoe\.unpack"
    with pytest.raises(ValueError, match=message):
        check_weights(p.x, p.w13, p.w2, p.w13_bias, p.w2_bias, p.activation)


# --- the op's contract ----------------------------------------------------------------------------

CONTRACTS: dict[str, Callable[[], Problem]] = {
    "plain": lambda: problem(bias=False),
    "biases": problem,
    "bfloat16": lambda: problem(dtype=torch.bfloat16),
    "no tokens": lambda: problem(num_tokens=0),
    "one token": lambda: problem(num_tokens=1),
    "strided x": lambda: problem().but(x=strided(torch.randn(9, H))),
    "row of a larger x": lambda: problem(num_tokens=1).but(x=torch.randn(3, 3, H)[1, 1:2]),
    "expanded x": lambda: problem().but(x=torch.randn(1, H).expand(9, H)),
    "strided weights": lambda: problem().but(w2=strided(torch.randn(5, H, I))),
    "non-gated": lambda: problem(activation="relu2_no_mul"),
    "limit, interleaved": lambda: problem(activation="swigluoai").but(limit=7.0, interleaved=True),
    "weight on input": lambda: problem(top_k=1).but(apply_router_weight_on_input=True),
    "expert_map": lambda: problem().but(expert_map=torch.arange(-1, 4, dtype=torch.int32)),
    "packed weights": lambda: packed(of_whole_strips()),
}


@pytest.mark.parametrize("contract", CONTRACTS)
def test_opcheck(contract: str) -> None:
    torch.library.opcheck(fused_experts, CONTRACTS[contract]().arguments())


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_fake_equals_the_real_one(contract: str) -> None:
    arguments = CONTRACTS[contract]().arguments()
    real = fused_experts(*arguments)
    with FakeTensorMode() as mode:
        fakes = (mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments)
        fake = fused_experts(*fakes)
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
    assert fake.device == real.device
    assert all(
        real.untyped_storage().data_ptr() != a.untyped_storage().data_ptr()
        for a in arguments
        if isinstance(a, Tensor) and a.numel() and real.numel()
    )


# --- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "relu2_no_mul"])
@pytest.mark.parametrize("on_input", [False, True])
def test_gradcheck(activation: str, on_input: bool) -> None:
    top_k = 1 if on_input else 2
    p = problem(4, 3, top_k, dtype=torch.float64, activation=activation)
    p = p.but(topk_weights=p.topk_weights.double(), apply_router_weight_on_input=on_input)
    p.topk_ids[:, 0] = torch.tensor([1, -1, 0, 1])
    p.topk_ids[:, -1] = torch.tensor([1, -1, 0, -1])
    names = ("x", "w13", "w2", "topk_weights", "w13_bias", "w2_bias")
    inputs = tuple(getattr(p, name).requires_grad_() for name in names)

    def function(*tensors: Tensor) -> Tensor:
        changes = dict(zip(names, tensors, strict=True))
        return fused_experts_reference(*p.but(**changes).arguments())

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_with_nothing_get_zero_gradients(dtype: torch.dtype) -> None:
    p = problem(dtype=dtype)
    p.topk_ids[:] = 3
    parameters = [p.w13, p.w2, p.w13_bias, p.w2_bias]
    for parameter in parameters:
        parameter.requires_grad_()
    fused_experts_reference(*p.arguments()).sum().backward()
    for parameter in parameters:
        assert (parameter.grad[[0, 1, 2, 4]] == 0).all()
        assert (parameter.grad[3] != 0).any()


def test_frozen_weights_cost_no_weight_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*arguments: Tensor) -> Tensor:
        raise AssertionError("the gradient of a frozen weight was computed")

    monkeypatch.setattr("cmoe.custom_ops.grouped_mm._weight_grad_op", forbidden)
    p = problem()
    fused_experts_reference(*p.but(x=p.x.requires_grad_()).arguments()).sum().backward()
    assert (p.x.grad != 0).all()
    with pytest.raises(AssertionError, match="frozen"):
        fused_experts_reference(*p.but(w2=p.w2.requires_grad_()).arguments()).sum().backward()


# --- compiled -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("implementation", "backend", "sizes"),
    [
        (fused_experts, "inductor", (1, 2, 17, 64, 0)),
        (fused_experts_reference, "aot_eager", (1, 2, 17, 64, 0)),
        pytest.param(fused_experts_reference, "inductor", (2, 17), marks=pytest.mark.slow),
    ],
)
def test_compiled_with_any_number_of_tokens(
    implementation: Callable[..., Tensor],
    backend: str,
    sizes: tuple[int, ...],
    count_compiles: Callable[[], int],
) -> None:
    p = problem()

    def forward(x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        called = p.but(x=x, topk_weights=topk_weights, topk_ids=topk_ids)
        return implementation(*called.arguments())

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in sizes:
        call = problem(num_tokens)
        arguments = (call.x, call.topk_weights, call.topk_ids)
        torch.testing.assert_close(compiled(*arguments), forward(*arguments))
    assert count_compiles() <= 3  # Torch specialises on sizes 0 and 1; all others share a graph.


@pytest.mark.parametrize("implementation", [fused_experts, fused_experts_reference])
def test_compiled_ids_out_of_range(implementation: Callable[..., Tensor]) -> None:
    p = problem()
    compiled = torch.compile(
        lambda ids: implementation(*p.but(topk_ids=ids).arguments()),
        fullgraph=True,
        backend="aot_eager",
    )
    compiled(p.topk_ids)
    p.topk_ids[3, 0] = 5
    with pytest.raises((ValueError, RuntimeError), match=r"topk_ids must be in \[-1, 5\)"):
        compiled(p.topk_ids)


class _Reference(nn.Module):
    def forward(self, *arguments: Any) -> Tensor:
        return fused_experts_reference(*arguments)


def test_the_reference_exports_with_any_number_of_tokens() -> None:
    num_tokens = torch.export.Dim("num_tokens")
    p = problem()
    dynamic = tuple(
        {0: num_tokens} if field.name in ("x", "topk_weights", "topk_ids") else None
        for field in dataclasses.fields(Problem)
    )
    program = torch.export.export(
        _Reference(), p.arguments(), dynamic_shapes={"arguments": dynamic}
    )
    targets = {str(node.target) for node in program.graph.nodes}
    assert "cmoe.grouped_mm.default" in targets
    for tokens in (2, 9, 33):
        call = problem(tokens)
        p = p.but(x=call.x, topk_weights=call.topk_weights, topk_ids=call.topk_ids)
        torch.testing.assert_close(
            program.module()(*p.arguments()), fused_experts_reference(*p.arguments())
        )
