"""Which rank holds which physical expert.   E logical experts, P physical experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from cmoe.config import MoEConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertMapManager:
    """The placement of P physical experts on ep_size ranks, as tables.

    linear: contiguous runs. round_robin: physical expert p on rank p % ep_size. The first
    P % ep_size ranks hold one expert more than the others. Physical experts past the logical ones
    are replicas: physical p >= E holds logical expert (p - E) % E.
    """

    num_logical_experts: int
    num_physical_experts: int
    ep_size: int = 1
    ep_rank: int = 0
    placement: Literal["linear", "round_robin"] = "linear"

    def __post_init__(self) -> None:
        if not 0 <= self.ep_rank < self.ep_size:
            raise ValueError(f"ep_rank ({self.ep_rank}) must be in [0, ep_size = {self.ep_size})")
        if not 1 <= self.num_logical_experts <= self.num_physical_experts:
            raise ValueError(
                f"num_physical_experts ({self.num_physical_experts}) must be at least "
                f"num_logical_experts ({self.num_logical_experts}), which must be positive"
            )
        if self.ep_size > self.num_physical_experts:
            raise ValueError(
                f"ep_size ({self.ep_size}) must not exceed the {self.num_physical_experts} "
                "physical experts"
            )
        if self.placement not in ("linear", "round_robin"):
            raise ValueError(f"unknown placement {self.placement!r}; choose linear or round_robin")

    @classmethod
    def from_config(cls, config: MoEConfig) -> ExpertMapManager:
        """The placement that a layer's config asks for."""
        return cls(
            num_logical_experts=config.num_experts,
            num_physical_experts=config.num_physical_experts(),
            ep_size=config.parallel.ep_size,
            ep_rank=config.parallel.ep_rank,
            placement=config.parallel.expert_placement,
        )

    def physical_experts_of(self, rank: int) -> range:
        """The physical experts on a rank, in the order of their local rows."""
        if self.placement == "round_robin":
            return range(rank, self.num_physical_experts, self.ep_size)
        base, longer = divmod(self.num_physical_experts, self.ep_size)
        start = rank * base + min(rank, longer)
        return range(start, start + base + (rank < longer))

    def num_local_experts(self) -> int:
        """How many physical experts this rank holds."""
        return len(self.physical_experts_of(self.ep_rank))

    def local_rows_of(self, logical_expert: int) -> list[int]:
        """This rank's weight rows that hold a logical expert; empty when it holds none."""
        here, num_logical = self.physical_experts_of(self.ep_rank), self.num_logical_experts
        if logical_expert >= num_logical:
            return []
        copies = range(logical_expert, self.num_physical_experts, num_logical)
        return [here.index(physical) for physical in copies if physical in here]

    def expert_map(self) -> Tensor | None:
        """[P] int32, physical expert -> this rank's row or -1; None on one rank (identity)."""
        if self.ep_size == 1:
            return None
        table = torch.full((self.num_physical_experts,), -1, dtype=torch.int32, device="cpu")
        here = self.physical_experts_of(self.ep_rank)
        table[list(here)] = torch.arange(len(here), dtype=torch.int32, device="cpu")
        return table

    def physical_to_logical(self) -> Tensor:
        """[P] int32, the logical expert that each physical one holds."""
        logical = [self._logical(physical) for physical in range(self.num_physical_experts)]
        return torch.tensor(logical, dtype=torch.int32, device="cpu")

    def owner_of(self, physical_expert: int) -> int:
        """The rank that holds a physical expert; ValueError for one outside [0, P)."""
        if not 0 <= physical_expert < self.num_physical_experts:
            raise ValueError(
                f"physical expert {physical_expert} is not in [0, {self.num_physical_experts})"
            )
        return next(
            rank
            for rank in range(self.ep_size)
            if physical_expert in self.physical_experts_of(rank)
        )

    def _logical(self, physical: int) -> int:
        extra = physical - self.num_logical_experts
        return physical if extra < 0 else extra % self.num_logical_experts
