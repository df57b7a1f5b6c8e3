"""Loading into layers, into whole models: all or nothing, in the storage that is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
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
from cmoe.custom_ops.packing import is_packed, unpack
from tests.layers import HIDDEN, NUM_EXPERTS, config_of, expert_tensors, layer_of, x_of
from tests.packable import packable_config, strips_backend

PREFIXES = ("", "mlp", "model.layers.0.mlp", "mtp.0.model.layers.3.mlp")


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


def turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Transposed, gate and up columns alternating."""
    gate, up = tensors["gate_up_proj"].chunk(2, dim=1)
    both = torch.stack([gate, up], dim=2).flatten(1, 2)
    return {"gate_up_proj": both.mT.contiguous(), "down_proj": tensors["down_proj"].mT.contiguous()}


def laid_out(layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The block's experts under each of the names that they have in checkpoints."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    stacked = {
        name: torch.stack(
            [tensors[f"experts.{expert}.{name}.weight"] for expert in range(NUM_EXPERTS)]
        )
        for name in names
    }
    fused = {
        "gate_up_proj": torch.cat([stacked["gate_proj"], stacked["up_proj"]], 1),
        "down_proj": stacked["down_proj"],
    }
    others = {name: tensor for name, tensor in tensors.items() if "experts." not in name}
    if layout == "numbered":
        return others | {
            f"experts.{expert}.{names[name]}.weight": tensors[f"experts.{expert}.{name}.weight"]
            for expert in range(NUM_EXPERTS)
            for name in names
        }
    if layout == "native":
        native = {"w13_weight": fused["gate_up_proj"], "w2_weight": fused["down_proj"]}
        return others | {f"routed_experts.{name}": tensor for name, tensor in native.items()}
    if layout in ("fused", "turned", "fused, with an ending"):
        ending = ".weight" if "ending" in layout else ""
        fused = turned(fused) if layout == "turned" else fused
        return others | {f"experts.{name}{ending}": tensor for name, tensor in fused.items()}
    return tensors


LAYOUTS = ("per expert", "numbered", "fused", "fused, with an ending", "turned", "native")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_layer_at_any_depth(prefix: str, layout: str, tmp_path: Path) -> None:
    start = f"{prefix}." if prefix else ""
    original = {n.removeprefix("mlp."): t for n, t in block("mlp").items()}
    tensors = {f"{start}{name}": t for name, t in laid_out(layout, original).items()}
    others = {f"{prefix}2.other.weight": torch.ones(1)} if prefix else {}
    checkpoint = saved(tmp_path, {**tensors, **others})
    declared = cmoe.CheckpointLayout(transposed=layout == "turned", interleaved=layout == "turned")
    gate = cmoe.GateLinear(HIDDEN, NUM_EXPERTS)
    runner = layer_of(config_of(layout=declared), gate=gate)
    nan_filled(runner)
    pointers = [p.data_ptr() for p in runner.parameters()]
    report = load_layer(runner, checkpoint, prefix)
    assert sorted(report.keys_used) == sorted(tensors)
    assert not report.slots_unwritten
    assert [p.data_ptr() for p in runner.parameters()] == pointers
    expected = runner_of("expected")
    expected.load_weights(original)
    x = x_of(7)
    assert torch.equal(runner(x), expected(x))


# Layouts of the field that need a format of their own, or a merge: named, never passed over.
FOREIGN = (
    *("experts.gate_up_proj_blocks", "experts.gate_up_proj_scales", "experts.down_proj_bias"),
    *("experts.0.gate_proj.weight_scale_inv", "experts.0.up_proj.qweight"),
    *("experts.0.up_proj.scales", "experts.0.up_proj.qzeros", "experts.0.w1.weight_scale"),
    *("experts.base_layer.lora_A.weight", "experts.lora_B.weight", "experts.fc1.weight"),
    *("input_linear.weight", "output_linear.weight", "experts.0.norm.weight"),
)


@pytest.mark.parametrize("name", FOREIGN)
def test_an_expert_tensor_without_a_home_is_named(name: str, tmp_path: Path) -> None:
    tensors = {**block("mlp"), f"mlp.{name}": torch.ones(4)}
    checkpoint, runner = saved(tmp_path, tensors), runner_of()
    model = nn.ModuleDict({"mlp": runner})
    for load in (
        lambda: load_layer(runner, checkpoint, "mlp"),
        lambda: load_model(model, checkpoint),
        lambda: runner.load_weights(tensors),
        lambda: runner.load_weights(iter(tensors.items())),
    ):
        with pytest.raises(LoadError, match=rf"no home for mlp\.{re.escape(name)}"):
            load()


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
    "missing": (
        {},
        ("mlp.experts.3.up_proj.weight",),
        r"missing mlp.experts.3.up_proj.weight \(for w13_weight\[3\].w3\)",
    ),
    "no gate": ({}, ("mlp.gate.weight",), r"missing mlp.gate.weight \(for gate.weight\)"),
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


@pytest.mark.parametrize("model_type", [None, [], {"a": 1}, 7, "x" * 1000])
def test_a_model_type_that_is_none(model_type: Any, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, block("mlp"), model_type)
    with pytest.raises(LoadError, match=r"model_type .* is no family's name"):
        load_layer(runner_of(), checkpoint, "mlp")


def test_the_family_that_the_tensors_look_like(tmp_path: Path) -> None:
    tensors = {**block("mlp"), "mlp.e_score_correction_bias": torch.ones(NUM_EXPERTS)}
    checkpoint = saved(tmp_path, tensors)
    message = r"no home for mlp\.e_score_correction_bias; config\.json says qwen3_moe, the tensors"
    with pytest.raises(LoadError, match=message) as raised:
        load_layer(runner_of(), checkpoint, "mlp")
    assert "minimax_m2" in str(raised.value)
    with pytest.raises(LoadError, match="the tensors look like"):
        load_model(nn.ModuleDict({"mlp": runner_of("whole")}), checkpoint)


@pytest.mark.parametrize("model_type", ["llama", ""])
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
    "missing": ({}, ("layers.1.norm.bias",), "missing layers.1.norm.bias"),
    "tied, both gone": ({}, ("embed.weight",), "missing embed.weight, head.weight"),
    "in a block": (
        {},
        ("layers.1.mlp.experts.2.down_proj.weight",),
        r"missing layers.1.mlp.experts.2.down_proj.weight \(for layers.1.mlp.w2_weight\[2\]\)",
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


def test_two_names_of_one_tensor(tmp_path: Path) -> None:
    """Neither may be dropped unsaid."""
    tensors = {f"layers.0.{name}": t for name, t in block("mlp").items()}
    twice = "layers.0.block_sparse_moe.gate.weight"
    tensors[twice] = torch.ones(NUM_EXPERTS, HIDDEN)
    checkpoint = saved(tmp_path, tensors, "mixtral")
    message = r"gate\.weight is layers\.0\..*gate\.weight under another name"
    with pytest.raises(LoadError, match=message):
        load_layer(runner_of(), checkpoint, "layers.0.mlp")
    with pytest.raises(LoadError, match=message):
        load_model(Model(), checkpoint)


def test_what_is_neither_a_layer_nor_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, model_tensors())
    with pytest.raises(ValueError, match="load_layer fills a MoERunner, got a Linear; load_model"):
        load_layer(nn.Linear(1, 1), checkpoint, "layers.1.mlp")
    for load in (
        lambda: load_model(Model(), str(tmp_path)),
        lambda: load_layer(runner_of(), 3, ""),
    ):
        with pytest.raises(
            ValueError, match=r"a checkpoint is what open_checkpoint\(folder\) gives"
        ):
            load()


def test_a_model_that_is_a_layer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one layer itself; load it with load_layer"):
        load_model(runner_of(), saved(tmp_path, block("mlp")))


def test_what_is_ignored_needs_no_home(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, {**model_tensors(), "layers.61.mlp.x": torch.ones(1)})
    load_model(Model(), checkpoint, ignore=[r"layers\.61\."])


def test_a_model_on_meta_has_nowhere_to_write(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(LoadError, match="on the meta device; give the model storage"):
        load_model(model, saved(tmp_path, model_tensors()))


# --- packed weights -------------------------------------------------------------------------------


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.ModuleDict]:
    """A model of two packed layers; to unpack a whole weight is an error."""

    def forbidden(weight: Tensor) -> Tensor:
        raise AssertionError("a whole weight was unpacked")

    with strips_backend():
        model = packable_model()
        cmoe.pack_weights(model)
        with monkeypatch.context() as patch:
            patch.setattr("cmoe.routed_experts.unpack", forbidden)
            yield model


def packable_model() -> nn.ModuleDict:
    config = packable_config(layout=cmoe.CheckpointLayout(transposed=False), has_bias=True)
    with cmoe.static_context():
        layers = [layer_of(config, f"{n}.mlp", gate=cmoe.GateLinear(64, 5)) for n in range(2)]
    return nn.ModuleDict({str(n): nn.ModuleDict({"mlp": mlp}) for n, mlp in enumerate(layers)})


def packable_tensors() -> dict[str, Tensor]:
    return {
        f"{layer}.mlp.{name}": tensor
        for layer in range(2)
        for name, tensor in {
            **expert_tensors(packable_config(has_bias=True)),
            "gate.weight": torch.randn(NUM_EXPERTS, 64),
        }.items()
    }


def unpacked(model: nn.Module) -> dict[str, Tensor]:
    """Its state_dict, in which the fixture forbids nothing."""
    copied = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {n: unpack(tensor) if is_packed(tensor) else tensor for n, tensor in copied.items()}


@pytest.mark.parametrize("how", ["layers", "model"])
def test_packed_layers_are_loaded_as_they_are(
    how: str, packed: nn.ModuleDict, tmp_path: Path
) -> None:
    tensors = packable_tensors()
    checkpoint, plain = saved(tmp_path, tensors), packable_model()
    load_model(plain, checkpoint)
    pointers = {name: p.data_ptr() for name, p in packed.named_parameters()}
    nan_filled(packed)
    if how == "model":
        report = load_model(packed, checkpoint)
        assert sorted(report.keys_used) == sorted(tensors)
    else:
        for layer in packed:
            load_layer(packed[layer]["mlp"], checkpoint, f"{layer}.mlp")
    assert {name: p.data_ptr() for name, p in packed.named_parameters()} == pointers
    assert packed["1"]["mlp"].routed_experts.is_packed()
    for name, tensor in unpacked(packed).items():
        assert torch.equal(tensor, plain.state_dict()[name]), name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1.mlp.experts.2.up_proj.weight", r"shape \(3, 3\) should be \(32, 64\)"),
        ("1.mlp.experts.w2_weight", r"shape \(3, 3\) should be \(5, 64, 32\)"),
        ("1.mlp.more.weight", r"no home for 1\.mlp\.more\.weight"),
    ],
)
def test_a_fault_leaves_packed_layers_as_they_were(
    name: str, message: str, packed: nn.ModuleDict, tmp_path: Path
) -> None:
    before = {name: p.clone() for name, p in packed.named_parameters()}
    checkpoint = saved(tmp_path, {**packable_tensors(), name: torch.ones(3, 3)})
    with pytest.raises(LoadError, match=message):
        load_model(packed, checkpoint)
    for name, parameter in packed.named_parameters():
        assert torch.equal(parameter, before[name])
