"""Prints what the router's kernel takes on each target: {target: {router: Resources}} as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from cmoe.custom_ops.triton.route import _route_kernel, launch_options
from tests.custom_ops.triton.aot import TARGETS, Resources, compile_for

_SOFTMAX = dict(
    SCORING="softmax", SOFTMAX_AFTER_TOPK=False, RENORMALIZE=True, NUM_GROUP=1, TOPK_GROUP=1
)
ROUTERS: Mapping[str, dict[str, Any]] = {
    "qwen3-moe": dict(num_experts=128, TOP_K=8, **_SOFTMAX),
    "gpt-oss": dict(num_experts=32, TOP_K=4, **_SOFTMAX) | dict(SOFTMAX_AFTER_TOPK=True),
    "deepseek-v2": dict(num_experts=160, TOP_K=6, **_SOFTMAX) | dict(NUM_GROUP=8, TOPK_GROUP=3),
    "deepseek-v3": dict(num_experts=256, TOP_K=8, has_bias=True, **_SOFTMAX)
    | dict(SCORING="sigmoid", NUM_GROUP=8, TOPK_GROUP=4),
    "sqrtsoftplus of 512": dict(num_experts=512, TOP_K=32, has_bias=True, dtype="fp32", **_SOFTMAX)
    | dict(SCORING="sqrtsoftplus"),
    "prime 4093": dict(num_experts=4093, TOP_K=8, dtype="fp16", **_SOFTMAX),
}


def resources(
    target: str, *, num_experts: int, has_bias: bool = False, dtype: str = "bf16", **constants: Any
) -> Resources:
    """Of one router on one target."""
    groups = constants["NUM_GROUP"]
    options = launch_options(num_experts, constants["TOP_K"], groups)
    constants |= options | dict(GROUP_SIZE=num_experts // groups, stride_expert=1)
    num_warps = constants.pop("num_warps")
    arguments = {
        "logits_ptr": f"*{dtype}",
        "weights_ptr": "*fp32",
        "ids_ptr": "*i32",
        "stride_token": "i32",
        "stride_bias": "i32",
        "scaling": "fp32",
    }
    if has_bias:
        arguments["bias_ptr"] = "*fp32"
    else:
        constants["bias_ptr"] = None
    return compile_for(target, _route_kernel, arguments, constants, num_warps=num_warps)


if __name__ == "__main__":
    table = {
        target: {name: resources(target, **router)._asdict() for name, router in ROUTERS.items()}
        for target in TARGETS
    }
    json.dump(table, sys.stdout)
