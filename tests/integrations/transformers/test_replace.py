"""replace_moe: memory, names, refusals; its numbers are compared in test_models.py."""

from __future__ import annotations

import ast
import copy
import gc
import io
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

import cmoe
from cmoe.integrations.transformers import replace_moe
from tests.integrations.transformers.architectures import tiny_whole_qwen3_vl_moe
from tests.integrations.transformers.tiny_models import (
    LAYERS,
    MODELS,
    blocks,
    fill,
    relative_error,
    tiny_model,
    token_ids,
)
from tests.packable import strips_backend

four_families = pytest.mark.parametrize("family", MODELS)
PATHS = tuple(f"model.layers.{layer}.mlp" for layer in range(LAYERS))


class Memory(TorchDispatchMode):
    """Bytes that the ops inside allocate outside of the meta device, and how many live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta and _storage(tensor) not in given:
                self.live += tensor.untyped_storage().nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(tensor, self._free, tensor.untyped_storage().nbytes())
        return result

    def _free(self, num_bytes: int) -> None:
        self.live -= num_bytes


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def storages(model: nn.Module) -> dict[int, int]:
    """Pointer with size of every storage of the model but the layers' tokens."""
    tensors = [*model.parameters(), *model.buffers()]
    every = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return {pointer: num_bytes for pointer, num_bytes in every.items() if num_bytes > 1}


@four_families
def test_the_storage_is_taken_over(family: str) -> None:
    model = tiny_model(family)
    before = storages(model)
    one_expert = model.model.layers[0].mlp.experts.gate_up_proj[0].nbytes
    with Memory() as memory:
        report = replace_moe(model)
    assert storages(model) == before
    tokens = LAYERS
    assert memory.live == tokens
    assert memory.peak <= one_expert + tokens if family == "gpt_oss" else memory.peak == tokens
    assert report.replaced == PATHS
    assert report.kept == ()
    of_experts = [p for b in blocks(model) for p in b.routed_experts.parameters()]
    assert report.num_bytes == sum(p.nbytes for p in of_experts)


def test_the_memory_probe_sees_a_copy() -> None:
    x = torch.zeros(10)
    with Memory() as memory:
        y = x.clone()
        z = x[2:]
    assert (memory.live, memory.peak) == (40, 40)
    del y, z
    gc.collect()
    assert memory.live == 0


@four_families
def test_parameters_stay_the_same_objects(family: str) -> None:
    model = tiny_model(family)
    before = {id(p) for p in model.parameters()}
    replace_moe(model)
    assert {id(p) for p in model.parameters()} == before


@four_families
@pytest.mark.parametrize("wanted", [False, True])
def test_requires_grad_and_mode_are_kept(family: str, wanted: bool) -> None:
    model = tiny_model(family).requires_grad_(wanted).train(wanted)
    replace_moe(model)
    assert all(p.requires_grad == wanted for p in model.parameters())
    assert all(module.training == wanted for module in model.modules())


@torch.no_grad()
def test_models_with_the_same_paths_live_side_by_side() -> None:
    ids = token_ids()
    models = [tiny_model("qwen3_moe") for _ in range(2)]
    expected = [model(ids).logits for model in models]
    for model in models:
        replace_moe(model)
    names = {block.layer_name for model in models for block in blocks(model)}
    assert len(names) == 2 * LAYERS
    assert {block.prefix for model in models for block in blocks(model)} == set(PATHS)
    for model, logits in zip(models, expected, strict=True):
        assert relative_error(model(ids).logits, logits) <= 1e-5


def test_deleting_the_model_frees_its_weights() -> None:
    model = tiny_model("gpt_oss")
    replace_moe(model)
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model
    gc.collect()
    assert not any(ref() is not None for ref in parameters)


@four_families
@torch.no_grad()
def test_copies_and_saved_state_work(family: str) -> None:
    model, ids = tiny_model(family), token_ids()
    replace_moe(model)
    expected = model(ids).logits
    assert torch.equal(copy.deepcopy(model)(ids).logits, expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(ids).logits, expected)
    other = tiny_model(family)
    replace_moe(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(ids).logits, expected)


@four_families
@torch.no_grad()
def test_runners_load_the_checkpoint_again(family: str) -> None:
    """The names of transformers, whatever became of the layout in memory."""
    model, other = tiny_model(family), tiny_model(family)
    state, ids = other.state_dict(), token_ids()
    before = storages(replaced := copy.deepcopy(model))
    replace_moe(replaced)
    for path in PATHS:
        of_block = {k: v for k, v in state.items() if k.startswith(f"{path}.")}
        replaced.get_submodule(path).load_weights(of_block)
    rest = {k: v for k, v in state.items() if not k.startswith(PATHS)}
    replaced.load_state_dict(rest, strict=False)
    assert storages(replaced) == before
    assert relative_error(replaced(ids).logits, other(ids).logits) <= 1e-5


@torch.no_grad()
def test_a_submodel_can_be_given() -> None:
    model, ids = tiny_model("mixtral"), token_ids()
    expected = model(ids).logits
    report = replace_moe(model.model)
    assert report.replaced == tuple(path.removeprefix("model.") for path in PATHS)
    assert relative_error(model(ids).logits, expected) <= 1e-5


@torch.no_grad()
def test_dtypes_of_a_model_cast_as_a_whole_are_fine() -> None:
    model, ids = tiny_model("deepseek_v3").bfloat16(), token_ids()
    replace_moe(model)
    bias = blocks(model)[0].router.e_score_correction_bias
    assert bias.dtype == torch.float32
    assert model(ids).logits.dtype == torch.bfloat16


def test_a_family_without_a_row_is_pointed_to_the_switch() -> None:
    config = PhimoeConfig(
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=32,
    )
    with pytest.raises(cmoe.UnsupportedError) as raised:
        replace_moe(PhimoeForCausalLM(config))
    for part in (
        "no row for the blocks of PhimoeForCausalLM (experts at model.layers.0.mlp.experts)",
        "; phimoe: its router masks logits near the best one (sparsemixer). ",
        'model.set_experts_implementation("cmoe")',
    ):
        assert part in str(raised.value)


def test_a_model_without_experts_is_an_error() -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
    )
    with pytest.raises(cmoe.UnsupportedError, match="LlamaForCausalLM has no sparse block"):
        replace_moe(LlamaForCausalLM(config))


def check_refused(model: PreTrainedModel, match: str) -> None:
    """replace_moe raises about the last block, changes nothing at all."""
    before = [(name, id(module)) for name, module in model.named_modules()]
    contents = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(cmoe.UnsupportedError, match=rf"{PATHS[-1]} : .*{match}") as raised:
        replace_moe(model)
    assert "nothing was changed" in str(raised.value)
    assert 'set_experts_implementation("cmoe")' in str(raised.value)
    assert [(name, id(module)) for name, module in model.named_modules()] == before
    for name, parameter in model.named_parameters():
        assert parameter.is_meta or torch.equal(parameter.float(), contents[name].float())


def _to(parameter: nn.Parameter, **kwargs: object) -> nn.Parameter:
    return nn.Parameter(parameter.data.to(**kwargs), requires_grad=False)


def _dtype_mix(experts: nn.Module) -> None:
    experts.down_proj = _to(experts.down_proj, dtype=torch.bfloat16)


def _meta(experts: nn.Module) -> None:
    experts.down_proj = _to(experts.down_proj, device="meta")


def _int8(experts: nn.Module) -> None:
    experts.down_proj = _to(experts.down_proj, dtype=torch.int8)


def _float8(experts: nn.Module) -> None:
    experts.down_proj = _to(experts.down_proj, dtype=torch.float8_e4m3fn)


def _scales(experts: nn.Module) -> None:
    experts.register_buffer("down_proj_scale", torch.ones(3))


def _pruned(experts: nn.Module) -> None:
    experts.down_proj = nn.Parameter(experts.down_proj.data[:-1])


def _gradient(experts: nn.Module) -> None:
    experts.down_proj.grad = torch.zeros_like(experts.down_proj)


def _hook(experts: nn.Module) -> None:
    experts.register_forward_hook(lambda module, args, output: None)


def _own_forward(experts: nn.Module) -> None:
    experts.forward = experts.forward


def _parametrized(experts: nn.Module) -> None:
    torch.nn.utils.parametrize.register_parametrization(experts, "down_proj", nn.Identity())


@four_families
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_dtype_mix, "weights have several dtypes: bfloat16, float32"),
        (_meta, "down_proj is on the meta device: load the weights first"),
        (_int8, "down_proj is a Parameter of torch.int8, no plain float parameter"),
        (_float8, "down_proj is a Parameter of torch.float8_e4m3fn, no plain float"),
        (_scales, r"its experts have the tensors .*down_proj_scale.*\(quantised\?\)"),
        (_pruned, "down_proj is .*, by the config"),
        (_gradient, "down_proj has a gradient: set it to None first"),
        (_hook, "its experts module has hooks"),
        (_own_forward, "its experts module has a forward of its own"),
        (_parametrized, r"parametrizations \(an adapter\)"),
    ],
)
def test_blocks_are_judged_before_one_is_changed(family: str, change, match: str) -> None:
    model = tiny_model(family)
    change(blocks(model)[-1].experts)
    check_refused(model, match)


def test_shared_weights_are_refused() -> None:
    model = tiny_model("gpt_oss")
    first, last = (block.experts for block in blocks(model))
    last.down_proj = first.down_proj
    check_refused(model, "down_proj shares its memory with model.layers.0.mlp.experts.down_proj")


def test_views_of_one_storage_are_refused() -> None:
    """Reordered in place, each would be reordered twice."""
    model = tiny_model("gpt_oss")
    first, last = (block.experts for block in blocks(model))
    last.gate_up_proj = nn.Parameter(first.gate_up_proj.data[:])
    check_refused(model, "gate_up_proj shares its memory with model.layers.0")


@torch.no_grad()
def test_parts_of_one_storage_are_fine() -> None:
    """As a mapped file gives them."""
    model, ids = tiny_model("gpt_oss"), token_ids()
    expected = model(ids).logits
    flat, start = torch.empty(sum(p.numel() for p in model.parameters())), 0
    for parameter in model.parameters():
        place = flat[start : start + parameter.numel()].view(parameter.shape)
        parameter.data = place.copy_(parameter)
        start += parameter.numel()
    replace_moe(model)
    assert relative_error(model(ids).logits, expected) <= 1e-5


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrapper", [nn.DataParallel, DistributedDataParallel])
def test_a_wrapped_model_is_refused(wrapper: Any, process_group: None) -> None:
    model = tiny_model("mixtral").requires_grad_(True)
    with pytest.raises(cmoe.UnsupportedError, match=f"the model is wrapped in {wrapper.__name__}"):
        replace_moe(wrapper(model))
    assert replace_moe(model).replaced == PATHS


@pytest.mark.parametrize(
    ("family", "change", "match"),
    [
        ("qwen3_moe", "gate.top_k=2", "gate.top_k is 2, by the config 3"),
        ("qwen3_moe", "gate.norm_topk_prob=False", "norm_topk_prob is False, by the config True"),
        ("gpt_oss", "experts.limit=3.0", "experts.limit is 3.0, by the config 7.0"),
        ("gpt_oss", "experts.alpha=1.0", "experts.alpha is 1.0, by the config 1.702"),
        ("gpt_oss", "router.top_k=1", "router.top_k is 1, by the config 3"),
        ("deepseek_v3", "gate.routed_scaling_factor=1.0", "factor is 1.0, by the config 2.5"),
        ("deepseek_v3", "gate.topk_group=1", "gate.topk_group is 1, by the config 2"),
        ("mixtral", "jitter_noise=0.1", "jitter_noise is 0.1, by the config 0.0"),
        ("mixtral", "experts._is_expert_parallel=True", "parallel is True, by the config False"),
    ],
)
def test_attributes_changed_after_the_build_are_refused(
    family: str, change: str, match: str
) -> None:
    model = tiny_model(family)
    place, _, value = change.partition("=")
    path, _, name = place.rpartition(".")
    setattr(blocks(model)[-1].get_submodule(path), name, ast.literal_eval(value))
    check_refused(model, match)


def test_another_activation_is_refused() -> None:
    model = tiny_model("mixtral")
    blocks(model)[-1].experts.act_fn = nn.GELU()
    check_refused(model, "experts.act_fn is a GELU, by the config a SiLU")


def test_another_gate_function_is_refused() -> None:
    model = tiny_model("mixtral")
    blocks(model)[-1].experts._apply_gate = torch.tanh
    check_refused(model, "experts has functions of its own: _apply_gate")


def test_hooks_of_the_gate_are_refused() -> None:
    model = tiny_model("mixtral")
    blocks(model)[-1].gate.register_forward_hook(lambda module, args, output: None)
    check_refused(model, "its gate has hooks")


@four_families
@torch.no_grad()
def test_what_is_saved_is_a_checkpoint_of_transformers(family: str, tmp_path: Path) -> None:
    """The same bytes as without the replacement, also where an inner model was given."""
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "before")
    replace_moe(model.model)
    model.save_pretrained(tmp_path / "after")
    check_same_files(tmp_path)


@torch.no_grad()
def test_a_whole_model_whose_files_are_turned_is_saved(tmp_path: Path) -> None:
    """transformers' own converter looks up the shapes of the experts' parameters by their names."""
    model = tiny_whole_qwen3_vl_moe()
    model.save_pretrained(tmp_path / "before")
    assert len(replace_moe(model).replaced) == LAYERS
    copy.deepcopy(model).save_pretrained(tmp_path / "after")
    check_same_files(tmp_path)


def check_same_files(folder: Path) -> None:
    before = load_file(folder / "before" / "model.safetensors")
    after = load_file(folder / "after" / "model.safetensors")
    assert set(after) == set(before)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name


@four_families
def test_parameters_are_found_by_transformers_names(family: str) -> None:
    model = tiny_model(family)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    replace_moe(model)
    for name, tensor in expected.items():
        if ".experts." in name:
            assert torch.equal(model.get_parameter(name), tensor)
    with pytest.raises(AttributeError, match="up_proj_scale"):
        model.get_parameter("model.layers.0.mlp.experts.up_proj_scale")


@four_families
@torch.no_grad()
def test_state_goes_both_ways(family: str) -> None:
    """The state_dict of a replaced model is that of one which is not."""
    plain, replaced = tiny_model(family), tiny_model(family)
    replace_moe(replaced)
    ids = token_ids()
    plain.load_state_dict(replaced.state_dict())
    assert relative_error(plain(ids).logits, replaced(ids).logits) <= 1e-5
    other = tiny_model(family)
    replaced.load_state_dict(other.state_dict())
    assert relative_error(replaced(ids).logits, other(ids).logits) <= 1e-5


def test_a_second_call_changes_nothing() -> None:
    model = tiny_model("qwen3_moe")
    first = replace_moe(model)
    parts = list(model.modules())
    second = replace_moe(model)
    assert (second.replaced, second.already, second.num_bytes) == ((), first.replaced, 0)
    assert first.already == ()
    assert list(model.modules()) == parts


def test_hooks_of_the_block_are_refused() -> None:
    model = tiny_model("mixtral")
    blocks(model)[-1].register_forward_pre_hook(lambda module, args: None)
    check_refused(model, "the block has hooks")


def test_a_missing_gate_is_refused() -> None:
    model = tiny_model("mixtral")
    del blocks(model)[-1].gate
    check_refused(model, "has no module gate")


def test_a_gate_of_another_size_is_refused() -> None:
    model = tiny_model("mixtral")
    gate = blocks(model)[-1].gate
    gate.weight = nn.Parameter(gate.weight.data[:3])
    check_refused(model, r"gate.weight is \(3, 20\), by the config \(7, 20\)")


def test_what_the_row_does_not_hold_for_is_refused() -> None:
    model = tiny_model("mixtral")
    model.config.router_jitter_noise = 0.1
    check_refused(model, "config.router_jitter_noise is 0.1, a replaced block does what 0.0 does")


def test_an_activation_outside_the_table_is_refused() -> None:
    model = tiny_model("mixtral")
    model.config.hidden_act = "mish"
    check_refused(model, "unknown activation 'mish'")


# --- packed weights -------------------------------------------------------------------------------


@pytest.fixture
def strips() -> Iterator[None]:
    with strips_backend():
        yield


def packable_model(family: str) -> PreTrainedModel:
    """A tiny model whose experts' sizes are whole strips."""
    config = MODELS[family]().config
    config.hidden_size = 64
    config.intermediate_size = config.moe_intermediate_size = 32
    model = fill(type(tiny_model(family))(config).eval())
    model.set_experts_implementation("eager")
    return model


def replaced_and_packed(family: str) -> PreTrainedModel:
    model = packable_model(family)
    replace_moe(model)
    cmoe.pack_weights(model.requires_grad_(False))
    assert all(block.routed_experts.is_packed() for block in blocks(model))
    return model


def test_weights_that_ask_for_gradients_are_not_packed(strips: None) -> None:
    """As those of a model of transformers do."""
    model = packable_model("qwen3_moe")
    replace_moe(model)
    message = r"model\.layers\.0\.mlp\.routed_experts : w13_weight, w2_weight: with gradients"
    with pytest.raises(cmoe.UnsupportedError, match=message):
        cmoe.pack_weights(model)


def test_the_switch_has_nothing_to_pack() -> None:
    model = packable_model("qwen3_moe")
    model.set_experts_implementation("cmoe")
    with pytest.raises(ValueError, match=r"Qwen3MoeForCausalLM has no RoutedExperts.*the exp"):
        cmoe.pack_weights(model)


@four_families
@torch.no_grad()
def test_a_packed_model_is_saved_as_transformers_would(
    family: str, strips: None, tmp_path: Path
) -> None:
    model, ids = packable_model(family), token_ids()
    model.save_pretrained(tmp_path / "before")
    replace_moe(model)
    expected = model(ids).logits
    cmoe.pack_weights(model.requires_grad_(False))
    assert relative_error(model(ids).logits, expected) <= 1e-5
    model.save_pretrained(tmp_path / "after")
    check_same_files(tmp_path)
    assert all(block.routed_experts.is_packed() for block in blocks(model))
    again = type(model).from_pretrained(tmp_path / "after")
    assert relative_error(again(ids).logits, expected) <= 1e-5
    cmoe.unpack_weights(model)
    assert relative_error(model(ids).logits, expected) <= 1e-5


@four_families
@torch.no_grad()
def test_state_of_a_packed_model_goes_both_ways(family: str, strips: None) -> None:
    plain, packed, ids = packable_model(family), replaced_and_packed(family), token_ids()
    plain.load_state_dict(packed.state_dict())
    assert relative_error(plain(ids).logits, packed(ids).logits) <= 1e-5
    other = packable_model(family)
    packed.load_state_dict(other.state_dict())
    assert all(block.routed_experts.is_packed() for block in blocks(packed))
    assert relative_error(packed(ids).logits, other(ids).logits) <= 1e-5


@four_families
def test_packed_parameters_are_found_by_transformers_names(family: str, strips: None) -> None:
    model = packable_model(family).requires_grad_(False)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    replace_moe(model)
    cmoe.pack_weights(model)
    for name, tensor in expected.items():
        if ".experts." in name:
            assert torch.equal(model.get_parameter(name), tensor)
    kept = model.state_dict(keep_vars=True)
    assert set(kept) == set(model.state_dict())
    own = {id(parameter) for parameter in model.parameters()}
    packed = [tensor for tensor in kept.values() if tensor.dim() == 5]
    assert len(packed) == 2 * LAYERS
    assert {id(tensor) for tensor in packed} <= own
    model.load_state_dict({name: tensor.clone() for name, tensor in kept.items()})
    state = model.state_dict()
    assert all(torch.equal(state[name], expected[name]) for name in expected if ".experts." in name)


def test_a_packed_model_is_left_alone_by_a_second_call(strips: None) -> None:
    model = replaced_and_packed("qwen3_moe")
    assert replace_moe(model).already == PATHS
    assert all(block.routed_experts.is_packed() for block in blocks(model))


@torch.no_grad()
def test_a_packed_model_whose_files_are_turned_is_saved(strips: None, tmp_path: Path) -> None:
    """transformers' own converter looks up the shapes of the experts' parameters by their names."""
    model = tiny_whole_qwen3_vl_moe(hidden_size=64, moe_intermediate_size=32)
    model.save_pretrained(tmp_path / "before")
    replace_moe(model)
    cmoe.pack_weights(model.requires_grad_(False))
    model.save_pretrained(tmp_path / "after")
    check_same_files(tmp_path)


@torch.no_grad()
def test_a_copy_of_a_packed_model_speaks_as_it_does(strips: None, tmp_path: Path) -> None:
    model = replaced_and_packed("gpt_oss")
    model.save_pretrained(tmp_path / "before")
    copy.deepcopy(model).save_pretrained(tmp_path / "after")
    check_same_files(tmp_path)
