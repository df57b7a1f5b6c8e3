"""Every architecture from a folder: transformers' eager logits, memory that the load filled."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cmoe import LoadError, MoERunner
from cmoe.checkpoint import open_checkpoint, save_model
from cmoe.families import SWITCH_ONLY
from cmoe.integrations.transformers import from_pretrained
from tests.integrations.transformers.architectures import (
    ARCHITECTURES,
    VOCABULARY,
    output,
    tiny,
    tiny_whole_qwen3_vl_moe,
)
from tests.integrations.transformers.tiny_models import relative_error

# float32 rounding of two layers; the walk in test_architectures.py measures it family by family.
BUDGET = 1e-4


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_an_architecture_from_its_folder(architecture: str, tmp_path: Path) -> None:
    eager = tiny(architecture)
    eager.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    ids = torch.randint(0, VOCABULARY, (2, 5))
    assert relative_error(output(model, ids), output(eager, ids)) <= BUDGET
    assert bool(runners_of(model)) != (eager.config.model_type in SWITCH_ONLY)


STREAMED = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe", "aria")


@pytest.mark.parametrize("layout", ["original", "fused"])
@pytest.mark.parametrize("architecture", STREAMED)
@torch.no_grad()
def test_what_is_saved_again_loads_in_transformers(
    architecture: str, layout: str, tmp_path: Path
) -> None:
    eager = tiny(architecture)
    eager.save_pretrained(tmp_path / "theirs")
    checkpoint = open_checkpoint(tmp_path / "theirs")
    model = from_pretrained(tmp_path / "theirs")
    save_model(model, tmp_path / "ours", checkpoint, layout=layout, max_shard_bytes=20_000)
    again = type(eager).from_pretrained(tmp_path / "ours", experts_implementation="eager").eval()
    for name, tensor in eager.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    if layout == "original":
        theirs = load_file(tmp_path / "theirs" / "model.safetensors")
        for name, tensor in theirs.items():
            assert torch.equal(open_checkpoint(tmp_path / "ours").get(name), tensor), name


@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_a_family_with_files_of_both_orientations(transposed: bool, tmp_path: Path) -> None:
    """Qwen3-VL-MoE as the hub has it, as transformers saves a model that it did not load."""
    eager = tiny_whole_qwen3_vl_moe()
    eager.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    if transposed:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        save_file(tensors, path, metadata={"format": "pt"})
    model, ids = from_pretrained(tmp_path), torch.randint(0, VOCABULARY, (2, 5))
    assert relative_error(output(model, ids), output(eager, ids)) <= BUDGET
    for layout in ("original", "fused", "per_expert"):
        save_model(model, tmp_path / layout, open_checkpoint(tmp_path), layout=layout)
        again = from_pretrained(tmp_path / layout)
        assert relative_error(output(again, ids), output(eager, ids)) <= BUDGET


@torch.no_grad()
def test_tied_embeddings_and_kept_dtypes_are_transformers(tmp_path: Path) -> None:
    """gpt-oss keeps parts in float32; ernie ties its head to the embedding."""
    for architecture in ("deepseek_v3", "gpt_oss", "ernie4_5_moe"):
        folder = tmp_path / architecture
        tiny(architecture).to(torch.bfloat16).save_pretrained(folder)
        ours = from_pretrained(folder)
        theirs = type(ours).from_pretrained(folder)
        dtypes = {name: p.dtype for name, p in theirs.named_parameters()}
        assert {n: p.dtype for n, p in ours.state_dict(keep_vars=True).items() if n in dtypes} == (
            dtypes
        )
        tied = [model.lm_head.weight is model.model.embed_tokens.weight for model in (ours, theirs)]
        assert tied[0] == tied[1]


def without(part: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: t for name, t in tensors.items() if part not in name}


FAULTS = {
    "a projection too few": (
        without("experts.3.up"),
        r"missing model.layers.0.mlp.experts.3.up_proj.weight \(for ",
    ),
    "half of the layers": (
        without("layers.1."),
        r"missing model.layers.1.input_layernorm.weight, model.layers.1.mlp.ex",
    ),
    "a stranger": (
        lambda tensors: {**tensors, "model.layers.0.mlp.experts.0.q": torch.ones(1)},
        "no home for",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_incomplete(fault: str, tmp_path: Path) -> None:
    change, message = FAULTS[fault]
    tiny("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=message):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": None},
        {"architectures": 3},
        {"architectures": ["LlamaForCausalLM"]},
        {"dtype": "float99"},
        {"dtype": "int8"},
        {"hidden_size": "20"},
        {"hidden_size": 1 << 50},
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_type": "no such"}},
    ],
)
def test_a_config_that_makes_no_model(changes: dict[str, object], tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(
        LoadError, match=r"config\.json makes no model of transformers \(.*\); is it"
    ):
        from_pretrained(tmp_path)


def test_a_device_that_cannot_hold_weights(tmp_path: Path) -> None:
    tiny("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="the weights, so they need a device; got meta"):
        from_pretrained(tmp_path, device="meta")
    with pytest.raises((RuntimeError, AssertionError), match=r"(?i)device|compiled"):
        from_pretrained(tmp_path, device="cuda:99")


def test_a_folder_that_transformers_loads_is_as_strict(tmp_path: Path) -> None:
    tiny("deepseek_v4").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[next(name for name in tensors if "norm" in name)]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(LoadError, match="missing "):
        from_pretrained(tmp_path)


@torch.no_grad()
def test_a_correction_bias_that_the_config_leaves_out(tmp_path: Path) -> None:
    eager = tiny("lfm2_moe", use_expert_bias=False)
    eager.save_pretrained(tmp_path)
    model, ids = from_pretrained(tmp_path), torch.randint(0, VOCABULARY, (2, 5))
    assert all(module.router.correction_bias() is None for module in runners_of(model))
    assert relative_error(output(model, ids), output(eager, ids)) <= BUDGET


def runners_of(model: nn.Module) -> list[MoERunner]:
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def test_the_architecture_is_the_saved_one(tmp_path: Path) -> None:
    """Not the causal LM that its config would build."""
    eager = tiny("aria")
    eager.save_pretrained(tmp_path)
    assert type(from_pretrained(tmp_path)) is type(eager)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == [type(eager).__name__]
