"""The sparse blocks of a transformers model that the table has a row for."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from cmoe.families import FAMILIES, Family


class Block(NamedTuple):
    """A sparse block in a model."""

    path: str
    module: Any
    family: Family
    hf_config: Any  # of the innermost PreTrainedModel around the block

    def part(self, name: str | None) -> Any:
        """The block's module under the dotted name; None where it has none."""
        module = self.module if name else None
        for step in (name or "").split("."):
            module = None if module is None else module._modules.get(step)
        return module

    def as_built(self) -> nn.Module:
        """The block that its class makes of the config, on the meta device."""
        cls, arguments = type(self.module), {}
        if "layer_idx" in inspect.signature(cls).parameters:
            arguments["layer_idx"] = int(re.findall(r"\d+", self.path)[-1])
        with torch.device("meta"):
            return cls(self.hf_config, **arguments)


def find_blocks(model: nn.Module) -> Iterator[Block]:
    """The blocks of the table, each with the config of the innermost model around it."""
    configs = {
        path: module.config
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    rows = {(family.model_type, family.block): family for family in FAMILIES}
    for path, module in model.named_modules():
        around = max(
            (p for p in configs if f"{path}.".startswith(f"{p}." if p else "")), default=None
        )
        if around is None or not type(module).__module__.startswith("transformers.models."):
            continue
        family = rows.get((configs[around].model_type, type(module).__name__))
        if family is not None:
            yield Block(path, module, family, configs[around])
