"""The table of activations, against formulas written out by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from cmoe.activation import ACTIVATIONS, Activation, apply_activation
from tests.oracle import GATED, naive_activation

I = 5  # noqa: E741 - the name of the shape vocabulary


def test_the_names() -> None:
    assert (
        *("silu", "gelu", "gelu_tanh", "relu2", "swigluoai"),
        *("silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"),
    ) == ACTIVATIONS
    for name in ACTIVATIONS:
        assert Activation(name=name).is_gated() == (name in GATED)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_formula(
    name: str, dtype: torch.dtype, limit: float | None, interleaved: bool
) -> None:
    gated = name in GATED
    h = torch.randn(9, 2 * I if gated else I, dtype=dtype) * 3
    if not gated:
        g, u = h, None
    elif interleaved:
        g, u = h[:, 0::2], h[:, 1::2]
    else:
        g, u = h[:, :I], h[:, I:]
    exact = naive_activation(
        g.double(), None if u is None else u.double(), name, alpha=1.702, limit=limit
    )
    a = apply_activation(h, name, 1.702, limit, interleaved=interleaved)
    assert a.dtype == dtype
    assert a.shape == (9, I)
    # A formula is some ten roundings; gelu loses relative precision where 1 + erf cancels.
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(a.double(), exact, rtol=16 * step, atol=16 * step)


@pytest.mark.parametrize(
    ("name", "g", "u", "expected"),
    [
        ("silu", 1.0, 2.0, 1.4621171),
        ("gelu", 1.0, 2.0, 1.6826895),
        ("gelu_tanh", 1.0, 2.0, 1.6823840),
        ("relu2", -3.0, 2.0, 0.0),
        ("relu2", 3.0, 2.0, 18.0),
        ("swigluoai", 1.0, 2.0, 2.5373873),
    ],
)
def test_known_values(name: str, g: float, u: float, expected: float) -> None:
    a = apply_activation(torch.tensor([[g, u]]), name, 1.702, None)
    torch.testing.assert_close(a, torch.tensor([[expected]]), rtol=1e-6, atol=0)


def test_the_limit_cuts_g_above_and_u_on_both_sides() -> None:
    g, u = [9.0, -9.0, 1.0, 1.0], [1.0, 1.0, 9.0, -9.0]
    cut = apply_activation(torch.tensor([[*g, *u]]), "silu", 1.0, 2.0)
    clamped = torch.tensor([[2.0, -9.0, 1.0, 1.0, 1.0, 1.0, 2.0, -2.0]])
    assert torch.equal(cut, apply_activation(clamped, "silu", 1.0, None))


def test_the_input_is_unchanged() -> None:
    h = torch.randn(3, 2 * I)
    before = h.clone()
    for name in ACTIVATIONS:
        apply_activation(h, name, 1.0, 0.5)
    assert torch.equal(h, before)


def test_the_usual_constants() -> None:
    assert Activation.named("swigluoai") == Activation(name="swigluoai", alpha=1.702, limit=7.0)
    assert Activation.named("silu") == Activation(name="silu", alpha=1.0, limit=None)


@pytest.mark.parametrize("make", [Activation.named, lambda name: Activation(name=name)])
def test_an_unknown_name(make) -> None:
    with pytest.raises(ValueError, match="unknown activation 'swiglu'; choose one of silu, gelu,"):
        make("swiglu")


@pytest.mark.parametrize("limit", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bad_limit(limit: float) -> None:
    with pytest.raises(ValueError, match=f"limit must be positive and finite, got {limit}"):
        Activation(name="silu", limit=limit)


def test_it_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Activation(name="silu").name = "gelu"
