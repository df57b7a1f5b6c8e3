"""Replacing a class of the package from outside."""

from __future__ import annotations

import inspect
import pydoc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cmoe
from cmoe.layer import MoERunner as runner_bound_at_import
from cmoe.routing import Routing
from tests.layers import HIDDEN, config_of, layer_of, logits_of, x_of


@pytest.fixture(autouse=True)
def nothing_stays_replaced() -> Iterator[None]:
    yield
    for name, cls in cmoe.PluggableLayer.active().items():
        if cls is not BUILT_IN[name]:
            cmoe.PluggableLayer.unregister_oot(name)


BUILT_IN = {
    "moe_runner": cmoe.MoERunner,
    "routed_experts": cmoe.RoutedExperts,
    "shared_experts": cmoe.SharedExperts,
}
NAMES = pytest.mark.parametrize("name", BUILT_IN)


@NAMES
def test_help_shows_the_arguments(name: str) -> None:
    shown = list(inspect.signature(BUILT_IN[name]).parameters)
    declared = list(inspect.signature(BUILT_IN[name].__init__).parameters)
    assert ["self", *shown] == declared
    assert "args" not in shown
    assert f"{BUILT_IN[name].__name__}({shown[0]}: " in pydoc.plain(
        pydoc.render_doc(BUILT_IN[name])
    )


def test_help_shows_the_arguments_of_what_is_built() -> None:
    with cmoe.SharedExperts.replaced_by(OtherShared):
        assert list(inspect.signature(cmoe.SharedExperts).parameters) == ["mlp", "gate"]
    assert "overlap" in inspect.signature(cmoe.SharedExperts).parameters


class OtherRunner(cmoe.MoERunner):
    """super() and isinstance() must keep their meaning in a replacement."""

    def __init__(self, layer_name: str, *arguments: Any, **parts: Any) -> None:
        super().__init__(layer_name, *arguments, **parts)
        assert isinstance(self, cmoe.MoERunner)
        self.marked = True

    def forward(self, *arguments: Any, **named: Any) -> Tensor:
        return super().forward(*arguments, **named) + 1


class OtherExperts(cmoe.RoutedExperts):
    """One more than the experts give."""

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        return super().forward(x, routing) + 1


class OtherShared(cmoe.SharedExperts):
    """One more than the shared experts give."""

    def __init__(self, mlp: nn.Module, gate: nn.Module | None = None) -> None:
        super().__init__(mlp, gate)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1


OTHERS: dict[str, type[cmoe.PluggableLayer]] = {
    "moe_runner": OtherRunner,
    "routed_experts": OtherExperts,
    "shared_experts": OtherShared,
}


def register(how: str, name: str) -> None:
    place, other = BUILT_IN[name], OTHERS[name]
    if how == "plain":
        assert place.register_oot(other) is other
    elif how == "parentheses":
        assert place.register_oot()(other) is other
    elif how == "by name":
        assert cmoe.PluggableLayer.register_oot(other, name=name) is other
    else:
        assert cmoe.PluggableLayer.register_oot(name=name)(other) is other


@NAMES
@pytest.mark.parametrize("how", ["plain", "parentheses", "by name", "parentheses, by name"])
def test_a_replacement_is_built_in_the_place_of_a_class(name: str, how: str) -> None:
    x, logits = x_of(3), logits_of(3)
    plain = layer_of(prefix="plain", shared_experts=nn.Linear(HIDDEN, HIDDEN))
    register(how, name)
    layer = layer_of(prefix="other", shared_experts=nn.Linear(HIDDEN, HIDDEN))
    assert OTHERS[name] in {type(module) for module in layer.modules()}
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(x, logits), plain(x, logits) + 1)


def test_names_bound_at_import_are_covered() -> None:
    """And a registration after the first layer was built."""
    assert type(layer_of(prefix="before")) is cmoe.MoERunner
    cmoe.MoERunner.register_oot(OtherRunner)
    assert runner_bound_at_import is cmoe.MoERunner
    assert type(layer_of(prefix="after")) is OtherRunner


class Subclass(cmoe.RoutedExperts):
    """A class that knows nothing of the replacement."""


class SubclassOfOther(OtherExperts):
    """A class that builds on the replacement."""


def test_a_replacement_covers_subclasses() -> None:
    cmoe.RoutedExperts.register_oot(OtherExperts)
    assert type(cmoe.RoutedExperts(config_of())) is OtherExperts
    assert type(Subclass(config_of())) is OtherExperts
    assert type(OtherExperts(config_of())) is OtherExperts
    assert type(SubclassOfOther(config_of())) is SubclassOfOther


class Foreign(cmoe.MoERunnerInterface):
    """Nothing of MoERunner but the contract."""

    def __init__(self, layer_name: str, *arguments: Any, **parts: Any) -> None:
        super().__init__(layer_name)

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return hidden_states + 1

    def forward_impl(self, inputs: Any, shared_experts_input: Tensor | None) -> cmoe.MoEOutput:
        raise NotImplementedError

    def load_weights(self, named_tensors: Any, *, strict: bool = True) -> cmoe.LoadReport:
        raise NotImplementedError

    def homes(self) -> Any:
        raise NotImplementedError


class SubRunner(cmoe.MoERunner):
    """A class that knows nothing of the replacement."""


def test_a_runner_may_be_replaced_by_another_kind_of_runner() -> None:
    """Its `__init__` runs although it is no MoERunner."""
    with cmoe.MoERunner.replaced_by(Foreign):
        layer = cmoe.FusedMoE(config_of(), "mlp")
        assert type(layer) is Foreign
        assert type(SubRunner("sub")) is Foreign
    x = x_of(3)
    assert torch.equal(layer(x), x + 1)
    assert cmoe.get_layer_from_name("mlp") is layer


def test_what_is_active_is_listed_and_undone() -> None:
    listed = cmoe.PluggableLayer.active()
    assert {name: listed[name] for name in BUILT_IN} == BUILT_IN
    cmoe.SharedExperts.register_oot(OtherShared)
    assert cmoe.PluggableLayer.active() == {**listed, "shared_experts": OtherShared}
    layer = cmoe.SharedExperts(nn.Identity())
    cmoe.PluggableLayer.unregister_oot("shared_experts")
    assert cmoe.PluggableLayer.active() == listed
    assert type(cmoe.SharedExperts(nn.Identity())) is cmoe.SharedExperts
    assert type(layer) is OtherShared


def fail_in_scope() -> None:
    with cmoe.SharedExperts.replaced_by(OtherShared):
        assert cmoe.PluggableLayer.active()["shared_experts"] is OtherShared
        raise KeyError


def test_a_scope_ends_with_an_error_too() -> None:
    with pytest.raises(KeyError):
        fail_in_scope()
    assert cmoe.PluggableLayer.active()["shared_experts"] is cmoe.SharedExperts


class Incomplete(cmoe.MoERunnerInterface):
    """Lacks most of the contract."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("place", "replacement", "message"),
    [
        (cmoe.MoERunner, OtherExperts, "'moe_runner' must derive from .*MoERunnerInterface"),
        (cmoe.RoutedExperts, cmoe.MoERunner, "must derive from cmoe.routed_experts.RoutedExperts"),
        (cmoe.SharedExperts, nn.Linear, "must derive from .*SharedExperts; got .*Linear"),
        (cmoe.MoERunner, cmoe.FusedMoE, "must derive from .*got <function FusedMoE"),
        (cmoe.MoERunner, None, "must derive from .*; got None"),
        (cmoe.MoERunner, "OtherRunner", "must derive from .*; got 'OtherRunner'"),
        (
            cmoe.MoERunner,
            Incomplete,
            "Incomplete .* does not define forward_impl, homes, load_weights",
        ),
        (cmoe.PluggableLayer, OtherRunner, "PluggableLayer is not a replaceable layer.*moe_runner"),
        (OtherRunner, OtherRunner, "OtherRunner is not a replaceable layer itself"),
    ],
)
@pytest.mark.parametrize("parentheses", [False, True])
def test_a_wrong_replacement_is_an_error_at_registration(
    place: type[cmoe.PluggableLayer], replacement: Any, message: str, parentheses: bool
) -> None:
    before = cmoe.PluggableLayer.active()
    register = place.register_oot() if parentheses else place.register_oot
    with pytest.raises(ValueError, match=message):
        register(replacement)
    assert cmoe.PluggableLayer.active() == before


def test_an_unknown_name_is_an_error_at_registration() -> None:
    with pytest.raises(ValueError, match=r"'MoERunner'; known: .*moe_runner \(MoERunner\)"):
        cmoe.PluggableLayer.register_oot(OtherRunner, name="MoERunner")


def test_a_second_replacement_says_what_to_do() -> None:
    cmoe.MoERunner.register_oot(OtherRunner)
    message = r"replaced by .*OtherRunner; call PluggableLayer\.unregister_oot\('moe_runner'\)"
    with pytest.raises(ValueError, match=message):
        cmoe.MoERunner.register_oot(Foreign)
    with pytest.raises(ValueError, match=message):
        cmoe.MoERunner.register_oot(OtherRunner)


def test_undoing_what_was_not_done_is_an_error() -> None:
    with pytest.raises(ValueError, match="'moe_runner' is not replaced; replaced: none"):
        cmoe.PluggableLayer.unregister_oot("moe_runner")


def test_names_are_given_once() -> None:
    with pytest.raises(ValueError, match=r"'moe_runner' already names cmoe\.runner\.MoERunner"):
        cmoe.PluggableLayer.register("moe_runner")(OtherRunner)
    with pytest.raises(ValueError, match=r"must derive from PluggableLayer; got .*Linear"):
        cmoe.PluggableLayer.register("linear")(nn.Linear)
