"""Router logits to weights with expert ids, for every router whose formula is closed.

T tokens, E experts, K experts per token, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cmoe.custom_ops.registration import define_op, of_real_calls_too

SCHEMA = (
    "(Tensor logits, Tensor? bias, int top_k, str scoring_func, bool softmax_after_topk,"
    " bool renormalize, float renormalize_epsilon, int num_expert_group, int topk_group,"
    " float scaling) -> (Tensor, Tensor)"
)
"""The one signature that every backend's op has."""


class Formula(NamedTuple):
    """What `route` takes behind the logits, see `route_reference`."""

    bias: Tensor | None
    top_k: int
    scoring_func: str
    softmax_after_topk: bool
    renormalize: bool
    renormalize_epsilon: float
    num_expert_group: int
    topk_group: int
    scaling: float


SCORING_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def route_reference(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring_func: str,
    softmax_after_topk: bool,
    renormalize: bool,
    renormalize_epsilon: float,
    num_expert_group: int,
    topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] float32 with ids [T, K] int32, largest choice first.

    logits: [T, E], any float dtype, read as float32 (float64 stays); bias: [E] float32.
    1. clean: NaN becomes the lowest finite float, infinities the outermost finite ones.
    2. score: p = softmax(x), sigmoid(x) or sqrt(softplus(x)).
    3. choose: by p + bias, cleaned like x; without a bias by x, which orders experts as p does.
       With G > 1 groups only the best `topk_group` groups stay; a group's mark is the sum of its
       two best choices with a bias, its best one without.
    4. weigh: p at the chosen ids (never p + bias), when `renormalize` divided by their sum plus
       `renormalize_epsilon`; with `softmax_after_topk` instead the softmax over the chosen logits.
    5. scale by `scaling`.
    The lower id wins every tie, among experts, among groups. A row of NaN or -inf alone takes the
    first K ids, with equal weights under softmax, weights of 0 under the other scores.
    ValueError for sizes that do not fit, for a bias with `softmax_after_topk`.
    Sources: softmax top-k, Mixtral/Qwen3-MoE; softmax_after_topk, gpt-oss; grouped without a bias,
    DeepSeek-V2 (arXiv 2405.04434); with a bias ("noaux_tc"), DeepSeek-V3 (arXiv 2412.19437), whose
    epsilon is 1e-20; of 1e-6, LFM2-MoE (Lfm2MoeTopKRouter of transformers).
    """
    check_route(logits, bias, top_k, scoring_func, softmax_after_topk, num_expert_group, topk_group)
    x = _cleaned(logits if logits.dtype == torch.float64 else logits.float())
    scores = x if softmax_after_topk else _score(x, scoring_func)
    choice = x if bias is None else _cleaned(scores + bias)
    if num_expert_group > 1:
        choice = _keep_best_groups(choice, num_expert_group, topk_group, 1 if bias is None else 2)
    ids = first_largest(choice, top_k)
    weights = scores.gather(1, ids)
    if softmax_after_topk:
        weights = weights.softmax(-1)
    elif renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + renormalize_epsilon)
    # A plain `to` keeps the strides of the slice, for one token or none.
    ids = ids.to(torch.int32, memory_format=torch.contiguous_format)
    return weights * scaling, ids


def _cleaned(x: Tensor) -> Tensor:
    finite = torch.finfo(x.dtype)
    return torch.nan_to_num(x, nan=finite.min, posinf=finite.max, neginf=finite.min)


def _score(x: Tensor, scoring_func: str) -> Tensor:
    if scoring_func == "softmax":
        return x.softmax(-1)
    if scoring_func == "sigmoid":
        return x.sigmoid()
    return sqrt_softplus(x)


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(softplus(x)), with a gradient of 0 (not NaN) where softplus underflows to 0."""
    y = F.softplus(x)
    positive = y > 0
    return torch.where(positive, torch.where(positive, y, 1).sqrt(), 0)


def first_largest(x: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row, the lower index first among equals."""
    return x.detach().sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _keep_best_groups(choice: Tensor, num_group: int, topk_group: int, best: int) -> Tensor:
    """Choice with -inf outside the best groups, so that no negative choice loses to the mask."""
    num_tokens, num_experts = choice.shape
    size = num_experts // num_group
    grouped = choice.view(num_tokens, num_group, size)
    marks = grouped.topk(min(best, size), dim=-1).values.sum(-1)
    kept = torch.zeros_like(marks, dtype=torch.bool)
    kept = kept.scatter(1, first_largest(marks, topk_group), True)
    return grouped.masked_fill(~kept[..., None], float("-inf")).view(num_tokens, num_experts)


def check_route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring_func: str,
    softmax_after_topk: bool,
    num_expert_group: int,
    topk_group: int,
) -> None:
    """ValueError for arguments that no backend's `route` can serve."""
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be a float tensor [T, E]; got {logits.dtype} {tuple(logits.shape)}"
        )
    num_experts = logits.shape[1]
    if scoring_func not in SCORING_FUNCTIONS:
        raise ValueError(
            f"unknown scoring_func {scoring_func!r}; choose one of {', '.join(SCORING_FUNCTIONS)}"
        )
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k ({top_k}) must be between 1 and the {num_experts} experts")
    if bias is not None and tuple(bias.shape) != (num_experts,):
        raise ValueError(f"bias must be [{num_experts}], got {tuple(bias.shape)}")
    if bias is not None and softmax_after_topk:
        raise ValueError("softmax_after_topk chooses by the logits; it takes no bias")
    if not 1 <= topk_group <= num_expert_group or num_experts % num_expert_group:
        raise ValueError(
            f"num_expert_group ({num_expert_group}) must divide the {num_experts} experts and "
            f"topk_group ({topk_group}) must be between 1 and num_expert_group"
        )
    if top_k > topk_group * (num_experts // num_expert_group):
        raise ValueError(
            f"top_k ({top_k}) exceeds the {topk_group * (num_experts // num_expert_group)} experts "
            f"of topk_group ({topk_group}) groups"
        )


@of_real_calls_too
def route_fake(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring_func: str,
    softmax_after_topk: bool,
    renormalize: bool,
    renormalize_epsilon: float,
    num_expert_group: int,
    topk_group: int,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Shape, stride, dtype of every backend's result."""
    shape = (logits.shape[0], top_k)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return logits.new_empty(shape, dtype=dtype), logits.new_empty(shape, dtype=torch.int32)


route = define_op("cmoe::route", SCHEMA, kernel=route_reference, fake=route_fake)
"""The op of the reference backend."""
