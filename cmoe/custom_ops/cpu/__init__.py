"""The cpu backend: C++ kernels for x86 (AVX-512, AVX2), in generic vectors for the rest."""

from cmoe.custom_ops.cpu.backend import BACKEND

__all__ = ["BACKEND"]
