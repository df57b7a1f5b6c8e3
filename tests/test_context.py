"""Names, tokens, scopes, lifetimes."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import cmoe
from cmoe.context import free_name, get_layer_from_token
from tests.layers import config_of, layer_of, logits_of, x_of


def test_a_layer_is_found_by_name() -> None:
    first, second = layer_of(prefix="a"), layer_of(prefix="b")
    assert cmoe.get_layer_from_name("a") is first
    assert cmoe.get_layer_from_name("b") is second


def test_an_unknown_name_lists_the_known_ones() -> None:
    layers = [layer_of(prefix="model.1"), layer_of(prefix="model.0")]
    with pytest.raises(ValueError, match=r"no layer is named 'model' .* known: model\.0, model\.1"):
        cmoe.get_layer_from_name("model")
    del layers
    gc.collect()
    with pytest.raises(ValueError, match="known: none"):
        cmoe.get_layer_from_name("model.0")


def test_a_duplicate_name_says_what_to_do() -> None:
    layer = layer_of(prefix="model.layers.0.mlp")
    with pytest.raises(ValueError, match=r"'model\.layers\.0\.mlp' exists already.*static_context"):
        layer_of(prefix="model.layers.0.mlp")
    assert cmoe.get_layer_from_name("model.layers.0.mlp") is layer


def test_the_name_of_a_deleted_layer_is_free() -> None:
    layer_of(prefix="a")
    layer_of(prefix="a")


def test_a_deleted_layer_in_a_cycle_frees_its_name() -> None:
    layer = layer_of(prefix="a")
    layer.itself = [layer]
    gc.disable()
    try:
        del layer
        layer_of(prefix="a")
    finally:
        gc.enable()


def test_a_scope_has_names_of_its_own() -> None:
    outer = layer_of(prefix="a")
    with cmoe.static_context():
        inner = layer_of(prefix="a")
        assert cmoe.get_layer_from_name("a") is inner
        with cmoe.static_context():
            innermost = layer_of(prefix="a")
            assert cmoe.get_layer_from_name("a") is innermost
        assert cmoe.get_layer_from_name("a") is inner
    assert cmoe.get_layer_from_name("a") is outer


def test_a_scope_hides_what_is_outside() -> None:
    outer = layer_of(prefix="a")
    with cmoe.static_context(), pytest.raises(ValueError, match="known: none"):
        cmoe.get_layer_from_name("a")
    assert cmoe.get_layer_from_name("a") is outer


def test_a_scope_ends_with_an_error_too() -> None:
    layer = layer_of(prefix="a")
    with pytest.raises(KeyError), cmoe.static_context():
        raise KeyError
    assert cmoe.get_layer_from_name("a") is layer


def test_layers_work_outside_of_their_scope() -> None:
    with cmoe.static_context():
        layer = layer_of(prefix="a")
        x, logits = x_of(3), logits_of(3)
        inside = layer(x, logits)
    assert torch.equal(layer(x, logits), inside)


def run_in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_a_thread_started_in_a_scope_has_the_process_wide_names() -> None:
    outer = layer_of(prefix="a")
    with cmoe.static_context():
        inner = layer_of(prefix="a")
        x, logits = x_of(3), logits_of(3)
        assert run_in_thread(lambda: cmoe.get_layer_from_name("a")) is outer
        assert torch.equal(run_in_thread(lambda: inner(x, logits)), inner(x, logits))


def test_a_thread_in_a_copied_context_has_the_names_of_the_scope() -> None:
    with cmoe.static_context():
        inner = layer_of(prefix="a")
        context = contextvars.copy_context()
        assert run_in_thread(lambda: context.run(cmoe.get_layer_from_name, "a")) is inner


def test_two_threads_build_layers_at_once() -> None:
    """Each thread's layers keep their own weights; of each shared name one is built."""
    barrier = threading.Barrier(2)
    x, logits = x_of(3), logits_of(3)

    def work(thread: int) -> tuple[list[cmoe.MoERunner], int]:
        barrier.wait()
        layers, refused = [], 0
        for number in range(20):
            try:
                layers.append(cmoe.FusedMoE(config_of(), f"shared.{number}"))
            except ValueError:
                refused += 1
            layer = cmoe.FusedMoE(config_of(), f"{thread}.{number}")
            torch.nn.init.constant_(layer.routed_experts.w13_weight, 0.1)
            torch.nn.init.constant_(layer.routed_experts.w2_weight, thread + 1.0)
            layers.append(layer)
            assert torch.equal(layer(x, logits), layer(x, logits))
        return layers, refused

    with ThreadPoolExecutor(2) as pool:
        (first, refused), (second, also_refused) = pool.map(work, range(2))
    assert refused + also_refused == 20
    assert len(first) + len(second) == 60
    torch.testing.assert_close(2 * first[-1](x, logits), second[-1](x, logits))


def test_free_name_counts_copies() -> None:
    assert free_name("a") == "a"
    layers = [layer_of(prefix="a"), layer_of(prefix="a@1")]
    assert free_name("a") == "a@2"
    del layers


def test_a_token_finds_its_layer() -> None:
    first, second = layer_of(prefix="a"), layer_of(prefix="b")
    assert get_layer_from_token(first.layer_token) is first
    assert get_layer_from_token(second.layer_token) is second


NO_LAYER = "no living layer's token.*the layer was deleted.*transparent=True"


@pytest.mark.parametrize("copied", [False, True])
def test_an_unknown_token_is_never_a_guess(copied: bool) -> None:
    layer = layer_of()
    token = layer.layer_token.clone() if copied else torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=NO_LAYER):
        torch.ops.cmoe.moe_forward(x_of(3), logits_of(3), None, None, None, token)


def test_the_token_of_a_deleted_layer_is_an_error() -> None:
    layer = layer_of()
    token = layer.layer_token
    del layer
    gc.collect()
    with pytest.raises(RuntimeError, match=NO_LAYER):
        torch.ops.cmoe.moe_forward(x_of(3), logits_of(3), None, None, None, token)


def test_tokens_of_many_short_lives_are_not_mixed_up() -> None:
    """Addresses are used again when layers go."""
    layers: list[cmoe.MoERunner] = []
    for number in range(100):
        layers.append(cmoe.FusedMoE(config_of(), f"{number}"))
        if number % 3 == 2:
            del layers[number % len(layers)]
        for layer in layers:
            assert get_layer_from_token(layer.layer_token) is layer


@pytest.mark.parametrize("called", ["never", "eager", "compiled"])
def test_deleting_a_model_frees_its_weights(called: str) -> None:
    model = torch.nn.ModuleList(
        [layer_of(prefix=f"{n}", gate=cmoe.GateLinear(16, 5)) for n in "ab"]
    )
    if called != "never":
        run = torch.compile(model[0], backend="aot_eager") if called == "compiled" else model[0]
        with torch.no_grad():
            run(x_of(3))
        del run
    alive = [weakref.ref(tensor) for tensor in [*model.parameters(), *model.buffers()]]
    del model
    gc.collect()
    assert [reference for reference in alive if reference() is not None] == []
