"""The routed experts on a GPU: the op, with the launches behind it.

Nothing here waits for the device or asks it for a number: grids come from bounds, every buffer from
torch's allocator, so that a CUDA graph captures the call whatever the routing is.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from cmoe.custom_ops.fused_experts import (
    SCHEMA,
    check_routing,
    check_weights,
    fused_experts_fake,
)
from cmoe.custom_ops.registration import define_op
from cmoe.custom_ops.triton.alone import down_alone, gate_up_alone
from cmoe.custom_ops.triton.combine import combine
from cmoe.custom_ops.triton.down import down
from cmoe.custom_ops.triton.gate_up import gate_up
from cmoe.custom_ops.triton.launch import launching, with_scratch
from cmoe.custom_ops.triton.parameters import (
    ROWS_ALONE,
    THREADS,
    TMA_WARPS,
    Device,
    Parameters,
    Shape,
    bucket_of,
)
from cmoe.custom_ops.triton.sort import sort_rows
from cmoe.custom_ops.triton.tuned import parameters_for

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_INTERPRETER = Device(name="interpreter", shared_bytes=2**18)

_SLOTS_AT_ONCE = 8
"""Experts of a token that `down_alone` streams at a time."""

_COMBINE_ELEMENTS = 4096
"""Values that a program of `combine` holds."""


class Call(NamedTuple):
    """The arguments of the op, in the order of its schema."""

    x: Tensor
    w13: Tensor
    w2: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    expert_map: Tensor | None
    activation: str
    alpha: float
    limit: float | None
    interleaved: bool
    weight_on_input: bool

    def parts(self) -> str:
        """How the rows of w13 are laid out: `gate`, `halves`, `pairs`."""
        if self.w13.shape[1] == self.w2.shape[2]:
            return "gate"
        return "pairs" if self.interleaved else "halves"

    def shape(self) -> Shape:
        """What the choice of parameters knows of the layer."""
        num_experts, hidden, intermediate = self.w2.shape
        return _shape(
            num_experts,
            self.topk_ids.shape[1],
            hidden,
            intermediate,
            self.x.dtype,
            self.parts() != "gate",
            self.w13.stride(2) != 1 and self.w13.stride(1) == 1,
            self._is_aligned(),
        )

    def _is_aligned(self) -> bool:
        unit = 16 // self.x.element_size()
        return self.w2.shape[2] % unit == 0 and all(
            weights.data_ptr() % 16 == 0
            and weights.stride(0) % unit == 0
            and max(weights.stride()[1:]) % unit == 0
            for weights in (self.w13, self.w2)
        )

    def ids(self) -> tuple[int, int, int, int, int]:
        """How to read an expert id: P, E, the strides of topk_ids, the stride of expert_map."""
        num_experts = self.w2.shape[0]
        stride_t, stride_k = self.topk_ids.stride()
        if self.expert_map is None:
            return num_experts, num_experts, stride_t, stride_k, 0
        return self.expert_map.shape[0], num_experts, stride_t, stride_k, self.expert_map.stride(0)

    def w13_strides(self) -> tuple[int, int, int, int]:
        """Of w13, then the distance of its halves."""
        stride_e, stride_n, stride_k = self.w13.stride()
        return stride_e, stride_n, stride_k, self.w2.shape[2] * stride_n

    def w13_bias_strides(self) -> tuple[int, int, int]:
        """Of w13_bias, then the distance of its halves; zeros where there is no bias."""
        if self.w13_bias is None:
            return 0, 0, 0
        stride_e, stride_n = self.w13_bias.stride()
        return stride_e, stride_n, self.w2.shape[2] * stride_n

    def w2_bias_strides(self) -> tuple[int, ...]:
        """Zeros where there is no bias."""
        return (0, 0) if self.w2_bias is None else self.w2_bias.stride()


def fused_experts_with(parameters: Parameters, call: Call) -> Tensor:
    """The op, with parameters of the caller's choice. Raises ValueError as the reference does.

    The value of an id is known on the device alone, so that one outside of [-1, P) raises nothing:
    like -1 it contributes nothing.
    """
    _check(call)
    return _run(parameters, call)


def _run(parameters: Parameters, call: Call) -> Tensor:
    x = call.x
    if 0 in (*call.topk_ids.shape, call.w2.shape[0]):  # nobody has anything to say
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() > 0:
        run = _run_alone if parameters.block_m == ROWS_ALONE else _run_sorted
        launch = functools.partial(run, parameters, call, y)
        with launching(x.device):
            if parameters.copies() == {THREADS}:
                launch()
            else:
                with_scratch(launch)
    return y


def _run_alone(parameters: Parameters, call: Call, y: Tensor) -> None:
    x, top_k = call.x, call.topk_ids.shape[1]
    num_tokens, hidden = x.shape
    intermediate = call.w2.shape[2]
    a = torch.empty((num_tokens * top_k, intermediate), dtype=x.dtype, device=x.device)
    routing = (call.topk_weights, call.topk_ids, call.expert_map)
    tile = parameters.gate_up
    gate_up_alone[(a.shape[0] * triton.cdiv(intermediate, tile.block_n),)](
        x, call.w13, call.w13_bias, *routing, a,
        call.alpha, call.limit, hidden, intermediate, a.shape[0],
        *x.stride(), *call.w13_strides(), *call.w13_bias_strides(),
        *call.ids(), call.topk_weights.stride(0),
        TOP_K=top_k, ACTIVATION=_formula(call.activation), PARTS=call.parts(),
        WEIGHT_ON_INPUT=call.weight_on_input, IS_EVEN=tile.divides(intermediate, hidden),
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    tile = parameters.down
    down_alone[(num_tokens * triton.cdiv(hidden, tile.block_n),)](
        a, call.w2, call.w2_bias, *routing, y,
        hidden, intermediate, num_tokens,
        *call.w2.stride(), *call.w2_bias_strides(), *call.ids(), *call.topk_weights.stride(),
        TOP_K=top_k, SLOTS=min(triton.next_power_of_2(top_k), _SLOTS_AT_ONCE),
        WEIGHT_ON_INPUT=call.weight_on_input,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _run_sorted(parameters: Parameters, call: Call, y: Tensor) -> None:
    x, top_k, block_m = call.x, call.topk_ids.shape[1], parameters.block_m
    num_tokens, hidden = x.shape
    intermediate = call.w2.shape[2]
    order, tiles, max_tiles = sort_rows(call.topk_ids, call.expert_map, call.ids(), block_m)
    a = torch.empty((num_tokens * top_k, intermediate), dtype=x.dtype, device=x.device)
    tile = parameters.gate_up
    gate_up[(tile.programs(max_tiles, intermediate),)](
        x, call.w13, call.w13_bias, call.topk_weights, order, tiles, a,
        call.alpha, call.limit, call.w2.shape[0], hidden, intermediate,
        *x.stride(), *call.w13_strides(), *call.w13_bias_strides(), call.topk_weights.stride(0),
        TOP_K=top_k, ACTIVATION=_formula(call.activation), PARTS=call.parts(),
        WEIGHT_ON_INPUT=call.weight_on_input, IS_EVEN=tile.divides(intermediate, hidden),
        GROUP_M=parameters.group_m, BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        PERSISTENT=tile.num_programs is not None, TMA=tile.copies != THREADS,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    rows = torch.empty((num_tokens * top_k, hidden), dtype=x.dtype, device=x.device)
    tile = parameters.down
    down[(tile.programs(max_tiles, hidden),)](
        a, call.w2, call.w2_bias, order, tiles, rows,
        a.shape[0], call.w2.shape[0], hidden, intermediate,
        *call.w2.stride(), *call.w2_bias_strides(),
        IS_EVEN=tile.divides(hidden, intermediate),
        GROUP_M=parameters.group_m, BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        PERSISTENT=tile.num_programs is not None, TMA=tile.copies != THREADS,
        OWN_WARPS=tile.copies == TMA_WARPS,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    slots = triton.next_power_of_2(top_k)
    block_n = min(max(_COMBINE_ELEMENTS // slots, 16), triton.next_power_of_2(hidden))
    combine[(num_tokens, triton.cdiv(hidden, block_n))](
        rows, call.topk_weights, call.topk_ids, call.expert_map, y,
        hidden, *call.ids(), *call.topk_weights.stride(),
        TOP_K=top_k, SLOTS=slots, WEIGHT_ON_INPUT=call.weight_on_input, BLOCK_N=block_n,
    )  # fmt: skip


def _check(call: Call) -> None:
    x = call.x
    check_weights(x, call.w13, call.w2, call.w13_bias, call.w2_bias, call.activation)
    check_routing(x, call.topk_weights, call.topk_ids, call.expert_map, call.weight_on_input)
    if x.dtype not in DTYPES:
        raise ValueError(f"the Triton kernels take bfloat16, float16, float32; got {x.dtype}")
    if call.topk_weights.dtype != torch.float32:
        raise ValueError(f"topk_weights must be float32, got {call.topk_weights.dtype}")
    device = x.device
    for name, operand in zip(call._fields[1:8], call[1:8], strict=True):
        if operand is not None and operand.device != device:
            raise ValueError(f"{name} must be on {device}, where x is; got {operand.device}")


def _formula(activation: str) -> str:
    return activation.removesuffix("_no_mul")


@functools.cache
def _shape(
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    dtype: torch.dtype,
    is_gated: bool,
    is_transposed: bool,
    is_aligned: bool,
) -> Shape:
    return Shape(
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        dtype=str(dtype).removeprefix("torch."),
        is_gated=is_gated,
        is_transposed=is_transposed,
        is_aligned=is_aligned,
    )


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device as the choice of parameters sees it."""
    if device.type == "cpu":
        return _INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        shared_bytes = properties.shared_memory_per_block
        return Device(
            name=properties.name,
            shared_bytes=shared_bytes,
            is_hip=True,
            num_processors=properties.multi_processor_count,
        )
    return Device(
        name=properties.name,
        shared_bytes=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        capability=(properties.major, properties.minor),
        num_processors=properties.multi_processor_count,
    )


def _kernel(*arguments: Any) -> Tensor:
    call = Call(*arguments)
    _check(call)  # The choice of parameters reads the sizes of weights.
    bucket = bucket_of(call.x.shape[0])
    return _run(parameters_for(device_of(call.x.device), call.shape(), bucket), call)


fused_experts = define_op(
    "cmoe_triton::fused_experts", SCHEMA, kernel=_kernel, fake=fused_experts_fake
)
"""The op of the triton backend."""
