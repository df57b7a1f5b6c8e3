"""The two ops that know layers: they look the layer up, then hand over to its `forward_impl`.

T tokens, H hidden as the weights store it, E experts, K experts per token, S width of the shared
experts. The layer comes as its token, or by name in the overloads `.by_name`.
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


def _layer(layer: Tensor | str) -> NamedLayer:
    return get_layer_from_name(layer) if isinstance(layer, str) else get_layer_from_token(layer)


def _own(y: Tensor, x: Tensor) -> Tensor:
    """y contiguous, in memory of its own: an op's output must not alias its input."""
    if y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return y.clone(memory_format=torch.contiguous_format)
    return y.contiguous()


def _moe_forward(
    hidden_states: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    input_ids: Tensor | None,
    layer: Tensor | str,
) -> Tensor:
    inputs = RouterInputs(hidden_states, router_logits, topk_weights, topk_ids, input_ids)
    return _own(_layer(layer).forward_impl(inputs, None).routed, hidden_states)


def _moe_forward_fake(
    hidden_states: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    input_ids: Tensor | None,
    layer: Tensor | str,
) -> Tensor:
    return hidden_states.new_empty(hidden_states.shape)


def _moe_forward_shared(
    hidden_states: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    input_ids: Tensor | None,
    shared_experts_input: Tensor,
    layer: Tensor | str,
) -> tuple[Tensor, Tensor]:
    inputs = RouterInputs(hidden_states, router_logits, topk_weights, topk_ids, input_ids)
    output = _layer(layer).forward_impl(inputs, shared_experts_input)
    return _own(output.shared, shared_experts_input), _own(output.routed, hidden_states)


def _moe_forward_shared_fake(
    hidden_states: Tensor,
    router_logits: Tensor | None,
    topk_weights: Tensor | None,
    topk_ids: Tensor | None,
    input_ids: Tensor | None,
    shared_experts_input: Tensor,
    layer: Tensor | str,
) -> tuple[Tensor, Tensor]:
    return (
        shared_experts_input.new_empty(shared_experts_input.shape),
        hidden_states.new_empty(hidden_states.shape),
    )


moe_forward = define_op(
    "cmoe::moe_forward",
    f"({_INPUTS}, Tensor layer) -> Tensor",
    kernel=_moe_forward,
    fake=_moe_forward_fake,
)
"""hidden_states [T, H], router_logits [T, E], topk_weights and topk_ids [T, K], input_ids [T],
layer: the token -> the routed experts' sum [T, H]."""

define_op(
    "cmoe::moe_forward.by_name",
    f"({_INPUTS}, str layer) -> Tensor",
    kernel=_moe_forward,
    fake=_moe_forward_fake,
)

moe_forward_shared = define_op(
    "cmoe::moe_forward_shared",
    f"({_INPUTS}, Tensor shared_experts_input, Tensor layer) -> (Tensor, Tensor)",
    kernel=_moe_forward_shared,
    fake=_moe_forward_shared_fake,
)
"""As moe_forward, with shared_experts_input [T, S] -> (their output [T, S], the sum [T, H])."""

define_op(
    "cmoe::moe_forward_shared.by_name",
    f"({_INPUTS}, Tensor shared_experts_input, str layer) -> (Tensor, Tensor)",
    kernel=_moe_forward_shared,
    fake=_moe_forward_shared_fake,
)
