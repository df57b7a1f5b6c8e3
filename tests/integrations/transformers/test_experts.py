"""The experts switch, one experts module at a time, beside transformers' own implementations."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile
from transformers import GptOssConfig, MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from cmoe.custom_ops.backends import (
    Backend,
    Kernels,
    LayerSpec,
    register_backend,
    unregister_backend,
)
from cmoe.custom_ops.cpu import build
from cmoe.custom_ops.fused_experts import fused_experts_reference
from cmoe.custom_ops.route import route
from cmoe.errors import UnsupportedError
from cmoe.integrations.transformers import cmoe_experts_forward, register
from cmoe.integrations.transformers.experts import _weights
from cmoe.integrations.transformers.fused_form import fused_form
from tests.integrations.transformers.tiny_models import fill, relative_error, tiny_model

E, K, H, I = 7, 3, 20, 11  # noqa: E741 - the shape vocabulary


def sizes(hidden_size: int = H, intermediate_size: int = I) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_local_experts": E,
    }


def mixtral(**others: int) -> nn.Module:
    return prepared(MixtralExperts(MixtralConfig(**sizes(**others))))


def gpt_oss(**others: int) -> nn.Module:
    return prepared(GptOssExperts(GptOssConfig(**sizes(**others))))


def prepared(experts: nn.Module) -> nn.Module:
    experts.config._experts_implementation = "eager"
    return fill(experts)


EXPERTS = pytest.mark.parametrize("make", [mixtral, gpt_oss])
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def arguments(
    num_tokens: int = 13, num_experts: int = E, hidden_size: int = H
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, distinct ids, weights."""
    ids = torch.rand(num_tokens, num_experts).topk(K).indices
    return torch.randn(num_tokens, hidden_size), ids, torch.rand(num_tokens, K)


def run(experts: nn.Module, implementation: str, *args: Tensor, compiled: bool = False) -> Tensor:
    experts.config._experts_implementation = implementation
    call = torch.compile(experts, fullgraph=True, backend="aot_eager") if compiled else experts
    return call(*args)


def test_registering_again_changes_nothing() -> None:
    register()
    register()
    assert ALL_EXPERTS_FUNCTIONS["cmoe"] is cmoe_experts_forward


@COMPILED
@EXPERTS
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
@torch.no_grad()
def test_any_number_of_tokens(make, num_tokens: int, compiled: bool) -> None:
    experts, args = make(), arguments(num_tokens)
    y = run(experts, "cmoe", *args, compiled=compiled)
    assert y.shape == (num_tokens, H)
    if num_tokens:
        assert relative_error(y, run(experts, "eager", *args)) <= 1e-5


@torch.no_grad()
def test_numbers_of_tokens_share_graphs(count_compiles) -> None:
    experts = mixtral()
    experts.config._experts_implementation = "cmoe"
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for num_tokens in (1, 2, 17, 64, 0):
        args = arguments(num_tokens)
        y = compiled(*args)
        if num_tokens:
            assert relative_error(y, run(experts, "eager", *args)) <= 1e-5
            experts.config._experts_implementation = "cmoe"
    assert count_compiles() <= 3


@COMPILED
@EXPERTS
def test_expert_parallel_ids_past_the_last_expert_are_skipped(make, compiled: bool) -> None:
    experts = make()
    experts._is_expert_parallel = True
    x, ids, scores = arguments(num_experts=2 * E)  # Half of the experts are on another rank.
    assert (ids >= E).any()
    here = ids < E
    x.requires_grad_()
    scores.requires_grad_()
    y = run(experts, "cmoe", x, ids, scores, compiled=compiled)
    y.sum().backward()
    actual = (y, x.grad, scores.grad, experts.down_proj.grad)
    # The same rows with an expert of this rank, at weight 0.
    experts._is_expert_parallel = False
    experts.zero_grad()
    x2 = x.detach().requires_grad_()
    scores2 = torch.where(here, scores.detach(), 0).requires_grad_()
    expected_y = run(experts, "eager", x2, torch.where(here, ids, 0), scores2)
    expected_y.sum().backward()
    scores_grad = torch.where(here, scores2.grad, 0)
    expected = (expected_y, x2.grad, scores_grad, experts.down_proj.grad)
    for ours, theirs in zip(actual, expected, strict=True):
        assert relative_error(ours, theirs) <= 1e-5


def test_ids_out_of_range_are_an_error_elsewhere() -> None:
    x, ids, scores = arguments()
    with pytest.raises(ValueError, match=r"topk_ids must be in \[-1, 7\)"):
        run(mixtral(), "cmoe", x, ids + E, scores)


@COMPILED
@EXPERTS
@torch.no_grad()
def test_autocast_computes_in_the_dtype_of_the_weights(make, compiled: bool) -> None:
    """As transformers' grouped_mm does, which takes bfloat16 sizes in multiples of 8 alone."""
    experts = make(hidden_size=24, intermediate_size=16).bfloat16()
    x, ids, scores = arguments(hidden_size=24)
    with torch.autocast("cpu", torch.bfloat16):
        y = run(experts, "cmoe", x, ids, scores, compiled=compiled)
        theirs = run(experts, "grouped_mm", x, ids, scores)
    exact = run(copy.deepcopy(experts).double(), "eager", x.double(), ids, scores)
    assert y.dtype == theirs.dtype == torch.float32
    assert (y - exact).norm() <= 2 * (theirs - exact).norm()


@torch.no_grad()
def test_autocast_leaves_float32_weights_alone() -> None:
    experts, args = mixtral(), arguments()
    with torch.autocast("cpu", torch.bfloat16):
        y = run(experts, "cmoe", *args)
    assert relative_error(y, run(experts, "eager", *args)) <= 1e-5


class NormedExperts(MixtralExperts):
    """A gate that no table knows, a norm after each expert."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        self.post_expert_norm = nn.RMSNorm(H)
        self.has_post_expert_norm = True

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return gate.tanh() * (up - 0.5)

    def oracle(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for token, (of_token, weights) in enumerate(zip(ids, scores, strict=True)):
            for expert, weight in zip(of_token.tolist(), weights, strict=True):
                h = self._apply_gate(self.gate_up_proj[expert] @ x[token])
                y[token] += weight * self.post_expert_norm(self.down_proj[expert] @ h)
        return y


def normed() -> NormedExperts:
    config = MixtralConfig(**sizes())
    return prepared(NormedExperts(config))


@COMPILED
@pytest.mark.parametrize("with_sentinels", [False, True])
def test_an_unknown_gate_runs_stage_by_stage(with_sentinels: bool, compiled: bool) -> None:
    experts = normed()
    x, ids, scores = arguments()
    given = ids
    if with_sentinels:
        experts._is_expert_parallel = True
        given = torch.where(ids == 2, E, ids)
        scores = torch.where(ids == 2, 0, scores)
    x.requires_grad_()
    y = run(experts, "cmoe", x, given, scores, compiled=compiled)
    y.sum().backward()
    x2 = x.detach().requires_grad_()
    ours = [x.grad, experts.gate_up_proj.grad, experts.post_expert_norm.weight.grad]
    experts.zero_grad()
    exact = experts.oracle(x2, ids, scores)
    exact.sum().backward()
    theirs = [x2.grad, experts.gate_up_proj.grad, experts.post_expert_norm.weight.grad]
    for actual, expected in zip([y, *ours], [exact, *theirs], strict=True):
        assert relative_error(actual, expected) <= 1e-5


@COMPILED
def test_the_staged_path_is_said_once(compiled: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Unheard(NormedExperts):
        pass

    Unheard.__name__ = f"Unheard{compiled}"
    config = MixtralConfig(**sizes())
    experts = [prepared(Unheard(config)) for _ in range(2)]
    with caplog.at_level(logging.WARNING, logger="cmoe"):
        for each in experts:
            for _ in range(2):
                run(each, "cmoe", *arguments(), compiled=compiled)
    said = [r.message for r in caplog.records if Unheard.__name__ in r.message]
    assert said == [
        f"{Unheard.__name__} runs stage by stage, not in one kernel: "
        "it normalises each expert's output"
    ]


@torch.no_grad()
def test_weights_of_two_dtypes_are_staged() -> None:
    experts, args = mixtral(), arguments()
    exact = run(copy.deepcopy(experts), "eager", *args)
    experts.down_proj.data = experts.down_proj.data.bfloat16()
    y = run(experts, "cmoe", *args)
    assert y.dtype == torch.float32
    # One rounding of w2, one of the activations, each 2^-9 of a term.
    assert relative_error(y, exact) <= 2**-7


def test_quantised_weights_are_an_error() -> None:
    experts = mixtral()
    experts.down_proj = nn.Parameter(experts.down_proj.data.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match=r"MixtralExperts has weights of .*torch.int8"):
        run(experts, "cmoe", *arguments())


@torch.no_grad()
def test_layers_that_differ_in_a_constant_do_not_share_it(count_compiles) -> None:
    """gpt-oss's limit is read at each call, compiled graphs are guarded by it."""
    experts, args = gpt_oss(), arguments()
    other = copy.deepcopy(experts)
    other.limit = 0.1
    for each in (experts, other):
        y = run(each, "cmoe", *args, compiled=True)
        assert relative_error(y, run(each, "eager", *args)) <= 1e-5
    assert not torch.allclose(run(experts, "eager", *args), run(other, "eager", *args))


@EXPERTS
@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_the_op_of_compiled_graphs_is_sound(make, num_tokens: int) -> None:
    experts, (x, ids, scores) = make(), arguments(num_tokens)
    w13, w2, *biases = (None if tensor is None else tensor.detach() for tensor in _weights(experts))
    form = fused_form(experts)
    torch.library.opcheck(
        torch.ops.cmoe.chosen_fused_experts.default,
        (x, w13, w2, scores, ids, *biases, None, *form, False),
    )


class CountingBackend(Backend):
    """The reference under another name, which counts its calls."""

    name = "counting"

    def __init__(self) -> None:
        self.calls = 0

    def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
        return ()

    def kernels(self) -> Kernels:
        def counted(*args):
            self.calls += 1
            return fused_experts_reference(*args)

        return Kernels(counted, route)


@COMPILED
@torch.no_grad()
def test_a_backend_registered_later_is_chosen(compiled: bool) -> None:
    experts, args = mixtral(), arguments()
    expected = run(experts, "cmoe", *args)
    backend = CountingBackend()
    register_backend(backend)
    try:
        y = run(experts, "cmoe", *args, compiled=compiled)
    finally:
        unregister_backend("counting")
    assert backend.calls == 1
    assert relative_error(y, expected) <= 1e-5


@torch.no_grad()
def test_a_model_on_the_switch_can_be_copied_or_pickled() -> None:
    model = tiny_model("gpt_oss")
    model.set_experts_implementation("cmoe")
    ids = torch.tensor([[3, 1, 4]])
    expected = model(ids).logits
    assert torch.equal(copy.deepcopy(model)(ids).logits, expected)
    experts = model.model.layers[0].mlp.experts
    args = arguments()
    assert torch.equal(pickle.loads(pickle.dumps(experts))(*args), experts(*args))


def test_a_class_from_outside_uses_the_interface() -> None:
    @use_experts_implementation(has_gate=False)
    class Squared(nn.Module):
        def __init__(self, config: MixtralConfig) -> None:
            super().__init__()
            self.num_experts = E
            self.up_proj = nn.Parameter(torch.randn(E, I, H))
            self.down_proj = nn.Parameter(torch.randn(E, H, I))
            self.act_fn = nn.SiLU()

    experts = Squared(MixtralConfig())
    x, ids, scores = arguments()
    h = nn.functional.silu(torch.einsum("eih,th->tei", experts.up_proj, x))
    every = torch.einsum("ehi,tei->teh", experts.down_proj, h)
    expected = (every.gather(1, ids[..., None].expand(-1, -1, H)) * scores[..., None]).sum(1)
    assert relative_error(run(experts, "cmoe", x, ids, scores), expected) <= 1e-5


@COMPILED
@pytest.mark.parametrize("make", [mixtral, gpt_oss, normed])
def test_gradcheck(make: Callable[[], nn.Module], compiled: bool) -> None:
    """Of every tensor that a call depends on, in float64."""
    experts = make().double()
    _, ids, scores = arguments(5)
    leaves = [torch.randn(5, H, dtype=torch.float64), scores.double()]
    names = [name for name, _ in experts.named_parameters()]
    leaves += [p.detach().clone() for p in experts.parameters()]
    experts.config._experts_implementation = "cmoe"

    def call(x: Tensor, scores: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(experts, state, (x, ids, scores))

    function = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call
    inputs = tuple(leaf.requires_grad_() for leaf in leaves)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@COMPILED
@EXPERTS
def test_frozen_experts_cost_no_weight_gradient(make, compiled: bool) -> None:
    """No product of the weights' size is formed, not only none is kept."""
    experts = make().requires_grad_(False)
    x, ids, scores = arguments()
    x.requires_grad_()
    y = run(experts, "cmoe", x, ids, scores, compiled=compiled)
    with profile() as events:
        y.sum().backward()
    ran = {event.key for event in events.key_averages()}
    assert "cmoe::grouped_mm" in ran
    assert "cmoe::grouped_mm_weight_grad" not in ran
    experts.requires_grad_(True)
    y = run(experts, "cmoe", x, ids, scores, compiled=compiled)
    with profile() as events:
        y.sum().backward()
    assert "cmoe::grouped_mm_weight_grad" in {event.key for event in events.key_averages()}


COPIES = ("aten::clone", "aten::contiguous", "aten::copy_", "aten::_to_copy")


@pytest.mark.skipif(build.load() is not None, reason="no compiler for the cpu backend")
@EXPERTS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 64])
@torch.no_grad()
def test_weights_are_used_where_they_lie(make, dtype: torch.dtype, num_tokens: int) -> None:
    """gpt-oss keeps its weights transposed, gate and up rows alternating."""
    experts = make().to(dtype)
    x, ids, scores = arguments(num_tokens)
    run(experts, "cmoe", x.to(dtype), ids, scores)
    with profile(record_shapes=True) as events:
        run(experts, "cmoe", x.to(dtype), ids, scores)
    assert "cmoe_cpu::fused_experts" in {event.key for event in events.key_averages()}
    shapes = [e.input_shapes for e in events.events() if e.name in COPIES]
    assert not any(len(shape) == 3 for of_event in shapes for shape in of_event)
