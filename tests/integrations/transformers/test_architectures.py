"""Every architecture with experts on cmoe, both ways, beside transformers' own eager run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CompileConfig

import cmoe
from cmoe.checkpoint import load_layer, open_checkpoint
from cmoe.config import MoEConfig
from cmoe.families import FAMILIES, SWITCH_ONLY
from cmoe.integrations.transformers import replace_moe
from cmoe.integrations.transformers.blocks import find_blocks
from cmoe.runner import MoERunner
from tests.integrations.transformers import test_fused_form, walk
from tests.integrations.transformers.architectures import ARCHITECTURES, LAYERS, model_class, tiny
from tests.integrations.transformers.walk import SERVED

every = pytest.mark.parametrize("architecture", ARCHITECTURES)
served = pytest.mark.parametrize(("architecture", "way"), SERVED)

# In float32, with sums in another order. Where a model amplifies rounding, its eager run has lost
# as much: to that loss cmoe may add its own, and a rounding step.
BUDGET = 1e-5
LOSSES = 3

# Found in the parts of a model that do not take token ids.
OTHERWISE_REACHED = ("dots3_note_vision_encoder",)


def test_the_walk_finds_the_architectures() -> None:
    assert len(ARCHITECTURES) >= 60
    assert {"mixtral", "gpt_oss", "qwen3_omni_moe"} <= set(ARCHITECTURES)


@every
def test_an_architecture_has_a_row_or_a_reason(architecture: str) -> None:
    model = tiny(architecture)
    reason = SWITCH_ONLY.get(model.config.model_type)
    if reason is None:
        assert len(list(find_blocks(model))) == LAYERS
    else:
        with pytest.raises(cmoe.UnsupportedError) as raised:
            replace_moe(model)
        assert reason in str(raised.value)


def test_the_walk_reaches_every_row_with_every_experts_class() -> None:
    models = [tiny(name) for name in ARCHITECTURES]
    reached = {model.config.model_type for model in models}
    known = {*SWITCH_ONLY, *(family.model_type for family in FAMILIES)}
    assert reached | set(OTHERWISE_REACHED) == known
    classes = {type(module).__name__ for model in models for module in model.modules()}
    assert {name for _, name in test_fused_form.FOUND} <= classes


@served
def test_logits_are_eagers(architecture: str, way: str) -> None:
    error = walk.logits_error(architecture, way)
    assert error <= BUDGET or error <= LOSSES * walk.rounding(architecture)[0]


@served
def test_the_whole_model_compiles(architecture: str, way: str) -> None:
    error = walk.logits_error(architecture, way, compiled=True)
    assert error <= BUDGET or error <= LOSSES * walk.rounding(architecture)[0]


@pytest.mark.parametrize(
    ("architecture", "way"), [served for served in SERVED if model_class(served[0]).can_generate()]
)
@torch.no_grad()
def test_greedy_tokens_are_eagers(architecture: str, way: str) -> None:
    eager, model = walk.pair(architecture, way)
    ids = walk.token_ids()
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **options), eager.generate(ids, **options))


@served
def test_gradients_are_eagers(architecture: str, way: str) -> None:
    error = walk.gradient_error(architecture, way)
    assert error <= BUDGET or error <= LOSSES * walk.rounding(architecture)[1]


@served
def test_what_is_saved_loads_in_transformers(architecture: str, way: str, tmp_path: Path) -> None:
    assert walk.save_error(architecture, way, tmp_path) == 0
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert set(ours) == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype
        assert torch.equal(ours[name], tensor), name


@served
def test_what_transformers_saved_loads(architecture: str, way: str, tmp_path: Path) -> None:
    error = walk.load_error(architecture, way, tmp_path)
    assert error <= BUDGET or error <= LOSSES * walk.rounding(architecture)[0]


REPLACED = [architecture for architecture, way in SERVED if way == "replace"]
replaced = pytest.mark.parametrize("architecture", REPLACED)


@replaced
def test_a_saved_config_describes_the_layer(architecture: str, tmp_path: Path) -> None:
    config = tiny(architecture).config
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert MoEConfig.from_hf(saved) == MoEConfig.from_hf(config)


# Its files name a block's tensors beside those of the layer, under no name of their own.
WITHOUT_A_NAME_IN_FILES = ("mistral_large4",)


@pytest.mark.parametrize(
    "architecture",
    [a for a in REPLACED if a not in WITHOUT_A_NAME_IN_FILES],
)
@torch.no_grad()
def test_runners_load_the_names_of_checkpoints(architecture: str, tmp_path: Path) -> None:
    """By the row alone, without transformers' own conversions."""
    eager, model = walk.pair(architecture, "replace")
    eager.save_pretrained(tmp_path)
    walk.scramble(model)
    checkpoint = open_checkpoint(tmp_path)
    for name, runner in model.named_modules():
        if isinstance(runner, MoERunner):
            load_layer(runner, checkpoint, name)
    for path, tensor in eager.state_dict().items():
        if any(path.startswith(f"{block.path}.") for block in find_blocks(eager)):
            assert torch.equal(model.state_dict()[path], tensor), path


# One of each routing formula, of each layout.
GENERATED = ("qwen3_moe", "gpt_oss", "granitemoe", "deepseek_v3", "minimax_m2", "nemotron_h")


@pytest.mark.parametrize("way", ["switch", "replace"])
@pytest.mark.parametrize("architecture", GENERATED)
@torch.no_grad()
def test_generate_compiles_with_a_static_cache(architecture: str, way: str, count_compiles) -> None:
    """As `generate` does on a GPU, where it compiles the decoding step by itself."""
    eager, model = walk.pair(architecture, way)
    ids = walk.token_ids(1)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    on_cpu = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    on_cpu._compile_all_devices = True
    tokens = model.generate(ids, cache_implementation="static", compile_config=on_cpu, **options)
    assert torch.equal(tokens, eager.generate(ids, **options))
    assert 1 <= count_compiles() <= 2
