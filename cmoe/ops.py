"""The two ops that know layers: they look the layer up, then hand over to its `forward_impl`.

T tokens, H hidden as the weights store it, E experts, K experts per token, S width of the shared
experts. The layer comes as its token, or by name in the overloads `.by_name`. A graph also passes

- state: the layer's tensors as the graph knows them (`layer_state.tensors_of`), so that what it
  wrote before the call is read, what it writes after is not, and a captured graph has the addresses
  of the weights checked;
- call: a fresh tensor where gradients are enabled. A layer may draw at random, and torch's
  partitioner of training graphs merges calls with equal arguments whatever the op's tags say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cmoe.context import NamedLayer, get_layer_from_name, get_layer_from_token
from cmoe.custom_ops.registration import define_op
from cmoe.routing import RouterInputs

_INPUTS = (
    "Tensor hidden_states, Tensor? router_logits, Tensor? topk_weights, Tensor? topk_ids,"
    " Tensor? input_ids"
)
_LAYER = ", Tensor layer, Tensor[]? state=None, Tensor? call=None"


def _layer(layer: Tensor | str, state: list[Tensor] | None) -> NamedLayer:
    found = get_layer_from_name(layer) if isinstance(layer, str) else get_layer_from_token(layer)
    return found if state is None else found.with_state(state)


def _own(y: Tensor, like: Tensor, *inputs: Tensor) -> Tensor:
    """y contiguous, in memory of its own: an op's output must not alias its inputs.

    RuntimeError when y is not what the op's fake promises: shape, dtype of `like`.
    """
    if y.shape != like.shape or y.dtype != like.dtype:
        raise RuntimeError(
            f"the layer gave {y.dtype} {tuple(y.shape)} where its input has "
            f"{like.dtype} {tuple(like.shape)}"
        )
    # `contiguous` would keep odd strides of one token or none.
    if y.stride() != (y.shape[1], 1):
        return y.clone(memory_format=torch.contiguous_format)
    for x in (like, *inputs):
        if torch._C._is_alias_of(y, x):  # type: ignore[attr-defined]
            return y.clone()
    return y


def _promise(like: Tensor, layer: Tensor | str) -> Tensor:
    """The fake of an output. A token on the meta device brings real calls here too."""
    if isinstance(layer, Tensor) and layer.is_meta and not like.is_meta:
        raise RuntimeError(
            "the layer is on the meta device; call to_empty(device=...), then load its weights"
        )
    return like.new_empty(like.shape)


def _moe_forward(
    hidden_states: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    input_ids: Tensor | None,
    layer: Tensor | str,
    state: list[Tensor] | None = None,
    call: Tensor | None = None,
) -> Tensor:
    inputs = RouterInputs(hidden_states, router_logits, topk_weights, topk_ids, input_ids)
    return _own(_layer(layer, state).forward_impl(inputs, None).routed, hidden_states)


def _moe_forward_fake(
    hidden_states: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    input_ids: Tensor | None,
    layer: Tensor | str,
    state: list[Tensor] | None = None,
    call: Tensor | None = None,
) -> Tensor:
    return _promise(hidden_states, layer)


def _moe_forward_shared(
    hidden_states: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    input_ids: Tensor | None,
    shared_experts_input: Tensor,
    layer: Tensor | str,
    state: list[Tensor] | None = None,
    call: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    inputs = RouterInputs(hidden_states, router_logits, topk_weights, topk_ids, input_ids)
    output = _layer(layer, state).forward_impl(inputs, shared_experts_input)
    shared = _own(output.shared, shared_experts_input, hidden_states)
    return shared, _own(output.routed, hidden_states, shared_experts_input, shared)


def _moe_forward_shared_fake(
    hidden_states: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    input_ids: Tensor | None,
    shared_experts_input: Tensor,
    layer: Tensor | str,
    state: list[Tensor] | None = None,
    call: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _promise(shared_experts_input, layer), _promise(hidden_states, layer)


moe_forward = define_op(
    "cmoe::moe_forward",
    f"({_INPUTS}{_LAYER}) -> Tensor",
    kernel=_moe_forward,
    fake=_moe_forward_fake,
    draws=True,
)
"""hidden_states [T, H], router_logits [T, E], topk_weights and topk_ids [T, K], input_ids [T],
layer: the token -> the routed experts' sum [T, H]."""

define_op(
    "cmoe::moe_forward.by_name",
    f"({_INPUTS}, str layer) -> Tensor",
    kernel=_moe_forward,
    fake=_moe_forward_fake,
    draws=True,
)

moe_forward_shared = define_op(
    "cmoe::moe_forward_shared",
    f"({_INPUTS}, Tensor shared_experts_input{_LAYER}) -> (Tensor, Tensor)",
    kernel=_moe_forward_shared,
    fake=_moe_forward_shared_fake,
    draws=True,
)
"""As moe_forward, with shared_experts_input [T, S] -> (their output [T, S], the sum [T, H])."""

define_op(
    "cmoe::moe_forward_shared.by_name",
    f"({_INPUTS}, Tensor shared_experts_input, str layer) -> (Tensor, Tensor)",
    kernel=_moe_forward_shared,
    fake=_moe_forward_shared_fake,
    draws=True,
)
