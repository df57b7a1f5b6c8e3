"""The expert activations inside a kernel.

Every formula of `cmoe/activation.py`, in float32. Comparisons are written so that NaN stays NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activated(g, u, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation of gate part g, up part u; u is None for non-gated forms, limit for no clamp.

    ACTIVATION: the name without `_no_mul`.
    """
    if limit is not None:
        g = tl.where(g > limit, limit, g)
    if ACTIVATION == "silu":
        a = g / (1 + tl.exp(-g))
    elif ACTIVATION == "swigluoai":
        a = g / (1 + tl.exp(-alpha * g))
    elif ACTIVATION == "gelu":
        a = 0.5 * g * (1 + tl.erf(g * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(z)) / 2 is the sigmoid of 2z; 1.5957691216057308 = 2 * sqrt(2 / pi).
        a = g / (1 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    else:
        tl.static_assert(ACTIVATION == "relu2", "unknown activation")
        a = tl.where(g < 0, 0.0, g)
        a = a * a
    if u is not None:
        if limit is not None:
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        if ACTIVATION == "swigluoai":
            u = u + 1
        a = a * u
    return a
