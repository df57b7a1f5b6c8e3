"""A whole layer on the triton backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import cmoe
from tests.layers import assert_exact, config_of, layer_of, logits_of, x_of

pytest.importorskip("triton", reason="Triton is not installed")

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax after top-k": dict(softmax_after_topk=True, renormalize=False),
    "noaux_tc": dict(scoring_func="sigmoid", e_score_correction_bias=True),
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_its_block_is_the_oracle_s(
    router: str, compiled: bool, kernel_device: torch.device
) -> None:
    parts = dict(router=cmoe.RouterConfig(**ROUTERS[router]))
    plain = layer_of(config_of(**parts), "plain")
    with kernel_device:
        layer = layer_of(config_of(**parts, backend="triton"))
    layer.load_state_dict(plain.state_dict())
    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer
    for num_tokens in (0, 1, 7):
        x, logits = x_of(num_tokens), logits_of(num_tokens)
        y = run(x.to(kernel_device), logits.to(kernel_device)).cpu()
        assert_exact(plain, y, x, logits)


class CalledOps(TorchDispatchMode):
    """Names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(op.name())
        return op(*args, **(kwargs or {}))


def test_both_of_its_ops_are_kernels(kernel_device: torch.device) -> None:
    with kernel_device:
        layer = layer_of(config_of(backend="triton"), transparent=True)
    with CalledOps() as called:
        layer(x_of(3).to(kernel_device), logits_of(3).to(kernel_device))
    assert {"cmoe_triton::route", "cmoe_triton::fused_experts"} <= called.names
    assert not {"cmoe::route", "cmoe::fused_experts"} & called.names
