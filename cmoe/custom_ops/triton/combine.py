"""The weighted sum of each token's routed rows.

T tokens, K experts per token, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cmoe.custom_ops.triton.expert_id import expert_of


@triton.jit
def combine(
    rows_ptr, topk_weights_ptr, ids_ptr, expert_map, y_ptr,
    hidden, num_ids, num_experts, stride_it, stride_ik, map_stride, stride_wt, stride_wk,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, WEIGHT_ON_INPUT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over k of weight[t, k] * rows[t * K + k], in float32, always in one order.

    rows: [T * K, H], contiguous, unwritten where a slot has no expert; y: [T, H], contiguous.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slots = tl.arange(0, SLOTS)
    exists = slots < TOP_K
    ids = tl.load(ids_ptr + token * stride_it + slots * stride_ik, mask=exists, other=-1)
    used = expert_of(ids, expert_map, map_stride, num_ids, num_experts) >= 0
    row_ptrs = rows_ptr + (token * TOP_K + slots)[:, None] * hidden + columns[None, :]
    loaded = used[:, None] & (columns < hidden)[None, :]
    rows = tl.load(row_ptrs, mask=loaded, other=0.0).to(tl.float32)
    if not WEIGHT_ON_INPUT:
        weight_ptrs = topk_weights_ptr + token * stride_wt + slots * stride_wk
        rows *= tl.load(weight_ptrs, mask=used, other=0.0)[:, None]
    y = tl.sum(rows, 0).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + token * hidden + columns, y, mask=columns < hidden)
