"""Every experts class of the installed transformers: what runs in one kernel, what by stages.

The classes are found in its sources, so that one that is new fails here until it either runs in one
kernel or has its reason in STAGED.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import MixtralConfig, PreTrainedConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from cmoe.integrations.transformers.fused_form import GATES, FusedForm, fused_form
from tests.integrations.transformers.tiny_models import fill, relative_error

E, K, H, I = 7, 3, 20, 11  # noqa: E741 - the shape vocabulary

# What configs call the sizes.
SIZES: Mapping[str, int] = {
    "hidden_size": H,
    "moe_hidden_size": H,
    "intermediate_size": I,
    "moe_intermediate_size": I,
    "num_experts": E,
    "num_local_experts": E,
    "n_routed_experts": E,
    "moe_num_experts": E,
}
STAGED: Mapping[str, str] = {
    "Inkling2Experts": "its _apply_gate is not in the table",  # softcaps gate and up by tanh
    "Inkling2LoopExperts": "its _apply_gate is not in the table",
    "MuseSparkExperts": "it normalises each expert's output",
}


def found() -> Iterator[tuple[str, str]]:
    """(module, class) of every class under the decorator."""
    folder = Path(transformers.__file__).parent / "models"
    for path in sorted(folder.glob("*/modeling_*.py")):
        source = path.read_text("utf-8")
        if "use_experts_implementation" not in source:
            continue
        for node in ast.parse(source).body:
            decorators = getattr(node, "decorator_list", [])
            if any("use_experts_implementation" in ast.unparse(d) for d in decorators):
                yield f"transformers.models.{path.parent.name}.{path.stem}", node.name


FOUND = list(found())


def make(module: ModuleType, name: str) -> nn.Module:
    """The class with its own config, at small sizes; of several configs the first that serves."""
    tried = []
    for config_class in filter(inspect.isclass, vars(module).values()):
        if not issubclass(config_class, PreTrainedConfig):
            continue
        try:
            config = small(config_class)
            with torch.device("meta"):
                shape = getattr(module, name)(config).down_proj.shape
        except Exception as error:  # what a config lacks shows in many ways
            tried.append(f"{config_class.__name__}: {error}")
            continue
        if sorted(shape) == sorted((E, H, I)):
            return fill(getattr(module, name)(config).eval())
        tried.append(f"{config_class.__name__}: down_proj {tuple(shape)}")
    raise AssertionError(f"{name} cannot be built small: {tried}")


def small(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    config = config_class()
    for key, size in SIZES.items():
        if hasattr(config, key):
            # Past the config's own checks, which may want other sizes to fit.
            object.__setattr__(config, key, size)
    return config


def run(experts: nn.Module, implementation: str, *args: Tensor) -> Tensor:
    experts.config._experts_implementation = implementation
    return experts(*args)


def test_the_walk_finds_the_families() -> None:
    assert len(FOUND) >= 60
    assert {"MixtralExperts", "GptOssExperts"} <= {name for _, name in FOUND}


@pytest.mark.parametrize(("module", "name"), FOUND, ids=[name for _, name in FOUND])
def test_every_class_gives_what_its_own_eager_gives(module: str, name: str) -> None:
    experts = make(importlib.import_module(module), name)
    form = fused_form(experts)
    assert form == STAGED[name] if name in STAGED else isinstance(form, FusedForm)
    x = torch.randn(13, H)
    ids = torch.rand(13, E).topk(K).indices
    scores = torch.rand(13, K)
    inputs, grads, outputs = [x, scores], [], []
    for implementation in ("eager", "cmoe"):
        leaves = [t.clone().requires_grad_() for t in inputs]
        experts.zero_grad()
        y = run(experts, implementation, leaves[0], ids, leaves[1])
        y.square().sum().backward()
        outputs.append(y)
        grads.append([t.grad for t in (*leaves, *experts.parameters())])
    assert relative_error(outputs[1], outputs[0]) <= 1e-5
    for ours, theirs in zip(grads[1], grads[0], strict=True):
        assert relative_error(ours, theirs) <= 1e-5


def test_every_gate_in_the_table_exists() -> None:
    assert set(GATES) <= {f"{module}.{name}" for module, name in FOUND}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_post_expert_norm": True}, "it normalises each expert's output"),
        ({"act_fn": nn.Tanh()}, "its activation Tanh is not in the table"),
        ({"act_fn": nn.Tanh(), "has_gate": False}, "its activation Tanh is not in the table"),
        ({"_apply_gate": torch.tanh}, "its _apply_gate is not in the table"),
    ],
)
def test_what_the_table_does_not_tell_has_a_reason(change: dict[str, object], reason: str) -> None:
    experts = MixtralExperts(MixtralConfig(hidden_size=H, intermediate_size=I))
    assert fused_form(experts) == FusedForm("silu")
    for name, value in change.items():
        setattr(experts, name, value)
    assert fused_form(experts) == reason
