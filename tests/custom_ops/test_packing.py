"""The packed layout: every value in its place, one copy, the exact way back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cmoe.custom_ops.packing import (
    PAIR,
    STRIP,
    as_packed,
    is_packed,
    lay_out,
    pack,
    unpack,
    unpacked_shape,
)
from tests.custom_ops.cases import inside_nan, strided

SHAPES = [(3, 64, 6), (1, 32, 2), (7, 96, 32), (0, 32, 4), (2, 0, 4), (2, 32, 0)]
DTYPES = [torch.bfloat16, torch.float32, torch.int8]


def numbered(*shape: int) -> Tensor:
    """No two values are alike."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_every_value_has_its_place() -> None:
    weight = numbered(2, 64, 6)
    packed = pack(weight)
    assert packed.shape == (2, 2, 3, STRIP, PAIR)
    for e, s, p, r, h in torch.cartesian_prod(*map(torch.arange, packed.shape)).tolist():
        assert packed[e, s, p, r, h] == weight[e, STRIP * s + r, PAIR * p + h]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpack_undoes_pack(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.randint(-100, 100, shape).to(dtype)
    packed = pack(weight)
    again = unpack(packed)
    assert is_packed(packed)
    assert not is_packed(again)
    assert packed.is_contiguous()
    assert again.is_contiguous()
    assert packed.nbytes == weight.nbytes
    assert unpacked_shape(packed) == shape
    assert packed.dtype == again.dtype == dtype
    assert torch.equal(again, weight)


@pytest.mark.parametrize("lay", [strided, inside_nan])
def test_any_strides(lay: Any) -> None:
    weight = numbered(3, 64, 6)
    assert torch.equal(pack(lay(weight)), pack(weight))
    assert torch.equal(unpack(lay(pack(weight))), weight)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_both_are_copies(shape: tuple[int, ...]) -> None:
    """Of one pair of columns the two layouts are the same bytes: still a copy."""
    weight = numbered(*shape)
    packed = pack(weight)
    again = unpack(packed)
    assert len({tensor.data_ptr() for tensor in (weight, packed, again)}) == 3


class Allocations(TorchDispatchMode):
    """The bytes of every op's result that is no view of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            self.num_bytes.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("lay", [Tensor.contiguous, strided])
def test_neither_takes_more_memory_than_its_result(lay: Any) -> None:
    weight = lay(numbered(3, 64, 6))
    with Allocations() as allocations:
        unpack(pack(weight))
    assert allocations.num_bytes == [weight.nbytes, weight.nbytes]


@pytest.mark.parametrize("shape", [(64, 6), (1, 1, 64, 6), (2, 33, 6), (2, 64, 7)], ids=str)
def test_what_cannot_be_packed(shape: tuple[int, ...]) -> None:
    message = r"must be \[E, N, K\], N a multiple of 32, K of 2; got "
    with pytest.raises(ValueError, match=message) as error:
        pack(torch.zeros(shape))
    assert str(error.value).endswith(str(shape))


@pytest.mark.parametrize("shape", [(2, 32, 6), (2, 1, 3, 16, 2), (2, 1, 3, 32, 4)], ids=str)
def test_what_is_not_packed(shape: tuple[int, ...]) -> None:
    message = r"a packed weight must be \[E, N/32, K/2, 32, 2\]; got "
    for function in (unpack, unpacked_shape):
        with pytest.raises(ValueError, match=message) as error:
            function(torch.zeros(shape))
        assert str(error.value).endswith(str(shape))


@pytest.mark.parametrize("lay", [Tensor.contiguous, strided, inside_nan])
def test_a_part_is_seen_as_a_packed_part(lay: Any) -> None:
    weight = numbered(3, 96, 8)
    part = lay(weight[1, 32:])
    view = as_packed(part)
    assert torch.equal(view, pack(weight)[1, 1:])
    assert view.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()


def test_unpack_is_differentiable() -> None:
    packed = pack(torch.randn(2, 32, 4, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(unpack, (packed,))
    assert torch.autograd.gradgradcheck(unpack, (packed,))
    factors = numbered(2, 32, 4).double()
    (unpack(packed) * factors).sum().backward()
    assert torch.equal(packed.grad, pack(factors))


@pytest.mark.parametrize("function", [pack, unpack])
def test_both_are_traceable(function: Any) -> None:
    weight = numbered(2, 64, 6)
    given = weight if function is pack else pack(weight)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(given), function(given))
    assert function(given.to("meta")).shape == function(given).shape


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_parameter_stays_the_same_object(mode: Any) -> None:
    parameter = nn.Parameter(numbered(2, 32, 4), requires_grad=False)
    alias, former = parameter.detach(), parameter.detach().clone()
    with mode():
        lay_out(parameter, pack)
    assert torch.equal(parameter, pack(former))
    assert torch.equal(alias, former)
    assert not parameter.is_inference()
    assert parameter.data_ptr() != alias.data_ptr()


def test_its_gradient_follows() -> None:
    parameter = nn.Parameter(pack(torch.randn(2, 32, 4)))
    factors = numbered(2, 32, 4)
    for times in (1, 2):
        packed = parameter.dim() == 5
        ((unpack(parameter) if packed else parameter) * factors).sum().backward()
        lay_out(parameter, unpack if packed else pack)
        expected = times * factors
        assert torch.equal(parameter.grad, expected if packed else pack(expected))
    assert parameter.dim() == 5


def test_a_parameter_made_for_inference_is_laid_out() -> None:
    with torch.inference_mode():
        parameter = nn.Parameter(numbered(2, 32, 4), requires_grad=False)
    lay_out(parameter, pack)
    lay_out(parameter, unpack)
    assert torch.equal(parameter, numbered(2, 32, 4))
