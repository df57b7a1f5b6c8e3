"""The contract of a tensor that lies elsewhere, read piece by piece as it is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor


class StoredTensor(ABC):
    """Shape and dtype now, values later: what `load_weights` takes in place of a Tensor.

    A load reads no more of it at a time than one expert's part, or 4 MB.
    """

    @abstractmethod
    def on_meta(self) -> Tensor:
        """A tensor on the meta device with the same shape, dtype, contiguous strides."""

    @abstractmethod
    def read(self, view: Tensor) -> Tensor:
        """The values of a view of `on_meta()`, on the CPU."""
