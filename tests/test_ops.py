"""The layer ops: what their fakes promise is what they give, in memory of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import cmoe
from cmoe.routing import RouterInputs
from tests.layers import HIDDEN, config_of, layer_of, logits_of, x_of

PADDED = {"quant": cmoe.QuantConfig(size_multiple=12)}

INPUTS = {
    "plain": lambda width: x_of(3, width=width),
    "empty": lambda width: x_of(0, width=width),
    "transposed": lambda width: x_of(width, width=3).t(),
    "every second row": lambda width: x_of(6, width=width)[::2],
    "wider rows": lambda width: x_of(3, width=width + 5)[:, 2 : width + 2],
    "expanded": lambda width: x_of(1, width=width).expand(3, width),
}


def call_of(
    kind: str, x: Tensor, layer: cmoe.MoERunner, *, by_name: bool
) -> tuple[Any, tuple[Any, ...]]:
    """An overload with its arguments."""
    packet = getattr(torch.ops.cmoe, kind)
    shared = (x_of(x.shape[0]),) if kind == "moe_forward_shared" else ()
    identity = layer.layer_name if by_name else layer.layer_token
    overload = packet.by_name if by_name else packet.default
    return overload, (x, logits_of(x.shape[0]), None, None, None, *shared, identity)


def layer_for(kind: str, **changes: Any) -> cmoe.MoERunner:
    shared = nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
    return layer_of(
        config_of(**changes), shared_experts=shared if kind == "moe_forward_shared" else None
    )


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


KINDS = pytest.mark.parametrize("kind", ["moe_forward", "moe_forward_shared"])
BY_NAME = pytest.mark.parametrize("by_name", [False, True], ids=["token", "name"])


@KINDS
@BY_NAME
@pytest.mark.parametrize("given", ["plain", "empty", "transposed"])
def test_opcheck(kind: str, by_name: bool, given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """opcheck clones what it is given, and the clone of a token is no layer's."""
    layer = layer_for(kind)
    monkeypatch.setattr("cmoe.ops.get_layer_from_token", lambda token: layer)
    overload, arguments = call_of(kind, INPUTS[given](HIDDEN), layer, by_name=by_name)
    torch.library.opcheck(overload, arguments)


@KINDS
@BY_NAME
@pytest.mark.parametrize("changes", [{}, PADDED], ids=["", "padded"])
@pytest.mark.parametrize("given", INPUTS)
def test_the_fake_is_the_real_thing(
    kind: str, by_name: bool, changes: dict[str, Any], given: str
) -> None:
    """opcheck of some versions does not compare strides on CPU."""
    layer = layer_for(kind, **changes)
    x = INPUTS[given](layer.config.padded_hidden_size())
    overload, arguments = call_of(kind, x, layer, by_name=by_name)
    real = as_tuple(overload(*arguments))
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
        fake = as_tuple(overload(*fakes))
    described = [(tuple(y.shape), y.stride(), y.dtype, y.device) for y in real]
    assert described == [(tuple(y.shape), y.stride(), y.dtype, y.device) for y in fake]
    assert all(y.is_contiguous() and y.isfinite().all() for y in real)


@KINDS
def test_by_name_is_by_token(kind: str) -> None:
    layer, x = layer_for(kind), x_of(3)
    by_token, arguments = call_of(kind, x, layer, by_name=False)
    packet = getattr(torch.ops.cmoe, kind)
    expected = as_tuple(by_token(*arguments))
    for op in (packet.by_name, packet):
        actual = as_tuple(op(*arguments[:-1], layer.layer_name))
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="no layer is named 'nobody'"):
        torch.ops.cmoe.moe_forward(x_of(3), logits_of(3), None, None, None, "nobody")


class Mirror(cmoe.MoERunnerInterface):
    """Gives back what it is told to."""

    def __init__(self, shared: Any, routed: Any) -> None:
        super().__init__("mirror")
        self.outputs = (shared, routed)

    def forward(self, hidden_states: Tensor, *arguments: Any) -> Tensor:
        raise NotImplementedError

    def load_weights(self, named_tensors: Any, *, strict: bool = True) -> cmoe.LoadReport:
        raise NotImplementedError

    def homes(self) -> Any:
        raise NotImplementedError

    def forward_impl(
        self, inputs: RouterInputs, shared_experts_input: Tensor | None
    ) -> cmoe.MoEOutput:
        shared, routed = (
            make and make(inputs.hidden_states, shared_experts_input) for make in self.outputs
        )
        return cmoe.MoEOutput(shared, routed)


ALIASES = {
    "the input itself": lambda x, s: x,
    "a view of the input": lambda x, s: x.view(-1).view(x.shape),
    "the shared experts' input": lambda x, s: s,
}


@pytest.mark.parametrize("shared", ALIASES)
@pytest.mark.parametrize("routed", ALIASES)
def test_outputs_share_no_memory(shared: str, routed: str) -> None:
    layer = Mirror(ALIASES[shared], ALIASES[routed])
    x, s = x_of(3), x_of(3)
    outputs = torch.ops.cmoe.moe_forward_shared(x, None, None, None, None, s, layer.layer_token)
    assert len({tensor.untyped_storage().data_ptr() for tensor in (x, s, *outputs)}) == 4
    assert torch.equal(outputs[0], ALIASES[shared](x, s))
    assert torch.equal(outputs[1], ALIASES[routed](x, s))


def test_outputs_are_contiguous_whatever_the_layer_gives() -> None:
    layer = Mirror(None, lambda x, s: x.t().contiguous().t())
    x = x_of(3)
    y = torch.ops.cmoe.moe_forward(x, None, None, None, None, layer.layer_token)
    assert y.is_contiguous()
    assert torch.equal(y, x)


def test_two_outputs_that_are_one_tensor_come_apart() -> None:
    kept = x_of(3)
    layer = Mirror(lambda x, s: kept, lambda x, s: kept)
    x = x_of(3)
    outputs = torch.ops.cmoe.moe_forward_shared(x, None, None, None, None, x, layer.layer_token)
    assert outputs[0].data_ptr() != outputs[1].data_ptr()


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (lambda x, s: x.double(), r"float64 \(3, 16\) where its input has torch.float32 \(3, 16\)"),
        (lambda x, s: x[:, :5], r"float32 \(3, 5\) where its input has torch.float32 \(3, 16\)"),
    ],
)
def test_a_layer_that_breaks_the_fakes_promise_is_an_error(lie: Any, message: str) -> None:
    """Compiled code would read past the end, or read the bytes as another dtype."""
    layer = Mirror(lie, lie)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.cmoe.moe_forward(x_of(3), None, None, None, None, layer.layer_token)
    x = x_of(3)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.cmoe.moe_forward_shared(x, None, None, None, None, x, layer.layer_token)


def test_a_layer_on_the_meta_device_is_an_error_for_real_inputs() -> None:
    with torch.device("meta"):
        layer = layer_of()
    with pytest.raises(RuntimeError, match="layer is on the meta device"):
        layer(x_of(3), logits_of(3))
    assert layer(x_of(3).to("meta"), logits_of(3).to("meta")).shape == (3, HIDDEN)


@KINDS
def test_inputs_stay_as_they_are(kind: str) -> None:
    layer, x = layer_for(kind), x_of(3)
    overload, arguments = call_of(kind, x, layer, by_name=False)
    before = [a.clone() for a in arguments if isinstance(a, Tensor)]
    overload(*arguments)
    after = [a for a in arguments if isinstance(a, Tensor)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
