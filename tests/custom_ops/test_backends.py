"""The backends, with the choice among them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator

import pytest
import torch

from cmoe.custom_ops import backends
from cmoe.custom_ops.backends import (
    Backend,
    Kernels,
    LayerSpec,
    ReferenceBackend,
    choose_backend,
    explain_backends,
    kernels_of,
    list_backends,
    reasons_against_packing,
    register_backend,
    select_kernels,
    unregister_backend,
)
from cmoe.custom_ops.fused_experts import fused_experts
from cmoe.custom_ops.route import route
from cmoe.errors import UnsupportedError

SPEC = LayerSpec(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    num_experts=8,
    top_k=2,
    hidden_size=64,
    intermediate_size=32,
    activation="silu",
)
INTEGERS = dataclasses.replace(SPEC, dtype=torch.int8)


class Outside(Backend):
    """A backend that refuses for given reasons; its kernels are their names."""

    def __init__(self, name: str, *reasons: str) -> None:
        self.name = name
        self.reasons = reasons

    def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
        return self.reasons

    def kernels(self) -> Kernels:
        assert not self.reasons, "asked for kernels after a refusal"
        return Kernels(lambda *_: f"{self.name} experts", lambda *_: f"{self.name} route")


@pytest.fixture(autouse=True)
def only_the_reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever backends the package ships or a user has registered, these tests start without."""
    monkeypatch.setattr(backends, "_built_in", tuple)
    monkeypatch.setattr(backends, "_REGISTERED", [])
    backends._log_choice.cache_clear()
    yield
    backends._log_choice.cache_clear()


def names() -> list[str]:
    return [backend.name for backend in list_backends()]


def test_the_reference_is_always_there() -> None:
    assert names() == ["reference"]
    assert choose_backend(SPEC).name == "reference"
    assert ReferenceBackend().kernels() == Kernels(fused_experts, route)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_the_reference_takes_every_float(dtype: torch.dtype) -> None:
    assert ReferenceBackend().refuses(dataclasses.replace(SPEC, dtype=dtype)) == ()


def test_backends_from_outside_come_first_the_latest_ahead() -> None:
    register_backend(Outside("one"))
    register_backend(Outside("two"))
    assert names() == ["two", "one", "reference"]
    assert choose_backend(SPEC).name == "two"


def test_backends_from_outside_come_before_built_in_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_built_in", lambda: (Outside("built in"),))
    register_backend(Outside("mine"))
    assert names() == ["mine", "built in", "reference"]
    with pytest.raises(ValueError, match="backend 'built in' is already registered"):
        register_backend(Outside("built in"))


def test_what_the_package_ships_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    shipped = list_backends()
    assert all(isinstance(backend, Backend) for backend in shipped)
    assert len({backend.name for backend in shipped}) == len(shipped)
    assert shipped[-1].name == "reference"
    for reasons in explain_backends(SPEC).values():
        assert isinstance(reasons, tuple)


@pytest.mark.parametrize("name", ["reference", "mine", "auto"])
def test_a_name_is_taken_once(name: str) -> None:
    register_backend(Outside("mine"))
    with pytest.raises(ValueError, match=f"backend '{name}' is already registered; choose another"):
        register_backend(Outside(name))


@pytest.mark.parametrize("thing", [Outside, object(), "mine"])
def test_only_backends_are_registered(thing: object) -> None:
    with pytest.raises(ValueError, match="must be an instance of Backend, got"):
        register_backend(thing)


def test_a_backend_needs_a_name() -> None:
    class Nameless(Outside):
        def __init__(self) -> None:
            self.reasons = ()

    with pytest.raises(ValueError, match="a backend needs a name"):
        register_backend(Nameless())
    assert names() == ["reference"]


def test_reasons_that_are_no_tuple_are_an_error() -> None:
    backend = Outside("mine")
    backend.reasons = "no GPU"
    register_backend(backend)
    with pytest.raises(
        TypeError, match=r"refuses\(\) of backend 'mine' must give a tuple, not 'no GPU'"
    ):
        choose_backend(SPEC)


def test_a_backend_reads_no_packed_weights_unless_it_says_so() -> None:
    for backend in (ReferenceBackend(), Outside("mine")):
        expected = ("reads weights as checkpoints have them",)
        assert reasons_against_packing(backend, SPEC) == expected


@pytest.mark.parametrize("changes", [{"hidden_size": 80}, {"intermediate_size": 16}])
def test_strips_that_reach_over_two_parts_are_refused_for_every_backend(
    changes: dict[str, int],
) -> None:
    class Packs(Outside):
        def refuses_packed(self, spec: LayerSpec) -> tuple[str, ...]:
            return ()

    assert reasons_against_packing(Packs("mine"), SPEC) == ()
    (reason,) = reasons_against_packing(Packs("mine"), dataclasses.replace(SPEC, **changes))
    ((name, size),) = changes.items()
    assert reason == f"packs by 32, of which {name} ({size}) is no multiple"


def test_reasons_against_packing_that_are_no_tuple_are_an_error() -> None:
    class Spelled(Outside):
        def refuses_packed(self, spec: LayerSpec) -> tuple[str, ...]:
            return "no"

    message = r"refuses_packed\(\) of backend 'mine' must give a tuple, not 'no'"
    with pytest.raises(TypeError, match=message):
        reasons_against_packing(Spelled("mine"), SPEC)


def test_a_backend_states_both_of_its_methods() -> None:
    class Half(Backend):
        name = "half"

        def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
            return ()

    with pytest.raises(TypeError, match="kernels"):
        Half()


def test_a_backend_is_taken_away_again() -> None:
    register_backend(Outside("mine"))
    unregister_backend("mine")
    assert names() == ["reference"]
    with pytest.raises(ValueError, match=r"no backend 'mine' .* from outside; registered: none"):
        unregister_backend("mine")
    register_backend(Outside("other"))
    with pytest.raises(ValueError, match=r"no backend 'reference' .*; registered: other"):
        unregister_backend("reference")


def test_auto_passes_over_those_that_refuse_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    register_backend(Outside("slow"))
    register_backend(Outside("fast", "no AVX-512", "I must be a multiple of 32"))
    with caplog.at_level(logging.INFO, logger="cmoe"):
        for _ in range(3):
            assert choose_backend(SPEC).name == "slow"
    assert [record.getMessage() for record in caplog.records] == [
        "experts on cpu run by the slow backend (fast: no AVX-512; I must be a multiple of 32)"
    ]


def test_only_the_plain_kernels_are_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A GPU's layer passes over the cpu backend, and that is as it should be."""
    register_backend(Outside("able"))
    register_backend(Outside("fast", "no AVX-512"))
    choose_backend(SPEC)
    assert caplog.records == []
    unregister_backend("able")
    assert choose_backend(SPEC).name == "reference"
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_nothing_is_said_where_nothing_was_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    register_backend(Outside("fast"))
    with caplog.at_level(logging.DEBUG, logger="cmoe"):
        choose_backend(SPEC)
        unregister_backend("fast")
        register_backend(Outside("fast", "no meta device"))
        choose_backend(dataclasses.replace(SPEC, device=torch.device("meta")))
    assert caplog.records == []


def test_each_choice_has_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    for reason in ("no compiler", "no AVX2"):
        register_backend(Outside("fast", reason))
        with caplog.at_level(logging.WARNING, logger="cmoe"):
            choose_backend(SPEC)
        unregister_backend("fast")
    assert len(caplog.records) == 2


def test_a_forced_backend_is_taken_out_of_order() -> None:
    register_backend(Outside("fast"))
    assert choose_backend(SPEC, "reference").name == "reference"


def test_a_forced_backend_never_falls_back() -> None:
    register_backend(Outside("able"))
    register_backend(Outside("fast", "no AVX-512", "H is odd"))
    with pytest.raises(UnsupportedError) as error:
        choose_backend(SPEC, "fast")
    assert str(error.value).splitlines() == [
        "no implementation of the experts bfloat16 E8 K2 H64 I32 silu on cpu by backend 'fast'",
        "  fast      : no AVX-512; H is odd",
        "  able      : can run, was not asked for",
        "  reference : can run, was not asked for",
    ]


def test_an_error_lists_every_candidate() -> None:
    register_backend(Outside("fast", "no compiler"))
    with pytest.raises(UnsupportedError) as error:
        choose_backend(INTEGERS)
    assert str(error.value).splitlines() == [
        "no implementation of the experts int8 E8 K2 H64 I32 silu on cpu",
        "  fast      : no compiler",
        "  reference : torch.int8 is not a float dtype",
    ]


def test_an_unknown_backend() -> None:
    register_backend(Outside("mine"))
    with pytest.raises(ValueError, match="unknown backend 'cuda'; choose auto or mine, reference"):
        choose_backend(SPEC, "cuda")


def test_explain_backends() -> None:
    register_backend(Outside("fast", "no compiler"))
    assert explain_backends(SPEC) == {"fast": ("no compiler",), "reference": ()}


def test_kernels_of_a_backend_that_was_chosen_before() -> None:
    backend = Outside("mine")
    assert kernels_of(backend).fused_experts(torch.ones(1)) == "mine experts"


def test_selected_kernels_are_the_backends_unless_gradients_are_asked_for() -> None:
    register_backend(Outside("mine"))
    kernels = select_kernels(SPEC)
    logits = torch.randn(3, 4)
    options = (None, 2, "softmax", False, False, 1e-20, 1, 1, 1.0)
    assert kernels.route(logits, *options) == "mine route"
    assert kernels.fused_experts(logits) == "mine experts"
    weights, _ = kernels.route(logits.requires_grad_(), *options)
    assert weights.requires_grad


def test_selected_kernels_differentiate_the_experts() -> None:
    x, w13, w2 = torch.randn(3, 4), torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    ids, weights = torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    options = (None, None, None, "silu", 1.0, None, False, False)
    kernels = select_kernels(SPEC)
    y = kernels.fused_experts(x, w13, w2, weights, ids, *options)
    assert not y.requires_grad
    z = kernels.fused_experts(x, w13.requires_grad_(), w2, weights, ids, *options)
    assert torch.equal(y, z)
    z.sum().backward()
    assert (w13.grad != 0).any()
    assert w2.grad is None
