"""Which experts each token of a benchmark goes to.

T tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bench.shapes import Shape

ZIPF_EXPONENT = 1.0
"""Popularity of the r-th expert is (r + 1) ** -exponent in the skewed distribution."""


def _uniform(shape: Shape, tokens: int, generator: torch.Generator) -> Tensor:
    scores = torch.rand(tokens, shape.num_experts, generator=generator)
    return scores.topk(shape.top_k, dim=1).indices


def _skewed(shape: Shape, tokens: int, generator: torch.Generator) -> Tensor:
    """K experts without replacement by Zipf popularity, which expert is popular drawn anew."""
    ranks = torch.randperm(shape.num_experts, generator=generator)
    popularity = (ranks + 1.0) ** -ZIPF_EXPONENT
    return torch.multinomial(popularity.expand(tokens, -1), shape.top_k, generator=generator)


def _recorded(path: str) -> Callable[[Shape, int, torch.Generator], Tensor]:
    """Rows of ids recorded from a model: a tensor [tokens, K] saved with torch.save."""
    if not Path(path).is_file():
        raise ValueError(f"routing {path!r} is neither uniform, skewed nor a file of recorded ids")
    ids = torch.load(path, weights_only=True)

    def draw(shape: Shape, tokens: int, generator: torch.Generator) -> Tensor:
        if ids.dim() != 2 or ids.shape[1] != shape.top_k or int(ids.max()) >= shape.num_experts:
            raise ValueError(
                f"{path} holds ids {tuple(ids.shape)} up to {int(ids.max())}; shape {shape.name} "
                f"needs [tokens, {shape.top_k}] below {shape.num_experts}"
            )
        start = int(torch.randint(ids.shape[0], (1,), generator=generator))
        rows = (torch.arange(tokens) + start) % ids.shape[0]
        return ids[rows].long()

    return draw


def distribution(name: str) -> Callable[[Shape, int, torch.Generator], Tensor]:
    """The distribution called `name`: uniform, skewed, or the path of recorded ids."""
    known = {"uniform": _uniform, "skewed": _skewed}
    return known[name] if name in known else _recorded(name)


def num_active(ids: Tensor) -> int:
    """Distinct experts among the ids."""
    return int(ids.unique().numel())


def draw_ids(shape: Shape, tokens: int, *, routing: str, num_draws: int, seed: int) -> list[Tensor]:
    """`num_draws` routings [tokens, K] int32 that all touch about the same number of experts.

    Of four times as many candidates those nearest to their median number of active experts are
    kept, so that a small sample of calls does not measure the luck of the draw: at T = 4 one
    routing touches 26 experts, the next one 31, and the time follows.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = distribution(routing)
    candidates = [draw(shape, tokens, generator) for _ in range(4 * num_draws)]
    active = [num_active(ids) for ids in candidates]
    median = sorted(active)[len(active) // 2]
    order = sorted(range(len(candidates)), key=lambda index: abs(active[index] - median))
    return [candidates[index].to(torch.int32) for index in sorted(order[:num_draws])]
