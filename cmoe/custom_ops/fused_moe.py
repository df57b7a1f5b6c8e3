"""The routed experts of a layer from its router's logits: `route`, then `fused_experts`.

T tokens, H hidden, E experts. One op where a backend has it: a small layer takes less time than the
calls of two.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cmoe.custom_ops.fused_experts import Experts, fused_experts_reference
from cmoe.custom_ops.registration import of_real_calls_too
from cmoe.custom_ops.route import Formula, route_reference

SCHEMA = (
    "(Tensor x, Tensor logits, Tensor? bias, int top_k, str scoring_func, bool softmax_after_topk,"
    " bool renormalize, float renormalize_epsilon, int num_expert_group, int topk_group,"
    " float scaling, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, Tensor? expert_map,"
    " str activation, float alpha, float? limit, bool interleaved,"
    " bool apply_router_weight_on_input) -> Tensor"
)
"""x, logits, the fields of a Formula, the fields of an Experts."""


def fused_moe_reference(x: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    """x: [T, H], logits: [T, E] -> [T, H]; arguments: those of the schema, in order."""
    formula = Formula(*arguments[: len(Formula._fields)])
    experts = Experts(*arguments[len(Formula._fields) :])
    return fused_experts_reference(*experts.arguments(x, *route_reference(logits, *formula)))


@of_real_calls_too
def fused_moe_fake(x: Tensor, logits: Tensor, *arguments: Any) -> Tensor:
    """Shape, stride, dtype of every backend's result."""
    return x.new_empty(x.shape)
