"""The contract alone: what a runner from outside gets by deriving from it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmoe
from cmoe.context import get_layer_from_token
from cmoe.loading.report import Homes
from cmoe.loading.write import Write
from cmoe.ops import moe_forward
from cmoe.routing import RouterInputs


class Doubling(cmoe.MoERunnerInterface):
    """The least that satisfies the contract: y = factor * x, through the layer op."""

    def __init__(self, layer_name: str) -> None:
        super().__init__(layer_name)
        self.factor = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, hidden_states: Tensor, *arguments: Any) -> Tensor:
        return moe_forward(hidden_states, None, None, None, None, self.layer_token)

    def forward_impl(
        self, inputs: RouterInputs, shared_experts_input: Tensor | None
    ) -> cmoe.MoEOutput:
        return cmoe.MoEOutput(None, inputs.hidden_states * self.factor)

    def load_weights(self, named_tensors: Any, *, strict: bool = True) -> cmoe.LoadReport:
        for _, tensor in dict(named_tensors).items():
            self.factor.copy_(tensor)
        return cmoe.LoadReport(tuple(named_tensors), ("factor",))

    def homes(self) -> Homes:
        return Homes(lambda name, tensor: [Write(self.factor, tensor, ("factor",))], ["factor"])


METHODS = ("forward", "forward_impl", "load_weights", "homes")
X = torch.arange(6.0).view(3, 2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_minimal_runner_works_through_the_op(compiled: bool) -> None:
    first, second = Doubling("first"), Doubling("second")
    second.load_weights({"factor": torch.tensor(3.0)})
    runs = [
        torch.compile(layer, fullgraph=True) if compiled else layer for layer in (first, second)
    ]
    for _ in range(2):
        assert torch.equal(runs[0](X), 2 * X)
        assert torch.equal(runs[1](X), 3 * X)


@pytest.mark.parametrize("method", METHODS)
def test_what_the_op_needs_is_part_of_the_contract(method: str) -> None:
    methods = {name: getattr(Doubling, name) for name in METHODS}
    del methods[method]
    incomplete = type("Incomplete", (cmoe.MoERunnerInterface,), methods)
    with pytest.raises(TypeError, match=f"abstract.*{method}"):
        incomplete("mlp")


def test_copies_have_names_and_tokens_of_their_own() -> None:
    layer = Doubling("mlp")
    copies = [copy.deepcopy(layer), copy.copy(layer)]
    copies.append(copy.deepcopy(copies[0]))
    assert [c.layer_name for c in copies] == ["mlp@1", "mlp@2", "mlp@3"]
    assert {c.prefix for c in (layer, *copies)} == {"mlp"}
    for one in (layer, *copies):
        assert get_layer_from_token(one.layer_token) is one
        assert cmoe.get_layer_from_name(one.layer_name) is one
    assert torch.equal(copies[0](X), 2 * X)


def test_a_copy_takes_the_name_of_a_deleted_original() -> None:
    twin = copy.deepcopy(Doubling("mlp"))
    assert copy.deepcopy(twin).layer_name == "mlp"


def test_the_token_follows_the_layer() -> None:
    layer = Doubling("mlp")
    token = layer.layer_token
    layer.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        layer.factor.fill_(2.0)
    assert layer.layer_token.data_ptr() != token.data_ptr()
    assert torch.equal(layer(X), 2 * X)
    with pytest.raises(RuntimeError, match="no living layer's token"):
        moe_forward(X, None, None, None, None, token)


def test_the_token_is_not_saved() -> None:
    layer = Doubling("mlp")
    assert list(layer.state_dict()) == ["factor"]
    assert not layer.layer_token.is_floating_point()


def test_assigned_parameters_bring_a_layer_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = nn.ModuleList([Doubling("first"), Doubling("second")])
    assert model[0].layer_token.is_meta
    model.load_state_dict(
        {"0.factor": torch.tensor(2.0), "1.factor": torch.tensor(3.0)}, assign=True
    )
    assert torch.equal(model[0](X), 2 * X)
    assert torch.equal(model[1](X), 3 * X)


def test_a_layer_stays_on_the_meta_device_while_its_parameters_do() -> None:
    with torch.device("meta"):
        layer = Doubling("mlp")
    layer.load_state_dict(layer.state_dict(), assign=True)
    assert layer.layer_token.is_meta
