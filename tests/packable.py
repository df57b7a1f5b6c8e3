"""Layers whose weights can be packed, with a backend that reads them so on every machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

import cmoe
from cmoe.custom_ops.backends import (
    Backend,
    Kernels,
    LayerSpec,
    register_backend,
    unregister_backend,
)
from cmoe.custom_ops.fused_experts import fused_experts
from cmoe.custom_ops.route import route
from tests.layers import config_of

HIDDEN, INTERMEDIATE = 64, 32


class Strips(Backend):
    """The kernels of the reference, which read packed weights; so do not all dtypes here."""

    name = "strips"

    def refuses(self, spec: LayerSpec) -> tuple[str, ...]:
        return () if spec.device.type == "cpu" else (f"runs on cpu, not on {spec.device.type}",)

    def refuses_packed(self, spec: LayerSpec) -> tuple[str, ...]:
        wide = spec.dtype in (torch.float32, torch.bfloat16)
        return () if wide else (f"reads no packed weights of {spec.dtype}",)

    def kernels(self) -> Kernels:
        return Kernels(fused_experts, route)


@contextlib.contextmanager
def strips_backend() -> Iterator[None]:
    """The backend ahead of all others."""
    register_backend(Strips())
    try:
        yield
    finally:
        unregister_backend(Strips.name)


def packable_config(**changes: Any) -> cmoe.MoEConfig:
    """config_of, in whole strips."""
    return config_of(**{"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, **changes})
