"""Which parameters of a model lie in the same memory."""

from __future__ import annotations

from torch import Tensor, nn


def sharers(model: nn.Module) -> dict[str, str]:
    """Each parameter that shares memory with another one, with the name of such a one.

    Judged by the addresses from each tensor's first element to its last, so tensors that lie
    between one another count too. Parameters on the meta device have no memory.
    """
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + _extent(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
        if not p.is_meta and p.numel()
    )
    found: dict[str, str] = {}
    last = None  # of the spans so far the one that reaches furthest
    for span in spans:
        device, start, end, name = span
        if last is not None and last[0] == device and start < last[2]:
            found.setdefault(name, last[3])
            found.setdefault(last[3], name)
        if last is None or last[0] != device or end > last[2]:
            last = span
    return found


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    steps = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(steps)) * tensor.element_size()
