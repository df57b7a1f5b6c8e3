"""A tensor of a safetensors file, mapped into memory piece by piece."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from cmoe.checkpoint.header import TensorInfo
from cmoe.errors import LoadError
from cmoe.loading.stored_tensor import StoredTensor


class MappedTensor(StoredTensor):
    """Each piece has a mapping of its own, which ends with the last use of the piece."""

    def __init__(self, info: TensorInfo) -> None:
        self._info = info

    def on_meta(self) -> Tensor:
        """The tensor's shape and dtype."""
        return torch.empty(self._info.shape, dtype=self._info.dtype, device="meta")

    def read(self, view: Tensor) -> Tensor:
        """The view's values, in memory that nobody else has; LoadError when the file changed."""
        steps = zip(view.shape, view.stride(), strict=True)
        num_elements = 1 + sum((size - 1) * stride for size, stride in steps)
        if not view.numel():
            return torch.empty(view.shape, dtype=view.dtype)
        start = self._info.start + int(view.storage_offset()) * view.element_size()
        flat = _mapped(self._info, start, num_elements * view.element_size())
        return flat.view(view.dtype).as_strided(view.shape, view.stride())


def _mapped(info: TensorInfo, start: int, length: int) -> Tensor:
    """Bytes of the file."""
    page_start = start - start % mmap.ALLOCATIONGRANULARITY
    offset = start - page_start
    try:
        with info.shard.open("rb") as file:
            # Private rather than read-only: torch warns of memory that it must not write to.
            pages = mmap.mmap(
                file.fileno(), offset + length, access=mmap.ACCESS_COPY, offset=page_start
            )
    except (OSError, ValueError) as error:
        raise LoadError(f"{info.shard} has changed since it was opened ({error})") from error
    flat = torch.frombuffer(pages, dtype=torch.uint8, count=length, offset=offset)
    # Headers need not end on a multiple of the element size.
    return flat.clone() if offset % info.dtype.itemsize else flat
