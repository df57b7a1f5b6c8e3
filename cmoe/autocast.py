"""Autocast, asked for the meta device too, which torch has no answer for."""

from __future__ import annotations

import contextlib

import torch


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for the device's type."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A scope in which ops on the device compute in the dtypes of their arguments."""
    if is_autocast_on(device):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
