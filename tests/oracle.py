"""The definition of correct: one token, one slot, one expert at a time, in fp64.

Nothing here is taken from the library. T tokens, H hidden, I intermediate, E expert rows, P expert
ids, K experts per token, N = 2I for gated activations, I for non-gated.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

GATED = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai")


def naive_route(
    logits: Tensor,
    top_k: int,
    *,
    bias: Tensor | None = None,
    scoring_func: str = "softmax",
    softmax_after_topk: bool = False,
    renormalize: bool = False,
    renormalize_epsilon: float = 1e-20,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scaling: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Weights [T, K] float64 with ids [T, K] int64; best choice first, in ties the lower id."""
    largest = torch.finfo(torch.promote_types(logits.dtype, torch.float32)).max
    num_experts = logits.shape[1]
    weights, ids = [], []
    for row in logits.tolist():
        x = [_cleaned(value, largest) for value in row]
        scores = _scores(x, scoring_func)
        # Softmax may round two scores to one number where the logits still differ.
        choice = x
        if bias is not None:
            biased = (s + b for s, b in zip(scores, bias.tolist(), strict=True))
            choice = [_cleaned(value, largest) for value in biased]
        allowed = _experts_of_best_groups(
            choice, num_expert_group, topk_group, num_best=1 if bias is None else 2
        )
        chosen = _first_largest(choice, allowed, top_k)
        if softmax_after_topk:
            w = _scores([x[e] for e in chosen], "softmax")
        else:
            w = [scores[e] for e in chosen]
            if renormalize:
                w = [value / (sum(w) + renormalize_epsilon) for value in w]
        weights.append([value * scaling for value in w])
        ids.append(chosen)
    assert all(e < num_experts for row in ids for e in row)
    shape = (logits.shape[0], top_k)
    return (
        torch.tensor(weights, dtype=torch.float64).view(shape),
        torch.tensor(ids, dtype=torch.int64).view(shape),
    )


def _cleaned(value: float, largest: float) -> float:
    return -largest if math.isnan(value) else min(max(value, -largest), largest)


def _scores(x: list[float], scoring_func: str) -> list[float]:
    if scoring_func == "softmax":
        exponentials = [math.exp(value - max(x)) for value in x]
        return [value / sum(exponentials) for value in exponentials]
    if scoring_func == "sigmoid":
        return [1 / (1 + math.exp(-v)) if v > -700 else 0.0 for v in x]
    assert scoring_func == "sqrtsoftplus"
    return [math.sqrt(max(v, 0.0) + math.log1p(math.exp(-abs(v)))) for v in x]


def _first_largest(values: list[float], candidates: list[int], count: int) -> list[int]:
    return sorted(candidates, key=lambda index: (-values[index], index))[:count]


def _experts_of_best_groups(
    choice: list[float], num_group: int, topk_group: int, num_best: int
) -> list[int]:
    size = len(choice) // num_group
    groups = [list(range(g * size, (g + 1) * size)) for g in range(num_group)]
    marks = [sum(sorted((choice[e] for e in group), reverse=True)[:num_best]) for group in groups]
    best = _first_largest(marks, list(range(num_group)), topk_group)
    return [e for g in sorted(best) for e in groups[g]]


def naive_activation(g: Tensor, u: Tensor | None, name: str, alpha: float, limit: float | None):
    """The expert activation of gate part g, up part u; u is None for non-gated forms."""
    if limit is not None:
        g = g.clamp(max=limit)
        u = None if u is None else u.clamp(min=-limit, max=limit)
    if name == "swigluoai":
        return g / (1 + torch.exp(-alpha * g)) * (u + 1)
    kind = name.removesuffix("_no_mul")
    if kind == "silu":
        a = g / (1 + torch.exp(-g))
    elif kind == "gelu":
        a = 0.5 * g * (1 + torch.erf(g / math.sqrt(2)))
    elif kind == "gelu_tanh":
        a = 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g * g * g)))
    else:
        assert kind == "relu2"
        a = torch.where(g > 0, g * g, torch.zeros_like(g))
    return a if u is None else a * u


def naive_experts(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    expert_map: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    interleaved: bool = False,
    apply_router_weight_on_input: bool = False,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """y[t] = sum over k of w[t, k] * expert id[t, k] of x[t]; [T, H] in `dtype`.

    x: [T, H]; w13: [E, N, H]; w2: [E, H, I]; topk_weights, topk_ids: [T, K]; biases: [E, N],
    [E, H]; expert_map: [P]. With another dtype every step is rounded to it: the plain reference of
    low precision.
    """
    x, w13, w2, topk_weights = (tensor.to(dtype) for tensor in (x, w13, w2, topk_weights))
    y = torch.zeros(x.shape, dtype=dtype)
    for t in range(x.shape[0]):
        for k in range(topk_ids.shape[1]):
            e = int(topk_ids[t, k])
            if e >= 0 and expert_map is not None:
                e = int(expert_map[e])
            if e < 0:
                continue
            weight = topk_weights[t, k]
            h = w13[e] @ (x[t] * weight if apply_router_weight_on_input else x[t])
            if w13_bias is not None:
                h = h + w13_bias[e].to(dtype)
            if activation not in GATED:
                g, u = h, None
            elif interleaved:
                g, u = h[0::2], h[1::2]
            else:
                g, u = h[: h.shape[0] // 2], h[h.shape[0] // 2 :]
            out = w2[e] @ naive_activation(g, u, activation, alpha, limit)
            if w2_bias is not None:
                out = out + w2_bias[e].to(dtype)
            y[t] += out if apply_router_weight_on_input else weight * out
    return y


def max_error(actual: Tensor, exact: Tensor) -> float:
    """The largest absolute difference; NaN when either has one."""
    if actual.numel() == 0:
        return 0.0
    return (actual.double() - exact.double()).abs().max().item()


def error_budget(plain: Tensor, exact: Tensor, dtype: torch.dtype) -> float:
    """Twice the error of an independent reference in `dtype`, plus one rounding step of `dtype`.

    plain: that reference's result; exact: the oracle's. The step is taken at the largest value.
    """
    largest = exact.abs().max().item() if exact.numel() else 0.0
    return 2 * max_error(plain, exact) + torch.finfo(dtype).eps * largest


def assert_within_budget(actual: Tensor, exact: Tensor, plain: Tensor) -> None:
    """actual: the library's result, whose dtype sets the rounding step."""
    assert actual.shape == exact.shape
    error, budget = max_error(actual, exact), error_budget(plain, exact, actual.dtype)
    assert error <= budget, f"error {error:.3g} exceeds the budget {budget:.3g}"
