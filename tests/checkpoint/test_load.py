"""Loading into layers, into whole models: all or nothing, in the storage that is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import cmoe
from cmoe import LoadError
from cmoe.checkpoint.folder import Checkpoint, open_checkpoint
from cmoe.checkpoint.load import load_layer, load_model
from tests.layers import HIDDEN, NUM_EXPERTS, config_of, expert_tensors, layer_of, x_of

PREFIXES = ("mlp", "model.layers.0.mlp", "mtp.0.model.layers.3.mlp")


def saved(
    folder: Path, tensors: dict[str, Tensor], model_type: str = "qwen3_moe", **config: Any
) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def block(prefix: str, seed: int = 0) -> dict[str, Tensor]:
    """A block's checkpoint: experts, gate."""
    torch.manual_seed(seed)
    tensors = {**expert_tensors(config_of()), "gate.weight": torch.randn(NUM_EXPERTS, HIDDEN)}
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def runner_of(prefix: str = "mlp") -> cmoe.MoERunner:
    config = config_of(layout=cmoe.CheckpointLayout(transposed=False))
    return layer_of(config, prefix, gate=cmoe.GateLinear(HIDDEN, NUM_EXPERTS))


def nan_filled(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.fill_(torch.nan)


def bits(module: nn.Module) -> dict[str, list[int]]:
    return {n: t.flatten().view(torch.int32).tolist() for n, t in module.state_dict().items()}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_layer_at_any_depth(prefix: str, tmp_path: Path) -> None:
    tensors = block(prefix)
    checkpoint = saved(tmp_path, {**tensors, f"{prefix}2.other.weight": torch.ones(1)})
    runner = runner_of()
    nan_filled(runner)
    pointers = [p.data_ptr() for p in runner.parameters()]
    report = load_layer(runner, checkpoint, prefix)
    assert sorted(report.keys_used) == sorted(tensors)
    assert not report.slots_unwritten
    assert [p.data_ptr() for p in runner.parameters()] == pointers
    expected = runner_of("expected")
    expected.load_weights({n.removeprefix(f"{prefix}."): t for n, t in tensors.items()})
    x = x_of(7)
    assert torch.equal(runner(x), expected(x))


def test_loading_again_gives_the_other_weights(tmp_path: Path) -> None:
    runner, x = runner_of(), x_of(7)
    outputs = []
    for name in ("a", "b", "a"):
        (tmp_path / name).mkdir(exist_ok=True)
        checkpoint = saved(tmp_path / name, block("mlp", seed=ord(name)))
        load_layer(runner, checkpoint, "mlp")
        outputs.append(runner(x))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


FAULTS = {
    "no home": ({"mlp.experts.0.norm.weight": torch.ones(2)}, (), "no home for mlp.experts.0.norm"),
    "missing": ({}, ("mlp.experts.3.up_proj.weight",), r"nothing for w13_weight\[3\].w3"),
    "no gate": ({}, ("mlp.gate.weight",), "nothing for gate.weight"),
    "shape": ({"mlp.experts.1.up_proj.weight": torch.ones(3, 3)}, (), r"shape \(3, 3\) should be"),
    "gate's shape": ({"mlp.gate.weight": torch.ones(3, 3)}, (), r"shape \(3, 3\) should be"),
    "integers": (
        {"mlp.experts.1.up_proj.weight": torch.ones(8, 16, dtype=torch.int8)},
        (),
        "has dtype torch.int8; its place has torch.float32; it takes float dtypes of 16 bits",
    ),
    "float8 without its scale": (
        {"mlp.experts.1.up_proj.weight": torch.ones(8, 16).to(torch.float8_e4m3fn)},
        (),
        "has dtype torch.float8_e4m3fn; its place has torch.float32; it takes float dtypes of 16",
    ),
    "expert": ({"mlp.experts.9.up_proj.weight": torch.ones(8, 16)}, (), "this layer has 5 experts"),
    "twice": ({"mlp.experts.1.w1.weight": torch.ones(8, 16)}, (), "is filled by"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_leaves_a_layer_as_it_was(fault: str, tmp_path: Path) -> None:
    added, removed, message = FAULTS[fault]
    tensors = {n: t for n, t in {**block("mlp"), **added}.items() if n not in removed}
    checkpoint = saved(tmp_path, tensors)
    runner = runner_of()
    before = bits(runner)
    with pytest.raises(LoadError, match=message):
        load_layer(runner, checkpoint, "mlp")
    assert bits(runner) == before


def test_not_strict_reports_instead(tmp_path: Path) -> None:
    tensors = {**block("mlp"), "mlp.extra": torch.ones(1)}
    del tensors["mlp.gate.weight"]
    report = load_layer(runner_of(), saved(tmp_path, tensors), "mlp", strict=False)
    assert report.keys_without_home == ("mlp.extra",)
    assert report.slots_unwritten == ("gate.weight",)


def test_a_prefix_that_is_not_there(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, block("model.layers.0.mlp"))
    message = r"no tensor under 'mlp'; it has experts under 'model.layers.0.mlp'"
    with pytest.raises(LoadError, match=message):
        load_layer(runner_of(), checkpoint, "mlp")


@pytest.mark.parametrize("model_type", ["llama", "", None])
def test_a_checkpoint_of_another_family(model_type: Any, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, block("mlp"), model_type)
    message = rf"model_type {model_type!r} is not in the table.*known: qwen3_moe, mixtral"
    with pytest.raises(LoadError, match=message):
        load_layer(runner_of(), checkpoint, "mlp")
    with pytest.raises(LoadError, match=message):
        load_model(nn.Sequential(), checkpoint)


class Model(nn.Module):
    """Two blocks between an embedding and a head that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, HIDDEN)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": runner_of(f"layers.{layer}.mlp"), "norm": nn.LayerNorm(HIDDEN)})
            for layer in range(2)
        )
        self.head = nn.Linear(HIDDEN, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(0))


def model_tensors() -> dict[str, Tensor]:
    tensors = {"embed.weight": torch.randn(11, HIDDEN), "steps": torch.tensor(5)}
    for layer in range(2):
        tensors |= block(f"layers.{layer}.mlp", seed=layer)
        tensors[f"layers.{layer}.norm.weight"] = torch.randn(HIDDEN)
        tensors[f"layers.{layer}.norm.bias"] = torch.randn(HIDDEN)
    return tensors


def test_a_whole_model(tmp_path: Path) -> None:
    tensors = model_tensors()
    model = Model()
    nan_filled(model)
    report = load_model(model, saved(tmp_path, tensors))
    assert sorted(report.keys_used) == sorted(tensors)
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert torch.equal(model.head.weight, tensors["embed.weight"])
    assert torch.equal(model.layers[1].norm.bias, tensors["layers.1.norm.bias"])
    assert int(model.steps) == 5
    w1 = model.layers[1].mlp.routed_experts.w13_weight[3, :8]
    assert torch.equal(w1, tensors["layers.1.mlp.experts.3.gate_proj.weight"])


def test_the_names_of_a_family_are_translated(tmp_path: Path) -> None:
    tensors = {
        name.replace(".mlp.", ".block_sparse_moe."): tensor
        for name, tensor in model_tensors().items()
    }
    load_model(Model(), saved(tmp_path, tensors, "mixtral"))


MODEL_FAULTS = {
    "no home": ({"layers.2.norm.bias": torch.ones(1)}, (), "no home for layers.2.norm.bias"),
    "missing": ({}, ("layers.1.norm.bias",), "nothing for layers.1.norm.bias"),
    "tied, both gone": ({}, ("embed.weight",), "nothing for embed.weight, head.weight"),
    "in a block": (
        {},
        ("layers.1.mlp.experts.2.down_proj.weight",),
        r"nothing for layers.1.mlp.w2_weight\[2\]",
    ),
    "shape": ({"embed.weight": torch.ones(3, 3)}, (), r"embed.weight: shape \(3, 3\) should be"),
    "floats for integers": (
        {"steps": torch.tensor(1.5)},
        (),
        "steps has dtype torch.float32; its place has torch.int64",
    ),
    "integers": ({"layers.0.norm.bias": torch.ones(HIDDEN).int()}, (), "dtype torch.int32"),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_a_fault_leaves_a_model_as_it_was(fault: str, tmp_path: Path) -> None:
    added, removed, message = MODEL_FAULTS[fault]
    tensors = {n: t for n, t in {**model_tensors(), **added}.items() if n not in removed}
    model = Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(LoadError, match=message):
        load_model(model, saved(tmp_path, tensors))
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_is_ignored_needs_no_home(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {**model_tensors(), "layers.61.mlp.x": torch.ones(1)})
    load_model(Model(), checkpoint, ignore=[r"layers\.61\."])


def test_a_model_on_meta_has_nowhere_to_write(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(LoadError, match="on the meta device; give the model storage"):
        load_model(model, saved(tmp_path, model_tensors()))
