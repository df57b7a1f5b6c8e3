"""The state_dict of a replaced block, in the names of the block that it stands for."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cmoe.custom_ops.packing import is_packed, unpack
from cmoe.families import Family
from cmoe.integrations.transformers.take_over import to_runner, to_transformers
from cmoe.routed_experts import RoutedExperts
from cmoe.runner import MoERunner

_EXPERTS = "routed_experts."
_BIAS = "router.e_score_correction_bias"


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersNames:
    """Makes `state_dict`, `load_state_dict` of a runner speak as transformers' own block does.

    So `save_pretrained` writes what `from_pretrained` reads. Tensors are views of the runner's,
    except where gate and up rows alternate in transformers, or weights are packed: these are
    copies.
    bias_shape, bias_dtype: the correction bias as the block had it.
    """

    family: Family
    bias_shape: tuple[int, ...] = ()
    bias_dtype: torch.dtype = torch.float32

    def attach(self, runner: MoERunner) -> None:
        """The runner's state speaks so from now on; copies of the runner do too."""
        # No submodule: what it names has its place in the runner already.
        runner.__dict__["experts"] = _Experts(self.family, runner.routed_experts)
        runner.register_state_dict_post_hook(functools.partial(_after_state_dict, self))
        runner.register_load_state_dict_pre_hook(functools.partial(_before_loading, self))

    def to_transformers(self, state: dict[str, Tensor], prefix: str) -> None:
        """Renames, in place, what state has under the prefix."""
        for ours, tensor in [item for item in state.items() if item[0].startswith(prefix)]:
            name = ours.removeprefix(prefix)
            for their_part, our_part in self.family.runner_names():
                if _fits(name, our_part):
                    del state[ours]
                    theirs = f"{prefix}{their_part}{name.removeprefix(our_part)}"
                    state[theirs] = self._as_theirs(name, tensor)
                    break

    def to_runner(self, state: dict[str, Tensor], prefix: str) -> None:
        """The inverse of to_transformers; what has a runner's names already stays as it is."""
        for theirs, tensor in [item for item in state.items() if item[0].startswith(prefix)]:
            name = theirs.removeprefix(prefix)
            for their_part, our_part in self.family.runner_names():
                if _fits(name, their_part):
                    del state[theirs]
                    ours = f"{our_part}{name.removeprefix(their_part)}"
                    state[f"{prefix}{ours}"] = self._as_ours(ours, tensor)
                    break

    def _as_theirs(self, name: str, tensor: Tensor) -> Tensor:
        if name == _BIAS:
            return tensor.to(self.bias_dtype).view(self.bias_shape)
        if name.startswith(_EXPERTS):
            if is_packed(tensor):  # the parameter itself, asked for by keep_vars
                return tensor
            return to_transformers(self.family.layout, name.removeprefix(_EXPERTS), tensor)
        return tensor

    def _as_ours(self, name: str, tensor: Tensor) -> Tensor:
        if name == _BIAS:
            return tensor.to(torch.float32).flatten()
        if name.startswith(_EXPERTS):
            if is_packed(tensor):
                return tensor
            return to_runner(self.family.layout, name.removeprefix(_EXPERTS), tensor)
        return tensor


class _Experts(nn.Module):
    """Where `model.get_parameter` finds the experts' tensors by transformers' names.

    Its converters ask so for the shapes of what they are about to save.
    """

    def __init__(self, family: Family, routed_experts: RoutedExperts) -> None:
        super().__init__()
        self.family = family
        self.routed_experts = routed_experts

    def __getattr__(self, name: str) -> Any:
        family: Any = self.__dict__.get("family")  # None while a copy is being built
        for theirs, ours in () if family is None else family.runner_names():
            if theirs == f"experts.{name}":
                parameter = ours.removeprefix(_EXPERTS)
                tensor = self.routed_experts.get_parameter(parameter).detach()
                tensor = unpack(tensor) if is_packed(tensor) else tensor
                as_theirs = to_transformers(family.layout, parameter, tensor)
                return nn.Parameter(as_theirs, requires_grad=False)
        return super().__getattr__(name)


def _after_state_dict(
    names: TransformersNames, runner: Any, state: dict[str, Tensor], prefix: str, metadata: Any
) -> None:
    names.to_transformers(state, prefix)


def _before_loading(
    names: TransformersNames, runner: Any, state: dict[str, Tensor], prefix: str, *rest: Any
) -> None:
    names.to_runner(state, prefix)


def _fits(name: str, part: str) -> bool:
    return name.startswith(part) if part.endswith(".") else name == part
