"""The contract of a runner: what the layer ops, loaders, integrations rely on.

T tokens, H hidden, S width of the shared experts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cmoe.context import (
    register_copy_for_moe_forward_op,
    register_layer_for_moe_forward_op,
    register_token,
)
from cmoe.layer_state import tensors_of, with_tensors
from cmoe.loading.report import Homes, LoadReport, NamedTensors
from cmoe.pluggable import PluggableLayer
from cmoe.routing import RouterInputs


class MoEOutput(NamedTuple):
    """What the inside of a layer op gives back; [T, ...] each."""

    shared: Tensor | None  # [T, S], when the layer has shared experts
    routed: Tensor  # [T, H]


class OpIdentity(NamedTuple):
    """What tells a layer op its layer, see `ops.py`."""

    token: Tensor
    state: list[Tensor] | None
    call: Tensor | None


class MoERunnerInterface(PluggableLayer):
    """One sparse-MoE block under a name, found by the layer ops through its token.

    A subclass calls `super().__init__(layer_name)`, then implements the abstract methods.
    layer_name: unique among the living layers of the static context.
    prefix: the name that the layer was built with, which checkpoints know; copies share it.
    layer_token: one byte whose address is the layer's identity; never written, never saved.
    """

    layer_token: Tensor

    def __init__(self, layer_name: str) -> None:
        super().__init__()
        self.layer_name = layer_name
        self.prefix = layer_name
        self.register_buffer("layer_token", torch.zeros(1, dtype=torch.uint8), persistent=False)
        register_layer_for_moe_forward_op(self)
        register_token(self)
        self.register_load_state_dict_post_hook(_settle_loaded)

    @abstractmethod
    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor | None = None,
        *,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """The whole block, any leading dimensions."""

    @abstractmethod
    def forward_impl(self, inputs: RouterInputs, shared_experts_input: Tensor | None) -> MoEOutput:
        """What happens inside a layer op: route, compute the experts, the shared ones too."""

    def op_identity(self) -> OpIdentity:
        """The last arguments of a layer op: which layer, and when traced, which state and call."""
        # `make_fx` traces by a dispatch mode, without a compiler.
        is_traced = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
        if not is_traced:
            return OpIdentity(self.layer_token, None, None)
        fresh = torch.empty(0, device=self.layer_token.device) if torch.is_grad_enabled() else None
        return OpIdentity(self.layer_token, tensors_of(self), fresh)

    def with_state(self, state: list[Tensor]) -> MoERunnerInterface:
        """The layer, or where `state` holds other tensors than its own, a twin for one call."""
        return with_tensors(self, state)

    @abstractmethod
    def load_weights(
        self,
        named_tensors: NamedTensors,
        *,
        strict: bool = True,
    ) -> LoadReport:
        """Writes the block's checkpoint tensors into its parameters."""

    @abstractmethod
    def homes(self) -> Homes:
        """Where each of its checkpoint tensors goes: for a load that is tried out, for saving."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoERunnerInterface:
        former_pointer = self.layer_token.data_ptr()
        super()._apply(fn, recurse)
        register_token(self, former_pointer)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # A copy is a layer of its own: it needs another token, and a name that is free here.
        self._buffers = {**self._buffers, "layer_token": torch.zeros_like(self.layer_token)}
        register_copy_for_moe_forward_op(self, self.prefix)
        register_token(self)


def _settle_loaded(layer: MoERunnerInterface, incompatible_keys: Any) -> None:
    """After load_state_dict(assign=True) the parameters are other tensors, maybe elsewhere."""
    if layer.layer_token.is_meta:
        devices = (parameter.device for parameter in layer.parameters())
        home = next((device for device in devices if device.type != "meta"), None)
        layer.layer_token = torch.zeros_like(layer.layer_token, device=home)
    layer._apply(lambda tensor: tensor)
