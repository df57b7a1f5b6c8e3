"""The whole sparse-MoE block: the one place where router, dispatcher, experts meet.

T tokens, H hidden, E experts, K experts per token, S width of the shared experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cmoe.autocast import is_autocast_on
from cmoe.config import MoEConfig
from cmoe.custom_ops.registration import asks_for_derivatives
from cmoe.distributed.dispatch import Dispatcher, LocalDispatcher
from cmoe.gate import GateLinear
from cmoe.layer_state import has_buffers, has_hooks, is_method, runs_only, tensors_of
from cmoe.loading.report import Homes, LoadReport, NamedTensors, load_tensors
from cmoe.ops import moe_forward, moe_forward_shared
from cmoe.pluggable import PluggableLayer
from cmoe.routed_experts import RoutedExperts
from cmoe.router.base import FusedMoERouter
from cmoe.router.topk import TopKRouter
from cmoe.routing import RouterInputs
from cmoe.runner_interface import MoEOutput, MoERunnerInterface
from cmoe.runner_weights import BlockWeights
from cmoe.shared_experts import SharedExperts


@PluggableLayer.register("moe_runner")
class MoERunner(MoERunnerInterface):
    """gate -> router -> routed experts (+ shared experts), one registered op a call.

    Owned, as submodules: gate, router, routed_experts, shared_experts, input_transform,
    output_transform. The gate reads the block's input, the shared experts too; the routed experts
    read input_transform(input), their scaled sum goes through output_transform.
    transparent: trace through the layer op (torch.export, AOTInductor); the kernel ops stay. A call
    that needs gradients, stands under autocast, or is being exported, is traced through in any
    case. Results are the same to the bit.
    """

    def __init__(
        self,
        layer_name: str,
        config: MoEConfig,
        router: FusedMoERouter,
        routed_experts: RoutedExperts,
        dispatcher: Dispatcher,
        *,
        gate: nn.Module | None = None,
        shared_experts: SharedExperts | None = None,
        input_transform: nn.Module | None = None,
        output_transform: nn.Module | None = None,
        transparent: bool = False,
    ) -> None:
        super().__init__(layer_name)
        self.config = config
        self.dispatcher = dispatcher
        self.transparent = transparent
        self.gate = gate
        self.router = router
        self.routed_experts = routed_experts
        self.shared_experts = shared_experts
        self.input_transform = input_transform
        self.output_transform = output_transform
        self.routed_scale = config.router.scale_on_output()
        self._hand_out_kernels()

    def forward(
        self,
        hidden_states: Tensor,
        router_logits: Tensor | None = None,
        *,
        topk_weights: Tensor | None = None,
        topk_ids: Tensor | None = None,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        """The block's output for every token, shape of hidden_states.

        hidden_states: [..., H], dtype of the weights; under autocast any float dtype, the experts
        then compute in the dtype of their weights. router_logits: [..., E], left out when the
        layer owns its gate. topk_weights, topk_ids: [..., K], for a GivenTopKRouter. input_ids:
        [...], for a HashRouter. ValueError for shapes, dtypes, missing or superfluous arguments.
        """
        inputs = self._flat(
            RouterInputs(hidden_states, router_logits, topk_weights, topk_ids, input_ids)
        )
        x = inputs.hidden_states
        if is_autocast_on(x.device):
            x = x.to(self.routed_experts.activation_dtype())
        if self.gate is not None:
            inputs = inputs._replace(router_logits=self.gate(x))
            self._check_widths(inputs)
        output = self._run(inputs._replace(hidden_states=self._experts_input(x)), x)
        y = self._finish(output).to(hidden_states.dtype)
        return y.view(*hidden_states.shape[:-1], y.shape[-1])

    def forward_impl(self, inputs: RouterInputs, shared_experts_input: Tensor | None) -> MoEOutput:
        """inputs.hidden_states: [T, H] as the weights store H; shared_experts_input: [T, S]."""
        if self.shared_experts is None:
            return MoEOutput(None, self._routed(inputs))
        assert shared_experts_input is not None
        routed = functools.partial(self._routed, inputs)
        return MoEOutput(*self.shared_experts.beside(shared_experts_input, routed))

    def _routed(self, inputs: RouterInputs) -> Tensor:
        """Routes, dispatches, computes the experts, combines."""
        routing = self.router(inputs)
        if self._scales_weights(inputs.hidden_states.dtype):
            routing = routing.scaled(self.routed_scale)
        dispatched = self.dispatcher.dispatch(inputs.hidden_states, routing)
        y = self.routed_experts(dispatched.hidden_states, dispatched.routing)
        y = self.dispatcher.combine(y)
        if routing.identity_weights is not None:
            identity = routing.identity_weights[:, None] * inputs.hidden_states
            y = y + identity.to(y.dtype)
        return y

    def load_weights(
        self,
        named_tensors: NamedTensors,
        *,
        strict: bool = True,
    ) -> LoadReport:
        """Loads the block's tensors, named as in the checkpoint, under the layer's name or alone.

        experts.*: see RoutedExperts.load_weights. gate.* or router.*: the gate, with
        e_score_correction_bias. shared_experts.* or shared_expert.*, shared_expert_gate.*: the
        shared experts. input_transform.*, output_transform.*: these. The names of the layer's own
        state_dict serve too. LoadError as there.
        """
        report = load_tensors(named_tensors, self.homes(), what=self.prefix, strict=strict)
        self.routed_experts.zero_padding()
        return report

    def homes(self) -> Homes:
        """Where each of these tensors goes."""
        block = BlockWeights(self.prefix)
        block.enter_router(self.router, self.gate)
        block.enter_shared_experts(self.shared_experts)
        block.enter(self.input_transform, "input_transform")
        block.enter(self.output_transform, "output_transform")
        return block.homes(self.routed_experts)

    def _flat(self, inputs: RouterInputs) -> RouterInputs:
        """The inputs with one leading dimension, judged before any work."""
        x = inputs.hidden_states
        self._check_hidden_states(x)
        self._check_presence(inputs)
        flat = {"hidden_states": x.flatten(0, -2)}
        for name, tensor in inputs._asdict().items():
            if name != "hidden_states" and tensor is not None:
                _check_argument(name, tensor, x.shape[:-1])
                flat[name] = tensor.reshape(-1) if name == "input_ids" else tensor.flatten(0, -2)
        self._check_widths(inputs)
        return inputs._replace(**flat)

    def _check_hidden_states(self, x: Tensor) -> None:
        expected = self.routed_experts.activation_dtype()
        fits = x.is_floating_point() if is_autocast_on(x.device) else x.dtype == expected
        if not fits:
            raise ValueError(
                f"hidden_states have dtype {x.dtype}, the weights {expected}; cast one of them"
            )
        if x.dim() < 2:
            raise ValueError(f"hidden_states must be [..., hidden], got {tuple(x.shape)}")
        if self.input_transform is None and x.shape[-1] != self.config.hidden_size:
            raise ValueError(
                f"hidden_states {tuple(x.shape)} must end in hidden_size "
                f"({self.config.hidden_size})"
            )

    def _check_presence(self, inputs: RouterInputs) -> None:
        required = self.router.requires
        if self.gate is not None:
            if inputs.router_logits is not None:
                raise ValueError("this layer owns its gate: leave router_logits out")
            required = required - {"router_logits"}
        for name, tensor in inputs._asdict().items():
            if name in required and tensor is None:
                raise ValueError(f"{type(self.router).__name__} needs {name}")
            if tensor is not None and name not in required and name != "hidden_states":
                raise ValueError(f"{type(self.router).__name__} does not take {name}")

    def _check_widths(self, inputs: RouterInputs) -> None:
        logits, width = inputs.router_logits, self.router.num_logits
        if logits is not None and width is not None and logits.shape[-1] != width:
            source = "the gate's logits" if self.gate is not None else "router_logits"
            raise ValueError(f"{source} {tuple(logits.shape)} must end in {width} columns")
        weights, ids = inputs.topk_weights, inputs.topk_ids
        if weights is not None and ids is not None and weights.shape != ids.shape:
            raise ValueError(
                f"topk_weights {tuple(weights.shape)} and topk_ids {tuple(ids.shape)} must have "
                "the same shape"
            )

    def _experts_input(self, x: Tensor) -> Tensor:
        if self.input_transform is not None:
            x = self.input_transform(x)
            if x.shape[-1] != self.config.hidden_size:
                raise ValueError(
                    f"input_transform gives {tuple(x.shape)}, not hidden_size "
                    f"({self.config.hidden_size}) columns"
                )
        missing = self.config.padded_hidden_size() - x.shape[-1]
        return F.pad(x, (0, missing)) if missing else x

    def _run(self, inputs: RouterInputs, x: Tensor) -> MoEOutput:
        """forward_impl, inside a layer op unless it must be traced through, or is one op itself."""
        if (routed := self._by_one_kernel(inputs)) is not None:
            return MoEOutput(None, routed)
        shared_input = None if self.shared_experts is None else x
        if self._is_traced_through(inputs):
            return self.forward_impl(inputs, shared_input)
        if shared_input is None:
            return MoEOutput(None, moe_forward(*inputs, *self.op_identity()))
        return MoEOutput(*moe_forward_shared(*inputs, x, *self.op_identity()))

    def _by_one_kernel(self, inputs: RouterInputs) -> Tensor | None:
        """`_routed` as one kernel op; None where anything but our own parts has a say in it.

        Such an op names every tensor that it reads, so it needs no layer op around it.
        """
        router, kernel = self.router, self.routed_experts.kernels.fused_moe
        if kernel is None or self.shared_experts is not None:
            return None
        if self._scales_weights(inputs.hidden_states.dtype):
            return None
        if not (is_method(self.forward_impl, _FORWARD_IMPL) and is_method(self._routed, _ROUTED)):
            return None
        dispatch, combine = self.dispatcher.dispatch, self.dispatcher.combine
        if not (is_method(dispatch, _DISPATCH) and is_method(combine, _COMBINE)):
            return None
        if not (isinstance(router, TopKRouter) and runs_only(router, _ROUTER_FORWARD)):
            return None
        if not router.runs(self.routed_experts.kernels.route):
            return None
        if not runs_only(self.routed_experts, _EXPERTS_FORWARD):
            return None
        experts = self.routed_experts.experts()
        if experts is None:
            return None
        y: Tensor = kernel(inputs.hidden_states, inputs.router_logits, *router.formula(), *experts)
        return y

    def _is_traced_through(self, inputs: RouterInputs) -> bool:
        """Whether the call goes without the layer op, which knows no derivatives, no autocast."""
        if self.transparent or torch.compiler.is_exporting():
            return True
        if is_autocast_on(inputs.hidden_states.device):
            return True
        if torch.compiler.is_compiling() and self._does_more_than_its_state_tells():
            return True
        # Without gradients nobody reads the list: no walk over the modules in every call.
        own = tensors_of(self) if torch.is_grad_enabled() else []
        return asks_for_derivatives([*own, *(tensor for tensor in inputs if tensor is not None)])

    def _does_more_than_its_state_tells(self) -> bool:
        """Whether the inside may read or write what no graph around the op would know of.

        A router that does not vouch for itself; buffers of shared experts (batch norm writes its
        own); where gradients are enabled also trainable tensors of code that is not ours: of shared
        experts, of hooks.
        """
        shared = self.shared_experts
        if not self.router.is_closed or (shared is not None and has_buffers(shared)):
            return True
        return torch.is_grad_enabled() and (shared is not None or has_hooks(self))

    def _scales_weights(self, dtype: torch.dtype) -> bool:
        """Whether the scale on the output goes onto the routing weights instead.

        The experts round their sum to float16, where a sum that the scale would bring into range is
        infinite already; on the weights the same scale acts in float32, before that rounding.
        """
        router = self.config.router
        return (
            dtype == torch.float16
            and abs(self.routed_scale) < 1
            and not router.apply_router_weight_on_input
        )

    def _finish(self, output: MoEOutput) -> Tensor:
        """Cuts the padding, scales, transforms, adds the shared experts."""
        y = output.routed[:, : self.config.hidden_size]
        narrow = y.dtype
        # Scaled sums of float16 outputs can leave its range, so they are formed in float32.
        wide = torch.float32 if narrow == torch.float16 else narrow
        if self.routed_scale != 1.0 and not self._scales_weights(narrow):
            y = y.to(wide) * self.routed_scale
        if self.output_transform is not None:
            y = self.output_transform(_into_range(y, narrow))
        if output.shared is not None:
            y = y.to(wide) + output.shared
        return _into_range(y, narrow).contiguous()

    def _hand_out_kernels(self) -> None:
        """The backend that the experts chose serves router, gate."""
        self.router.use_kernels(self.routed_experts.kernels)
        if isinstance(self.gate, GateLinear):
            self.gate.use_kernels(self.routed_experts.kernels)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoERunner:
        super()._apply(fn, recurse)
        self._hand_out_kernels()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._hand_out_kernels()


# Of our own parts as they are written, before anybody sets others in their place.
_FORWARD_IMPL, _ROUTED = MoERunner.forward_impl, MoERunner._routed
_DISPATCH, _COMBINE = LocalDispatcher.dispatch, LocalDispatcher.combine
_ROUTER_FORWARD, _EXPERTS_FORWARD = TopKRouter.forward, RoutedExperts.forward


def _check_argument(name: str, tensor: Tensor, lead: torch.Size) -> None:
    """A router's argument: dtype, dimensions."""
    if name in ("topk_ids", "input_ids"):
        fits, wanted = tensor.dtype in (torch.int32, torch.int64), "int32 or int64"
    else:
        fits, wanted = tensor.is_floating_point(), "a float dtype"
    if not fits:
        raise ValueError(f"{name} has dtype {tensor.dtype}; it must have {wanted}")
    num_dims = len(lead) + (name != "input_ids")
    if tensor.dim() != num_dims or tensor.shape[: len(lead)] != lead:
        raise ValueError(
            f"{name} {tuple(tensor.shape)} must have the leading dimensions {tuple(lead)} "
            f"of hidden_states, {num_dims} dimensions in all"
        )


def _into_range(y: Tensor, dtype: torch.dtype) -> Tensor:
    """y in dtype; what lies outside the range of a narrower dtype becomes its outermost value."""
    if y.dtype == dtype:
        return y
    finite = torch.finfo(dtype)
    return y.clamp(finite.min, finite.max).to(dtype)
