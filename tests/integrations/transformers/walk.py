"""What the walk over all architectures measures on one of them, on cmoe in one of the two ways.

Each function builds its models anew from a seed, so that the tests and the table in the docs speak
of the same ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cmoe.families import SWITCH_ONLY, family_of
from cmoe.integrations.transformers.state_names import TransformersNames
from cmoe.runner import MoERunner
from tests.integrations.transformers.architectures import (
    ARCHITECTURES,
    VOCABULARY,
    model_class,
    output,
    tiny,
)
from tests.integrations.transformers.tiny_models import on_cmoe

SERVED = tuple(
    (architecture, way)
    for architecture in ARCHITECTURES
    for way in ("switch", "replace")
    if way == "switch" or model_class(architecture).config_class.model_type not in SWITCH_ONLY
)
"""Every architecture with the ways in which cmoe serves it."""


BRANCHES_ON_VALUES = ("qwen4_exp",)
"""The architectures of which transformers' own attention cannot be traced into one graph."""


def pair(architecture: str, way: str, **others: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(on transformers' eager experts, on cmoe), with the same weights."""
    torch.manual_seed(0)
    eager = tiny(architecture, **others)
    return eager, on_cmoe(copy.deepcopy(eager), way)


def token_ids(rows: int = 2, columns: int = 5) -> Tensor:
    """Random input ids [rows, columns]."""
    return torch.randint(0, VOCABULARY, (rows, columns))


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value; 0 where both are zero."""
    actual, expected = actual.detach().double(), expected.detach().double()
    largest = expected.abs().max()
    return (
        float((actual - expected).abs().max() / largest) if largest else float(actual.abs().max())
    )


@torch.no_grad()
def logits_error(architecture: str, way: str, *, compiled: bool = False) -> float:
    """Of the logits; compiled: the whole model is one graph, or where it cannot be each block."""
    eager, model = pair(architecture, way)
    ids = token_ids()
    if compiled:
        parts = experts_of(model) if architecture in BRANCHES_ON_VALUES else (model,)
        for part in parts:
            part.compile(fullgraph=True, backend="aot_eager")
    return difference(output(model, ids), output(eager, ids))


def experts_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """What cmoe computes in a model: runners, modules of transformers' experts interface."""
    every = model.modules()
    return tuple(m for m in every if isinstance(m, MoERunner) or hasattr(m, "_apply_gate"))


def gradients(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Of every parameter that gets one, under transformers' names, in its layout."""
    model.requires_grad_(True)
    output(model, ids).square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for path, module in model.named_modules():
        if isinstance(module, MoERunner):
            names = TransformersNames(family=family_of(model.config.model_type))
            names.to_transformers(grads, f"{path}.")
    return grads


def gradient_error(architecture: str, way: str) -> float:
    """The largest among the parameters, each over its own largest gradient."""
    eager, model = pair(architecture, way)
    ids = token_ids()
    return _worst(gradients(model, ids), gradients(eager, ids))


def rounding(architecture: str) -> tuple[float, float]:
    """What transformers' eager run itself loses to float64: of logits, of gradients."""
    eager = pair(architecture, "switch")[0]
    exact, ids = copy.deepcopy(eager).double(), token_ids()
    of_logits = difference(output(eager, ids), output(exact, ids))
    return of_logits, _worst(gradients(eager, ids), gradients(exact, ids))


def _worst(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert set(actual) == set(expected), set(actual) ^ set(expected)
    # What is a thousand times smaller than the largest of all is what cancelling terms leave.
    largest = torch.stack([grad.abs().max() for grad in expected.values()]).max()
    floor = 1e-3 * float(largest)
    errors = [
        (actual[name] - grad).abs().max() / grad.abs().max().clamp_min(floor)
        for name, grad in expected.items()
    ]
    return float(torch.stack(errors).max())  # NaN where one is NaN


@torch.no_grad()
def save_error(architecture: str, way: str, folder: Path) -> float:
    """Of the logits of transformers' eager run of what the model on cmoe saved, to its own."""
    eager, model = pair(architecture, way)
    return _reload_error(eager, model, folder, "eager")


@torch.no_grad()
def load_error(architecture: str, way: str, folder: Path) -> float:
    """Of the logits of cmoe's run of what transformers' eager model saved, to that one's.

    The way `replace`: into a model whose blocks are replaced already.
    """
    eager, model = pair(architecture, way)
    if way == "switch":
        return _reload_error(eager, eager, folder, "cmoe")
    eager.save_pretrained(folder)
    scramble(model)
    model.load_state_dict(type(eager).from_pretrained(folder).state_dict())
    ids = token_ids()
    return difference(output(model, ids), output(eager, ids))


def scramble(model: nn.Module) -> None:
    """Puts other values into everything that is saved."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor.data.fill_(7)


def _reload_error(
    eager: PreTrainedModel, saved: PreTrainedModel, folder: Path, implementation: str
) -> float:
    saved.save_pretrained(folder / "ours")
    eager.save_pretrained(folder / "theirs")
    ids = token_ids()
    ours, theirs = (
        type(eager).from_pretrained(folder / name, experts_implementation=how).eval()
        for name, how in (("ours", implementation), ("theirs", "eager"))
    )
    return difference(output(ours, ids), output(theirs, ids))
