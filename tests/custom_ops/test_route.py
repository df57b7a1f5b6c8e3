"""Router logits to weights with ids, against the row by row oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from cmoe.custom_ops.route import SCORING_FUNCTIONS, route, route_reference, sqrt_softplus
from tests.custom_ops.route_cases import RTOL, arguments, assert_routed
from tests.oracle import naive_route

INF, NAN = float("inf"), float("nan")


def call(
    logits: Tensor, top_k: int, *, function: Callable[..., Any] = route, **options: Any
) -> tuple[Tensor, Tensor]:
    return function(*arguments(logits, top_k, **options))


def check(logits: Tensor, top_k: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Runs op with reference; both must be right, the same to the bit."""
    routed = call(logits, top_k, **options)
    assert_routed(routed, logits, top_k, **options)
    reference = call(logits, top_k, **options, function=route_reference)
    assert all(map(torch.equal, reference, routed))
    return routed


FORMULAS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, renormalised": dict(renormalize=True),
    "softmax after top-k": dict(softmax_after_topk=True),
    "sigmoid": dict(scoring_func="sigmoid"),
    "sigmoid, renormalised, scaled": dict(scoring_func="sigmoid", renormalize=True, scaling=2.5),
    "sqrtsoftplus": dict(scoring_func="sqrtsoftplus"),
    "sqrtsoftplus, renormalised, scaled": dict(
        scoring_func="sqrtsoftplus", renormalize=True, scaling=1.5
    ),
    "groups by their best (DeepSeek-V2)": dict(num_expert_group=4, topk_group=2, scaling=16.0),
    "groups of softmax after top-k": dict(
        softmax_after_topk=True, num_expert_group=4, topk_group=2
    ),
}
BIASED: dict[str, dict[str, Any]] = {
    "softmax with bias": {},
    "sigmoid with bias": dict(scoring_func="sigmoid", renormalize=True),
    "a wide epsilon (LFM2-MoE)": dict(
        scoring_func="sigmoid", renormalize=True, renormalize_epsilon=1e-6
    ),
    "sqrtsoftplus with bias": dict(scoring_func="sqrtsoftplus", renormalize=True),
    "noaux_tc (DeepSeek-V3)": dict(
        scoring_func="sigmoid", renormalize=True, num_expert_group=4, topk_group=2, scaling=2.5
    ),
    "groups with softmax and bias": dict(num_expert_group=8, topk_group=3),
}
NUM_EXPERTS = 24


def options_of(formula: str) -> dict[str, Any]:
    if formula in FORMULAS:
        return FORMULAS[formula]
    return {**BIASED[formula], "bias": torch.randn(NUM_EXPERTS) * 0.3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("formula", [*FORMULAS, *BIASED])
def test_every_formula(formula: str, num_tokens: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(num_tokens, NUM_EXPERTS) * 2).to(dtype)
    check(logits, 5, **options_of(formula))


@pytest.mark.parametrize("formula", [f for f in FORMULAS if "group" not in f])
@pytest.mark.parametrize(("num_experts", "top_k"), [(13, 1), (13, 13), (1, 1), (384, 8)])
def test_every_size(formula: str, num_experts: int, top_k: int) -> None:
    check(torch.randn(7, num_experts), top_k, **FORMULAS[formula])


@pytest.mark.parametrize("formula", FORMULAS)
def test_weights_come_in_order_of_the_choice(formula: str) -> None:
    weights, _ = check(torch.randn(33, NUM_EXPERTS), 6, **FORMULAS[formula])
    assert (weights.diff(dim=1) <= 0).all()


def test_a_renormalised_row_sums_to_the_scaling() -> None:
    for scoring_func in SCORING_FUNCTIONS:
        weights, _ = check(
            torch.randn(9, 8), 3, scoring_func=scoring_func, renormalize=True, scaling=2.5
        )
        torch.testing.assert_close(weights.sum(1), torch.full((9,), 2.5))


@pytest.mark.parametrize("epsilon", [1e-37, 1e-6, 0.5])
def test_the_epsilon_is_added_to_the_sum(epsilon: float) -> None:
    """Also where the scores are as small as it."""
    for logits in (torch.randn(9, 8), torch.randn(9, 8) - 14):
        options = dict(scoring_func="sigmoid", renormalize=True, renormalize_epsilon=epsilon)
        weights, ids = check(logits, 3, **options)
        scores = logits.double().sigmoid().gather(1, ids.long())
        expected = scores / (scores.sum(1, keepdim=True) + epsilon)
        torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=0)


def test_float64_stays_exact() -> None:
    logits = torch.randn(7, 11, dtype=torch.float64)
    for options in ({}, dict(scoring_func="sigmoid", renormalize=True)):
        weights, _ = call(logits, 3, **options)
        torch.testing.assert_close(
            weights, naive_route(logits, 3, **options)[0], rtol=1e-14, atol=0
        )


def test_bfloat16_logits_are_routed_in_float32() -> None:
    logits = torch.randn(33, 128).bfloat16()
    for options in ({}, dict(softmax_after_topk=True), dict(scoring_func="sigmoid")):
        for narrow, wide in zip(
            call(logits, 8, **options), call(logits.float(), 8, **options), strict=True
        ):
            assert torch.equal(narrow, wide)


# --- the order of softmax and top-k ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.6439, 0.2369]),
        (dict(renormalize=True), [0.7311, 0.2689]),
        (dict(softmax_after_topk=True), [0.7311, 0.2689]),
    ],
)
def test_both_orders_of_softmax_with_top_k(options: dict, expected: list[float]) -> None:
    weights, ids = check(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), 2, **options)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([expected]), rtol=0, atol=5e-5)


# --- ties -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_row_of_equals_takes_the_first(formula: str) -> None:
    _, ids = check(torch.zeros(3, 384), 8, **FORMULAS[formula])
    assert ids.tolist() == [list(range(8))] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_experts", [8, 384])
def test_ties_at_the_cut_go_to_the_lower_id(dtype: torch.dtype, num_experts: int) -> None:
    # Few distinct values, so that nearly every cut lies inside a run of equals.
    logits = torch.randint(-3, 4, (65, num_experts)).to(dtype) / 4
    _, ids = check(logits, 5)
    by_hand = logits.float().argsort(dim=1, descending=True, stable=True)[:, :5]
    assert torch.equal(ids.long(), by_hand)
    for bias in (torch.zeros(num_experts), torch.ones(num_experts)):
        check(logits, 5, bias=bias, scoring_func="sigmoid")


def test_both_zeros_tie() -> None:
    _, ids = check(torch.tensor([[-0.0, 0.0, -0.0, 0.0]]), 3)
    assert ids.tolist() == [[0, 1, 2]]


def test_tied_groups_go_to_the_lower_one() -> None:
    for options in ({}, dict(bias=torch.zeros(12), scoring_func="sigmoid")):
        _, ids = check(torch.zeros(2, 12), 4, num_expert_group=6, topk_group=2, **options)
        assert ids.tolist() == [[0, 1, 2, 3]] * 2


def test_logits_that_softmax_cannot_tell_apart() -> None:
    # exp of both differences is 0 in float32; the larger logit still goes first.
    _, ids = check(torch.tensor([[0.0, -300.0, -200.0]]), 2)
    assert ids.tolist() == [[0, 2]]


# --- bias, groups ---------------------------------------------------------------------------------


def test_a_bias_that_swallows_the_scores() -> None:
    weights, ids = call(
        torch.tensor([[-16.1, -17.0, -18.0, -16.5]]),
        2,
        bias=torch.full((4,), 12.0),
        scoring_func="sigmoid",
        renormalize=True,
    )
    # 12 + 1e-7 is 12 in float32, so all four tie; the weights are of the scores alone.
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.711, 0.289]]), rtol=0, atol=5e-4)


def test_a_bias_takes_part_in_the_choice_only() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0, -0.5]])
    weights, ids = check(logits, 2, bias=torch.tensor([0, 0, 0, 5.0]), scoring_func="sigmoid")
    assert ids.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, logits[:, [3, 0]].sigmoid())


def test_a_bias_keeps_its_float32_steps() -> None:
    # Around 7 a bfloat16 has steps of 1/32: rounded to it, all of these would be one number.
    bias = 7 + torch.arange(8).float() / 512
    _, ids = check(torch.zeros(1, 8), 3, bias=bias, scoring_func="sigmoid")
    assert ids.tolist() == [[7, 6, 5]]


@pytest.mark.parametrize("scoring_func", SCORING_FUNCTIONS)
def test_negative_choices_stay_in_their_groups(scoring_func: str) -> None:
    logits = torch.randn(33, 8)
    _, ids = check(
        logits,
        4,
        bias=torch.full((8,), -2.0),
        scoring_func=scoring_func,
        num_expert_group=4,
        topk_group=2,
    )
    assert all(len(set(row)) == 2 for row in (ids // 2).tolist())


def test_a_group_is_marked_by_its_best_two_with_a_bias_else_by_its_best() -> None:
    scores = torch.tensor([[0.9, 1e-6, 0.6, 0.6]])
    groups = dict(scoring_func="sigmoid", num_expert_group=2, topk_group=1)
    assert check(scores.logit(), 2, bias=torch.zeros(4), **groups)[1].tolist() == [[2, 3]]
    assert check(scores.logit(), 2, **groups)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize("bias", [None, torch.arange(6).float()])
def test_groups_of_one_expert(bias: Tensor | None) -> None:
    options = dict(num_expert_group=6, topk_group=3, bias=bias)
    _, ids = check(torch.randn(9, 6), 2, **options)
    assert all(len(set(row)) == 2 for row in ids.tolist())


# --- rows that are not numbers --------------------------------------------------------------------

BAD_ROWS = torch.tensor(
    [
        [NAN] * 8,
        [-INF] * 8,
        [INF] * 8,
        [NAN, 1, 2, 3, 0, 0, 0, 0],
        [INF, 0, 0, 0, 0, 0, 0, 0],
        [-INF, 1, -INF, 3, NAN, -INF, -INF, -INF],
        [INF, NAN, -INF, INF, NAN, INF, 0, 0],
        [NAN, -INF, NAN, -INF, NAN, -INF, NAN, -INF],
    ]
)
FINITE_CHOICES = {3: [3, 2], 4: [0, 1], 5: [3, 1], 6: [0, 3]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [None, torch.zeros(8)])
@pytest.mark.parametrize("groups", [{}, dict(num_expert_group=4, topk_group=2)])
@pytest.mark.parametrize("scoring_func", SCORING_FUNCTIONS)
@pytest.mark.parametrize("renormalize", [False, True])
def test_rows_that_are_not_finite(
    scoring_func: str,
    groups: dict[str, Any],
    bias: Tensor | None,
    dtype: torch.dtype,
    renormalize: bool,
) -> None:
    options = dict(scoring_func=scoring_func, bias=bias, renormalize=renormalize, **groups)
    good = torch.randn(len(BAD_ROWS) + 1, 8).to(dtype)
    mixed = torch.stack([good[:-1], BAD_ROWS.to(dtype)], 1).flatten(0, 1)
    mixed = torch.cat([mixed, good[-1:]])
    weights, ids = call(mixed, 2, **options)
    assert ((ids >= 0) & (ids < 8)).all()
    assert (ids[:, 0] != ids[:, 1]).all()
    assert weights.isfinite().all()
    alone = call(good, 2, **options)
    assert torch.equal(weights[::2], alone[0])
    assert torch.equal(ids[::2], alone[1])
    if not groups:
        for row, chosen in FINITE_CHOICES.items():
            assert ids[2 * row + 1].tolist() == chosen
    for row in (0, 1, 7):
        assert ids[2 * row + 1].tolist() == [0, 1]
        equal = {"softmax": 0.5 if renormalize else 1 / 8}.get(scoring_func, 0.0)
        assert weights[2 * row + 1].tolist() == [equal, equal]


def test_rows_that_are_not_finite_under_softmax_after_topk() -> None:
    weights, ids = check(BAD_ROWS, 2, softmax_after_topk=True)
    assert weights[:3].tolist() == [[0.5, 0.5]] * 3
    assert ids[3].tolist() == [3, 2]


@pytest.mark.parametrize("groups", [{}, dict(num_expert_group=4, topk_group=2)])
@pytest.mark.parametrize("scoring_func", SCORING_FUNCTIONS)
def test_a_bias_that_is_not_finite(scoring_func: str, groups: dict[str, Any]) -> None:
    """Such a choice counts as such a logit does: NaN as the lowest, an infinity as outermost."""
    logits = torch.cat([torch.randn(5, 8), BAD_ROWS])
    for bias in BAD_ROWS:
        options = dict(bias=bias, scoring_func=scoring_func, **groups)
        _, ids = check(logits, 3, renormalize=True, **options)
        assert all(len(set(row)) == 3 for row in ids.tolist())


def test_a_nan_in_the_bias_is_chosen_last() -> None:
    bias = torch.tensor([0, NAN, 0, NAN])
    _, ids = call(torch.tensor([[0.0, 9, 1, 9]]), 4, bias=bias, scoring_func="sigmoid")
    assert ids.tolist() == [[2, 0, 1, 3]]


def test_the_input_is_unchanged() -> None:
    before = BAD_ROWS.clone()
    call(before, 2, bias=torch.zeros(8), num_expert_group=2)
    assert torch.equal(before.nan_to_num(nan=7), BAD_ROWS.nan_to_num(nan=7))


# --- transformers' own routers --------------------------------------------------------------------


def test_qwen3_moe() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    for renormalize in (False, True):
        config = modeling.Qwen3MoeConfig(
            num_experts=128, num_experts_per_tok=8, hidden_size=16, norm_topk_prob=renormalize
        )
        against(modeling.Qwen3MoeTopKRouter(config), 8, renormalize=renormalize)


def test_mixtral() -> None:
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = modeling.MixtralConfig(num_local_experts=8, num_experts_per_tok=2, hidden_size=16)
    against(modeling.MixtralTopKRouter(config), 2, renormalize=True)


def test_gpt_oss() -> None:
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    config = modeling.GptOssConfig(num_local_experts=32, num_experts_per_tok=4, hidden_size=16)
    against(modeling.GptOssTopKRouter(config), 4, softmax_after_topk=True)


def test_deepseek_v3() -> None:
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        n_routed_experts=64, num_experts_per_tok=6, hidden_size=16, n_group=8, topk_group=3
    )
    router = modeling.DeepseekV3TopkRouter(config)
    router.e_score_correction_bias.normal_(std=0.1)
    against(
        router,
        6,
        scoring_func="sigmoid",
        renormalize=True,
        bias=router.e_score_correction_bias,
        num_expert_group=8,
        topk_group=3,
        scaling=config.routed_scaling_factor,
    )


@torch.no_grad()
def against(router: torch.nn.Module, top_k: int, **options: Any) -> None:
    """The router's choice of 65 random tokens, each expert's weight up to rounding."""
    for parameter in router.parameters():
        parameter.normal_(std=0.5)
    logits, weights, ids = router(torch.randn(65, 16))
    own_weights, own_ids = check(logits, top_k, **options)
    # transformers leaves the order within a row open where groups are used.
    assert torch.equal(ids.sort(1).values, own_ids.long().sort(1).values)
    torch.testing.assert_close(
        own_weights.gather(1, own_ids.argsort(1)),
        weights.gather(1, ids.argsort(1)).float(),
        rtol=RTOL,
        atol=0,
    )


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [route, route_reference], ids=["op", "reference"])
@pytest.mark.parametrize(
    ("logits", "top_k", "options", "message"),
    [
        (torch.zeros(8), 2, {}, r"float tensor \[T, E\]; got torch.float32 \(8,\)"),
        (torch.zeros(2, 8).int(), 2, {}, r"float tensor \[T, E\]; got torch.int32 \(2, 8\)"),
        (torch.zeros(2, 8), 9, {}, r"top_k \(9\) must be between 1 and the 8 experts"),
        (torch.zeros(2, 8), 0, {}, r"top_k \(0\) must be between 1 and the 8 experts"),
        (torch.zeros(2, 8), 2, dict(scoring_func="tanh"), "unknown scoring_func 'tanh'; choose"),
        (torch.zeros(2, 8), 2, dict(bias=torch.zeros(7)), r"bias must be \[8\], got \(7,\)"),
        (
            torch.zeros(2, 8),
            2,
            dict(softmax_after_topk=True, bias=torch.zeros(8)),
            "softmax_after_topk chooses by the logits; it takes no bias",
        ),
        (torch.zeros(2, 8), 2, dict(num_expert_group=3), r"\(3\) must divide the 8 experts"),
        (torch.zeros(2, 8), 2, dict(num_expert_group=0), r"\(0\) must divide the 8 experts"),
        (torch.zeros(2, 8), 2, dict(topk_group=2), r"topk_group \(2\) must be between 1 and"),
        (
            torch.zeros(2, 8),
            3,
            dict(num_expert_group=4),
            r"top_k \(3\) exceeds the 2 experts of topk_group \(1\) groups",
        ),
    ],
)
def test_bad_arguments(
    logits: Tensor, top_k: int, options: dict, message: str, function: Callable
) -> None:
    with pytest.raises(ValueError, match=message):
        call(logits, top_k, **options, function=function)


# --- the op's contract ----------------------------------------------------------------------------

LOGITS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(9, 8),
    "bfloat16": lambda: torch.randn(9, 8).bfloat16(),
    "float64": lambda: torch.randn(9, 8).double(),
    "no tokens": lambda: torch.randn(0, 8),
    "one token": lambda: torch.randn(1, 8),
    "strided": lambda: torch.randn(8, 9).t(),
    "expanded": lambda: torch.randn(1, 8).expand(9, 8),
}
ROUTED = (3, "sigmoid", False, True, 1e-20, 4, 2, 2.5)


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("bias", [None, torch.zeros(8)])
def test_opcheck(kind: str, bias: Tensor | None) -> None:
    torch.library.opcheck(route, (LOGITS[kind](), bias, *ROUTED))


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("options", [ROUTED, (8, "softmax", True, False, 1e-20, 1, 1, 1.0)])
def test_the_fake_equals_the_real_one(kind: str, options: tuple[Any, ...]) -> None:
    logits = LOGITS[kind]()
    real = route(logits, None, *options)
    with FakeTensorMode() as mode:
        fake = route(mode.from_tensor(logits), None, *options)
    for f, r in zip(fake, real, strict=True):
        assert (f.shape, f.stride(), f.dtype) == (r.shape, r.stride(), r.dtype)


@pytest.mark.parametrize("kind", ["strided", "expanded"])
def test_strided_logits(kind: str) -> None:
    logits = LOGITS[kind]()
    for options in ({}, dict(num_expert_group=4, topk_group=2, bias=torch.randn(8))):
        check(logits, 3, scoring_func="sigmoid", **options)


@pytest.mark.parametrize("formula", [*FORMULAS, *BIASED])
def test_gradcheck(formula: str) -> None:
    logits = torch.randn(2, NUM_EXPERTS, dtype=torch.float64, requires_grad=True)
    options = options_of(formula)

    def weights(logits: Tensor) -> Tensor:
        return call(logits, 5, **options, function=route_reference)[0]

    assert torch.autograd.gradcheck(weights, logits, fast_mode=True)


@pytest.mark.parametrize("scoring_func", SCORING_FUNCTIONS)
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_of_extreme_logits_are_finite(scoring_func: str, renormalize: bool) -> None:
    logits = torch.cat([BAD_ROWS, torch.tensor([[-200.0, 1, 2, 3, -1e30, 0, 0, 1e30]])])
    logits.requires_grad_()
    options = dict(scoring_func=scoring_func, renormalize=renormalize)
    call(logits, 3, **options, function=route_reference)[0].sum().backward()
    assert logits.grad.isfinite().all()


def test_sqrt_softplus_is_the_root_of_softplus() -> None:
    x = torch.linspace(-30, 19, 99, dtype=torch.float64)
    torch.testing.assert_close(sqrt_softplus(x), x.exp().log1p().sqrt(), rtol=1e-13, atol=0)
    assert sqrt_softplus(torch.tensor(-1e4)) == 0


@pytest.mark.parametrize("function", [route, route_reference], ids=["op", "reference"])
def test_compiled_with_any_number_of_tokens(
    function: Callable[..., tuple[Tensor, Tensor]], count_compiles: Callable[[], int]
) -> None:
    bias = torch.randn(8)

    def forward(logits: Tensor) -> tuple[Tensor, Tensor]:
        return function(logits, bias, *ROUTED)

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for num_tokens in (1, 2, 17, 64, 0):
        logits = torch.randn(num_tokens, 8)
        for ours, eager in zip(compiled(logits), forward(logits), strict=True):
            assert torch.equal(ours, eager)
    assert count_compiles() <= 3  # Torch specialises on sizes 0 and 1; all others share a graph.
