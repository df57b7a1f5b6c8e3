"""Defining an op, switching to its reference for gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cmoe.custom_ops import registration
from cmoe.custom_ops.registration import define_op, differentiable


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


def _scaled_fake(x: Tensor, factor: float) -> Tensor:
    return x.new_empty(x.shape)


OP = define_op(
    "cmoe_test::scaled", "(Tensor x, float factor) -> Tensor", kernel=_scaled, fake=_scaled_fake
)
NAMED_OP = define_op(
    "cmoe_test::scaled.by_name",
    "(Tensor x, str factor) -> Tensor",
    kernel=lambda x, factor: x * float(factor),
    fake=_scaled_fake,
)


def test_the_op_is_found_under_its_name() -> None:
    assert torch.ops.cmoe_test.scaled.default is OP
    assert torch.ops.cmoe_test.scaled.by_name is NAMED_OP
    assert str(OP._schema) == "cmoe_test::scaled(Tensor x, float factor) -> Tensor"


def test_overloads_run_their_own_kernels() -> None:
    x = torch.ones(3)
    assert torch.equal(OP(x, 2.0), x * 2)
    assert torch.equal(NAMED_OP(x, "3"), x * 3)
    assert torch.equal(torch.ops.cmoe_test.scaled(x, "4"), x * 4)


def test_the_fake_runs_on_the_meta_device() -> None:
    y = OP(torch.empty(3, 5, device="meta"), 2.0)
    assert y.is_meta
    assert y.shape == (3, 5)


def test_opcheck() -> None:
    torch.library.opcheck(OP, (torch.randn(3), 2.0))


def test_compiled_code_keeps_the_strides_of_the_call() -> None:
    seen = []

    def kernel(x: Tensor) -> Tensor:
        seen.append(x.stride())
        return x.clone(memory_format=torch.contiguous_format)

    op = define_op(
        "cmoe_test::strides",
        "(Tensor x) -> Tensor",
        kernel=kernel,
        fake=lambda x: x.new_empty(x.shape),
    )
    assert torch.Tag.needs_exact_strides in op.tags
    compiled = torch.compile(lambda x: op((x + 1).t()), fullgraph=True)
    compiled(torch.randn(4, 6))
    assert seen == [(1, 6)]


def test_a_name_is_taken_once() -> None:
    with pytest.raises(RuntimeError, match="scaled"):
        define_op(
            "cmoe_test::scaled", "(Tensor x, float factor) -> Tensor", kernel=_scaled, fake=_scaled
        )


def test_gradients_run_the_reference() -> None:
    call = differentiable(lambda x, factor: "op", lambda x, factor: "reference")
    x, wants = torch.ones(3), torch.ones(3, requires_grad=True)
    assert call(x, None) == "op"
    assert call(wants, None) == "reference"
    assert call(None, wants) == "reference"
    assert call(wants.detach(), 3) == "op"
    with torch.no_grad():
        assert call(wants, None) == "op"
    with torch.inference_mode():
        assert call(wants, None) == "op"


def test_the_choice_is_made_while_tracing() -> None:
    call = differentiable(OP, _scaled)
    compiled = torch.compile(lambda x: call(x, 2.0), fullgraph=True, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert torch.equal(compiled(x.detach()), torch.full((3,), 2.0))


@pytest.mark.parametrize("compiled", [False, True])
def test_passing_over_a_backend_is_said_once(
    compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    registration._say_once.cache_clear()
    call = differentiable(OP, _scaled, backend="fast")
    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    run(torch.ones(3), 2.0)
    assert not caplog.records
    for _ in range(2):
        run(torch.ones(3, requires_grad=True), 2.0)
    assert [record.getMessage() for record in caplog.records] == [
        "calls that gradients are asked of run the plain torch kernels, not those of the fast "
        "backend; for inference use torch.no_grad()"
    ]
    registration._say_once.cache_clear()
