"""The triton backend: one source for CUDA, ROCm devices."""

from cmoe.custom_ops.triton.backend import BACKEND

__all__ = ["BACKEND"]
