"""A step of a matrix product on the tensor cores."""

from __future__ import annotations

import triton
import triton.language as tl

from cmoe.environment import triton_is_interpreted

_INTERPRETED = tl.constexpr(triton_is_interpreted())


@triton.jit
def multiply_add(a, b, sums):
    """sums + a @ b in float32; float32 operands are not rounded to tf32."""
    if _INTERPRETED:
        # The interpreter multiplies the bits of bfloat16 as if they were integers.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")
