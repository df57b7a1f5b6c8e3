"""The contract of a number format of the expert weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from cmoe.config import MoEConfig
from cmoe.custom_ops.backends import Kernels
from cmoe.routing import Routing


class QuantMethod(ABC):
    """Says which tensors a format needs, how the experts are computed from them."""

    @abstractmethod
    def create_weights(
        self, config: MoEConfig, num_local_experts: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape with dtype of every parameter of RoutedExperts, by name."""

    @abstractmethod
    def apply(
        self,
        config: MoEConfig,
        weights: Mapping[str, Tensor],
        expert_map: Tensor | None,
        kernels: Kernels,
        x: Tensor,
        routing: Routing,
    ) -> Tensor:
        """x: [T, H], weights: the parameters by name -> the experts' weighted sums [T, H]."""
