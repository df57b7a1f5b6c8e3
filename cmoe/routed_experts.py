"""The routed experts of a layer: their weights, the format of these, how they are loaded.

T tokens, H hidden, I intermediate, E local experts, N = 2I for gated activations, else I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cmoe.config import MoEConfig
from cmoe.custom_ops.backends import (
    Kernels,
    LayerSpec,
    choose_backend,
    kernels_of,
    reasons_against_packing,
)
from cmoe.custom_ops.fused_experts import Experts
from cmoe.custom_ops.packing import (
    STRIP,
    as_packed,
    is_packed,
    lay_out,
    unpack,
    unpacked_shape,
)
from cmoe.errors import LoadError, UnsupportedError
from cmoe.expert_map import ExpertMapManager
from cmoe.layer_state import is_method
from cmoe.loading.expert_names import ExpertTensorName, parse_expert_name
from cmoe.loading.report import Homes, LoadReport, NamedTensors, load_tensors
from cmoe.loading.write import Write
from cmoe.pluggable import PluggableLayer
from cmoe.quant.table import make_quant_method
from cmoe.quant.unquantized import Unquantized
from cmoe.routing import Routing


@PluggableLayer.register("routed_experts")
class RoutedExperts(PluggableLayer):
    """Parameters w13_weight [E, N, H], w2_weight [E, H, I] (with w13_bias [E, N], w2_bias [E, H]).

    Rows of w13: gate, then up. Parameters ask for no gradient until `requires_grad_()`. Initialised
    like transformers does, normal with deviation 0.02; a layer built on the meta device gets its
    values from `load_weights` after `to_empty`. Weights may be packed (`pack_weights`): which ones
    are, their own shapes tell.
    """

    w13_weight: nn.Parameter
    w2_weight: nn.Parameter
    expert_map: Tensor | None

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.placement = ExpertMapManager.from_config(config)
        self.quant_method = make_quant_method(config.quant)
        shapes = self.quant_method.create_weights(config, self.placement.num_local_experts())
        self._weight_names = tuple(shapes)
        for name, (shape, dtype) in shapes.items():
            empty = torch.empty(shape, dtype=dtype)
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.register_buffer("expert_map", self.placement.expert_map(), persistent=False)
        self.reset_parameters()
        self._settle()
        self.register_load_state_dict_post_hook(_settle_loaded)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fresh random weights; zero biases; zeros in the padding."""
        for name, parameter in self.weights().items():
            if name.endswith("_bias"):
                parameter.zero_()
            else:
                parameter.normal_(std=0.02)
        self.zero_padding()

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """x: [T, H] -> [T, H], each token's weighted sum over its experts."""
        return self.quant_method.apply(
            self.config, self.weights(), self.expert_map, self.kernels, x, routing
        )

    def experts(self) -> Experts | None:
        """What `forward` hands to the backend's `fused_experts`; None where it does otherwise."""
        method = self.quant_method
        if not (isinstance(method, Unquantized) and is_method(method.apply, _APPLY)):
            return None
        if self.kernels.fused_experts is not self._fused_experts:
            return None
        return method.experts(self.config, self.weights(), self.expert_map)

    def weights(self) -> dict[str, Tensor]:
        """What the quant method asked for, by name: parameters, or what is computed from them."""
        own = self._parameters  # The way round `nn.Module.__getattr__`, which every call would pay.
        return {
            name: weight if (weight := own.get(name)) is not None else getattr(self, name)
            for name in self._weight_names
        }

    def activation_dtype(self) -> torch.dtype:
        """The dtype that the input must have."""
        return self.w13_weight.dtype

    def load_weights(self, named_tensors: NamedTensors, *, strict: bool = True) -> LoadReport:
        """Writes checkpoint tensors into the parameters' storage.

        Names as `expert_names.py` reads them, at any prefix; layout of fused tensors as
        `config.layout` declares it. Loading again gives the same result in the same storage.
        A mapping is judged whole before anything is written. LoadError: see `load_tensors`.
        """
        homes = Homes(self.home_of, self.slots())
        report = load_tensors(named_tensors, homes, what="expert weights", strict=strict)
        self.zero_padding()
        return report

    def slots(self) -> list[str]:
        """Every place that a complete checkpoint fills, such as `w13_weight[3].w1`."""
        return [
            _slot(name, row, part)
            for name in self._weight_names
            for row in range(self.placement.num_local_experts())
            for part in self._parts_of(name)
        ]

    def _parts_of(self, parameter: str) -> tuple[str, ...]:
        if parameter.startswith("w2"):
            return ("w2",)
        return ("w1", "w3") if self.config.activation.is_gated() else ("w1",)

    def home_of(self, name: str, tensor: Tensor) -> list[Write] | None:
        """Where one checkpoint tensor goes; None when it has no home here.

        LoadError for a shape or dtype that does not fit.
        """
        parsed = parse_expert_name(name)
        if parsed is None:
            return None
        parameter = (
            f"{'w2' if parsed.part == 'w2' else 'w13'}_{'bias' if parsed.is_bias else 'weight'}"
        )
        if parameter not in self._weight_names:
            return None
        if parameter not in self._parameters:
            raise LoadError(
                f"{name}: {parameter} is computed by a parametrization, so nothing can be loaded "
                "into it; remove the parametrization first, register it again after the load"
            )
        rows = self._rows(name, parsed)
        if parsed.is_native:
            return self._native_write(name, parameter, tensor)
        tensor = self._oriented(name, parsed, tensor)
        return [
            self._write(parameter, row, part, source)
            for part, halves in self._split(parsed, tensor)
            for row, source in self._per_row(rows, parsed, halves)
        ]

    def _rows(self, name: str, parsed: ExpertTensorName) -> dict[int, int]:
        """Local rows to write, each with its logical expert."""
        experts = range(self.config.num_experts) if parsed.expert is None else [parsed.expert]
        if parsed.expert is not None and parsed.expert >= self.config.num_experts:
            raise LoadError(f"{name}: this layer has {self.config.num_experts} experts")
        return {row: e for e in experts for row in self.placement.local_rows_of(e)}

    def _native_write(self, name: str, parameter: str, tensor: Tensor) -> list[Write]:
        target = self.weights()[parameter]
        if is_packed(target):
            _check_shape(name, tensor, unpacked_shape(target))
            tensor = as_packed(tensor)
        else:
            _check_shape(name, tensor, tuple(target.shape))
        rows = range(self.placement.num_local_experts())
        parts = self._parts_of(parameter)
        slots = tuple(_slot(parameter, row, part) for row in rows for part in parts)
        return [Write(target, tensor, slots)]

    def _oriented(self, name: str, parsed: ExpertTensorName, tensor: Tensor) -> Tensor:
        """The tensor as [..., out, in], its shape checked."""
        config = self.config
        gated = config.activation.is_gated()
        halves = 2 if gated and parsed.part == "w13" else 1
        rows = config.hidden_size if parsed.part == "w2" else halves * config.intermediate_size
        columns = config.intermediate_size if parsed.part == "w2" else config.hidden_size
        experts = (config.num_experts,) if parsed.expert is None else ()
        if parsed.is_bias:
            _check_shape(name, tensor, (*experts, rows))
            return tensor
        if parsed.expert is None:
            return self._fused_oriented(name, tensor, (*experts, rows, columns))
        _check_shape(name, tensor, (rows, columns))
        return tensor

    def _fused_oriented(self, name: str, tensor: Tensor, shape: tuple[int, int, int]) -> Tensor:
        """A tensor of all experts, or its transposed view: [E, out, in], which is `shape`."""
        turned, declared = (shape[0], shape[2], shape[1]), self.config.layout.transposed
        if declared is None and turned == shape:
            raise LoadError(
                f"{name}: both orientations of {tuple(tensor.shape)} fit; declare "
                "MoEConfig(layout=CheckpointLayout(transposed=...))"
            )
        if declared or (declared is None and tuple(tensor.shape) == turned):
            _check_shape(name, tensor, turned, "declared transposed")
            return tensor.transpose(-1, -2)
        why = f"or {turned}" if declared is None else "declared as not transposed"
        _check_shape(name, tensor, shape, why)
        return tensor

    def _split(self, parsed: ExpertTensorName, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """The parts that a tensor holds, as views."""
        if not self.config.activation.is_gated():
            return [("w2" if parsed.part == "w2" else "w1", tensor)]
        if parsed.part != "w13":
            return [(parsed.part, tensor)]
        dim = -1 if parsed.is_bias else -2
        if self.config.layout.interleaved:
            gate_up = tensor.unflatten(dim, (-1, 2))
            inner = gate_up.dim() - 1 if parsed.is_bias else gate_up.dim() - 2
            return [("w1", gate_up.select(inner, 0)), ("w3", gate_up.select(inner, 1))]
        gate, up = tensor.chunk(2, dim=dim)
        return [("w1", gate), ("w3", up)]

    def _per_row(
        self, rows: dict[int, int], parsed: ExpertTensorName, source: Tensor
    ) -> Iterable[tuple[int, Tensor]]:
        for row, expert in rows.items():
            yield row, source if parsed.expert is not None else source[expert]

    def _write(self, parameter: str, row: int, part: str, source: Tensor) -> Write:
        """One part of one expert."""
        target = self._target(parameter, row, part)
        fitting = source if source.dim() == target.dim() else as_packed(source)
        return Write(target, fitting, (_slot(parameter, row, part),))

    def _target(self, parameter: str, row: int, part: str) -> Tensor:
        """The logical area of one part of one expert inside a parameter, packed where that is."""
        config = self.config
        whole = self.weights()[parameter].detach()
        target = whole[row]
        if is_packed(whole):
            if part == "w2":
                return target
            num_strips = config.intermediate_size // STRIP
            return target[num_strips:] if part == "w3" else target[:num_strips]
        if part == "w2":
            area = target[: config.hidden_size]
            return area if target.dim() == 1 else area[:, : config.intermediate_size]
        start = config.padded_intermediate_size() if part == "w3" else 0
        area = target[start : start + config.intermediate_size]
        return area if target.dim() == 1 else area[:, : config.hidden_size]

    @torch.no_grad()
    def zero_padding(self) -> None:
        """Zeros behind the logical sizes."""
        config = self.config
        hidden, intermediate = config.hidden_size, config.intermediate_size
        if (hidden, intermediate) == (
            config.padded_hidden_size(),
            config.padded_intermediate_size(),
        ):
            return
        for name, parameter in self.weights().items():
            if name.startswith("w2"):
                parameter[:, hidden:] = 0
            else:
                for part in parameter.split(config.padded_intermediate_size(), dim=1):
                    part[:, intermediate:] = 0
            if name.endswith("_weight"):
                parameter[..., intermediate if name.startswith("w2") else hidden :] = 0

    def is_packed(self) -> bool:
        """Whether a weight of the layer is packed."""
        return bool(self._packed())

    def refuses_packed(self) -> tuple[str, ...]:
        """Why the kernels read no packed weights of this layer, the backend's name in front."""
        reasons = reasons_against_packing(self._backend, self._spec())
        return tuple(f"backend {self._backend.name} {reason}" for reason in reasons)

    def unpack_weights(self) -> None:
        """Gives packed weights the checkpoint's layout again, see `cmoe.unpack_weights`."""
        for name in self._weight_names:
            if name not in self._parameters and is_packed(self.weights()[name]):
                raise UnsupportedError(
                    f"{name} was packed before a parametrization was registered on it; remove the "
                    "parametrization, unpack the weights, register it again"
                )
        for parameter in self._packed().values():
            lay_out(parameter, unpack)

    def _packed(self) -> dict[str, nn.Parameter]:
        """The parameters that are packed, by name: the tensors tell, nothing else does."""
        own = ((name, self._parameters.get(name)) for name in self._weight_names)
        return {name: p for name, p in own if p is not None and is_packed(p)}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """A state_dict has the checkpoint's layout; the parameters themselves stay as they are."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            for name, parameter in self._packed().items():
                destination[f"{prefix}{name}"] = unpack(parameter.detach())

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Packed parameters are given views of their own shape."""
        given = dict(state_dict)
        for name, parameter in self._packed().items():
            tensor, shape = given.get(f"{prefix}{name}"), unpacked_shape(parameter)
            if not isinstance(tensor, Tensor) or is_packed(tensor):
                continue
            if tensor.shape == shape:
                given[f"{prefix}{name}"] = as_packed(tensor.detach())
            else:
                given[f"{prefix}{name}"] = parameter
                found = tuple(tensor.shape)
                error_msgs.append(f"{prefix}{name}: shape {found} should be {shape}")
        super()._load_from_state_dict(
            given, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _settle(self) -> None:
        """What depends on where the parameters are: kernels, layout, expert map."""
        spec = self._spec()
        self._backend = choose_backend(spec, self.config.backend)
        self.kernels: Kernels = kernels_of(self._backend)
        self._fused_experts = self.kernels.fused_experts  # what another set later is told from
        self._settle_layout()
        table = self.placement.expert_map()
        self.expert_map = None if table is None else table.to(spec.device)

    def _settle_layout(self) -> None:
        """Weights stay packed where the kernels read them, contiguous, as `pack` makes them."""
        if not self.is_packed():
            return
        if self.refuses_packed():
            self.unpack_weights()
        for parameter in self._packed().values():
            if not parameter.is_contiguous():  # assigned from a view, put in another format
                lay_out(parameter, Tensor.contiguous)

    def _spec(self) -> LayerSpec:
        weight = self.w13_weight
        return LayerSpec(
            device=weight.device,
            dtype=weight.dtype,
            num_experts=weight.shape[0],
            top_k=self.config.top_k,
            hidden_size=self.config.padded_hidden_size(),
            intermediate_size=self.config.padded_intermediate_size(),
            activation=self.config.activation.name,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RoutedExperts:
        super()._apply(fn, recurse)
        self._settle()
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for chosen in ("_backend", "kernels", "_fused_experts"):
            del state[chosen]  # Anew where the copy lives.
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._settle()

    def extra_repr(self) -> str:
        """E, K, H, I, activation, whether the weights are packed."""
        c = self.config
        return (
            f"num_experts={c.num_experts}, top_k={c.top_k}, hidden_size={c.hidden_size}, "
            f"intermediate_size={c.intermediate_size}, activation={c.activation.name}"
            f"{', packed' if self.is_packed() else ''}"
        )


_APPLY = Unquantized.apply  # as it is written, before anybody sets another in its place


def _settle_loaded(experts: RoutedExperts, incompatible_keys: Any) -> None:
    """After load_state_dict(assign=True) the parameters are other tensors, maybe elsewhere."""
    experts._settle()


def _slot(parameter: str, row: int, part: str) -> str:
    return f"{parameter}[{row}]" if part == "w2" else f"{parameter}[{row}].{part}"


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], why: str = "") -> None:
    if tuple(tensor.shape) != expected:
        declared = f" ({why})" if why else ""
        raise LoadError(f"{name}: shape {tuple(tensor.shape)} should be {expected}{declared}")
