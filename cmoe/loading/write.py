"""One checkpoint tensor on its way into a layer: what is refused before, what is seen after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cmoe.errors import LoadError

_PIECE_BYTES = 4_000_000


class Write(NamedTuple):
    """A checkpoint tensor, or a part of one, with its place in a layer."""

    target: Tensor
    source: Tensor  # of target's shape
    slots: tuple[str, ...]  # the places that it fills
    accept: Callable[[Tensor], None] | None = None  # ValueError for values that cannot be used

    def check(self, key: str, *, is_stored: bool = False) -> None:
        """LoadError for a source without values, a target without storage, dtypes that clash.

        is_stored: the source stands for a tensor that is read later.
        """
        source, target = self.source, self.target
        # Both on the meta device is a rehearsal.
        if target.is_meta and not source.is_meta:
            raise LoadError(
                f"{key}: the layer is on the meta device; call to_empty(device=...) first"
            )
        if source.is_meta and not target.is_meta and not is_stored:
            raise LoadError(f"{key}: a tensor on the meta device has no values to load")
        if not _is_convertible(source.dtype, target.dtype):
            takes = "; it takes float dtypes of 16 bits or more" if _is_wide(target.dtype) else ""
            raise LoadError(f"{key} has dtype {source.dtype}; its place has {target.dtype}{takes}")

    def check_values(self, key: str) -> None:
        """LoadError for values that the place cannot use."""
        if self.accept is not None and not self.source.is_meta:
            try:
                self.accept(self.source)
            except ValueError as error:
                raise LoadError(f"{key}: {error}") from error

    def pieces(self) -> Iterator[Write]:
        """The same write in parts of at most 4 MB, as far as its first dimension allows."""
        source, target = self.source, self.target
        if not source.dim() or source.nbytes <= _PIECE_BYTES:
            yield self
            return
        step = max(1, _PIECE_BYTES * len(source) // source.nbytes)
        for start in range(0, len(source), step):
            rows = slice(start, start + step)
            yield self._replace(source=source[rows], target=target[rows])

    def is_identity(self) -> bool:
        """The source is the target's own memory: there is nothing to do."""
        source, target = self.source, self.target
        return (
            source.data_ptr() == target.data_ptr()
            and source.dtype == target.dtype
            and source.stride() == target.stride()
            and source.device == target.device
        )

    def copy(self) -> bool:
        """Writes; whether finite values became infinite in the target's dtype."""
        if self.target.is_meta or self.is_identity():
            return False
        with torch.no_grad():
            self.target.copy_(self.source)
            return _overflowed(self.source, self.target)


class WrittenMemory:
    """The memory that a load writes to, so that no source is read after it was written over."""

    def __init__(self) -> None:
        self._ranges: dict[tuple[torch.device, int], tuple[int, int]] = {}

    def enter(self, target: Tensor) -> None:
        """A place that the load writes to."""
        if target.is_meta or not target.numel():
            return
        key, start, stop = _extent(target)
        known = self._ranges.get(key, (start, stop))
        self._ranges[key] = (min(start, known[0]), max(stop, known[1]))

    def check(self, key: str, write: Write) -> None:
        """LoadError for a source in that memory, unless it is the very place that it goes to."""
        if write.source.is_meta or not write.source.numel() or write.is_identity():
            return
        storage, start, stop = _extent(write.source)
        known = self._ranges.get(storage)
        if known is not None and start < known[1] and known[0] < stop:
            raise LoadError(
                f"{key} shares memory with the layer's own weights, which the load writes over; "
                "give a copy (tensor.clone())"
            )


def _extent(tensor: Tensor) -> tuple[tuple[torch.device, int], int, int]:
    """The storage of a tensor that is not empty, its first byte, the byte after its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    storage = (tensor.device, tensor.untyped_storage().data_ptr())
    return storage, start, start + (last + 1) * tensor.element_size()


def _is_convertible(source: torch.dtype, target: torch.dtype) -> bool:
    """Narrow floats are codes that need a scale, as integers do."""
    return source == target or (_is_wide(source) and _is_wide(target)) or _are_ints(source, target)


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _are_ints(*dtypes: torch.dtype) -> bool:
    others = (torch.bool,)
    return not any(d.is_floating_point or d.is_complex or d in others for d in dtypes)


def _overflowed(source: Tensor, target: Tensor) -> bool:
    """One pass over the source where its dtype reaches further; more only where that finds any."""
    if not source.numel() or not _is_wide(target.dtype):
        return False
    limit = torch.finfo(target.dtype).max
    if torch.finfo(source.dtype).max <= limit:
        return False
    low, high = source.aminmax()
    if -limit <= float(low) and float(high) <= limit:
        return False
    return bool((target.to(source.device).isinf() & source.isfinite()).any())
