"""Each kernel, with each default row of parameters, compiled without a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from cmoe.custom_ops.triton.parameters import (
    COPIES,
    THREADS,
    TMA,
    TMA_WARPS,
    Device,
    Parameters,
    Shape,
    buckets,
    candidates,
    default_parameters,
    fitted,
)
from cmoe.environment import triton_is_interpreted

pytest.importorskip("triton", reason="Triton is not installed")

from triton.compiler import CompiledKernel
from triton.runtime import _allocation
from triton.runtime.jit import JITFunction

from cmoe.custom_ops.triton.fused_experts import Call, fused_experts_with
from cmoe.custom_ops.triton.launch import _scratch
from tests.custom_ops.triton.aot import Launch, launches_of, resources_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        triton_is_interpreted(), reason="TRITON_INTERPRET=1: this process has no Triton compiler"
    ),
]
DEVICES = {
    "cuda:80": Device(name="A100", shared_bytes=166912, capability=(8, 0), num_processors=108),
    "cuda:90": Device(name="H200", shared_bytes=232448, capability=(9, 0), num_processors=132),
    "hip:gfx942": Device(name="MI300X", shared_bytes=65536, is_hip=True, num_processors=304),
}
"""Shared memory of a program as CUDA's programming guide has it, the LDS of CDNA 3."""

ON_EACH_TARGET = pytest.mark.parametrize("target", DEVICES)

QWEN3 = Shape(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768, dtype="bfloat16")
MIXTRAL = Shape(num_experts=8, top_k=2, hidden_size=4096, intermediate_size=14336, dtype="bfloat16")
FULL_PRECISION = Shape(
    num_experts=16, top_k=4, hidden_size=256, intermediate_size=128, dtype="float32"
)
GPT_OSS = Shape(
    num_experts=32,
    top_k=4,
    hidden_size=2880,
    intermediate_size=2880,
    dtype="bfloat16",
    is_transposed=True,
)
"""As transformers keeps it: weights [E, K, N], gate and up alternating, biases."""

CALLS = {
    "qwen3": (QWEN3, {}),
    "mixtral": (MIXTRAL, {}),
    "gpt-oss": (GPT_OSS, dict(activation="swigluoai", bias=True)),
    "full precision": (FULL_PRECISION, {}),
}


def meta_call(
    shape: Shape, num_tokens: int, *, activation: str = "silu", bias: bool = False
) -> Call:
    """A call of that shape on tensors without memory."""
    dtype = getattr(torch, shape.dtype)
    e, k, h, i = shape.num_experts, shape.top_k, shape.hidden_size, shape.intermediate_size
    rows = (1 + shape.is_gated) * i

    def weights(rows: int, columns: int) -> torch.Tensor:
        return meta(e, columns, rows).mT if shape.is_transposed else meta(e, rows, columns)

    def meta(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    return Call(
        x=meta(num_tokens, h),
        w13=weights(rows, h),
        w2=weights(h, i),
        topk_weights=meta(num_tokens, k, dtype=torch.float32),
        topk_ids=meta(num_tokens, k, dtype=torch.int32),
        w13_bias=meta(e, rows) if bias else None,
        w2_bias=meta(e, h) if bias else None,
        expert_map=None,
        activation=activation,
        alpha=1.702,
        limit=7.0 if bias else None,
        interleaved=shape.is_transposed,
        weight_on_input=False,
    )


def launches(parameters: Parameters, call: Call, monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Of one call with given parameters."""
    return launches_of(lambda: fused_experts_with(parameters, call), monkeypatch)


def default_rows(device: Device, shape: Shape) -> dict[Parameters, int]:
    """Each different default row with the largest bucket that has it."""
    return {
        fitted(default_parameters(device, shape, bucket), device, shape): bucket
        for bucket in buckets()
    }


@ON_EACH_TARGET
@pytest.mark.parametrize("name", CALLS)
def test_default_rows_fit_without_spills(
    target: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, options = CALLS[name]
    device = DEVICES[target]
    for parameters, bucket in default_rows(device, shape).items():
        call = meta_call(shape, bucket, **options)
        assert call.shape() == shape
        for launch in launches(parameters, call, monkeypatch):
            taken = resources_of(launch.compile_for(target))
            where = f"{launch.kernel.__name__} for {bucket} tokens with {parameters}"
            assert 0 < taken.registers <= 256, where
            assert taken.spilled_bytes == 0, where
            assert taken.shared_bytes <= device.shared_bytes, where


@ON_EACH_TARGET
@pytest.mark.parametrize("num_tokens", [1, 64])
def test_every_option_compiles(
    target: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, clamps, strides, maps, sizes that no block divides."""
    device = DEVICES[target]
    shape = Shape(num_experts=13, top_k=3, hidden_size=99, intermediate_size=41, dtype="float16")
    gated = meta_call(shape, num_tokens, activation="swigluoai", bias=True)
    turned = gated.w13.new_empty((13, 99, 82)).mT
    calls = [
        gated._replace(interleaved=True, w13=turned),
        gated._replace(expert_map=gated.topk_ids.new_empty((40,)), topk_ids=gated.topk_ids.long()),
        gated._replace(
            topk_ids=gated.topk_ids[:, :1],
            topk_weights=gated.topk_weights[:, :1],
            weight_on_input=True,
        ),
        gated._replace(w13=gated.w13[:, :41], w13_bias=None, activation="gelu_no_mul"),
    ]
    for call in calls:
        row = fitted(default_parameters(device, call.shape(), num_tokens), device, call.shape())
        recorded = launches(row, call, monkeypatch)
        names = [launch.compile_for(target).name for launch in recorded]
        assert names in (
            ["gate_up_alone", "down_alone"],
            ["count_rows", "place_rows", "gate_up", "down", "combine"],
        )


@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
def test_loads_are_copied_ahead_in_large_pieces(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the speed rests on: 16-byte loads, asynchronous copies, the device's tensor cores."""
    device = DEVICES[target]
    for name, num_tokens in itertools.product(("qwen3", "gpt-oss"), (1, 4096)):
        shape, options = CALLS[name]
        call = meta_call(shape, num_tokens, **options)
        row = fitted(default_parameters(device, shape, num_tokens), device, shape)
        for launch in launches(row, call, monkeypatch):
            name, ptx = launch.kernel.__name__, launch.compile_for(target).asm["ptx"]
            if name in ("gate_up_alone", "down_alone"):
                assert "ld.global.v4" in ptx, name
            if name in ("gate_up", "down"):
                assert "cp.async.cg.shared.global" in ptx, name
                assert ("wgmma.mma_async" if device.wide_tiles() else "mma.sync") in ptx, name


def rows_that_copy_otherwise(device: Device, shape: Shape) -> dict[Parameters, int]:
    """Each candidate whose tiles are the default's, copied or shared out otherwise; its bucket."""
    return {
        row: bucket
        for bucket in buckets()
        for row in candidates(device, shape, bucket)
        if row.down.num_programs is not None or row.copies() != {THREADS}
    }


MOST_SPILLED_BYTES = 16
"""Of a candidate, at the end of a tile: Triton 3.8 spills 8 of one row of qwen3's."""


@ON_EACH_TARGET
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_rows_that_copy_otherwise_fit(
    target: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, options = CALLS[name]
    device = DEVICES[target]
    rows = rows_that_copy_otherwise(device, shape)
    assert rows
    for parameters, bucket in rows.items():
        for launch in launches(parameters, meta_call(shape, bucket, **options), monkeypatch):
            name = launch.kernel.__name__
            if name not in ("gate_up", "down"):
                continue
            tile, halves = (parameters.gate_up, 2) if name == "gate_up" else (parameters.down, 1)
            compiled = launch.compile_for(target)
            taken, where = resources_of(compiled), f"{name} for {bucket} tokens: {parameters}"
            assert 0 < taken.registers <= 256, where
            assert taken.spilled_bytes <= MOST_SPILLED_BYTES, where
            bound = tile.shared_bytes(parameters.block_m, halves, 2, device.is_hip)
            assert taken.shared_bytes <= bound <= device.shared_bytes, where
            if target == "cuda:90":
                assert copies_of(compiled) == tile.copies, where


@pytest.mark.parametrize("copies", COPIES)
def test_kernels_that_describe_blocks_have_memory_for_it(
    copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to 256 bytes a program, from torch; other kernels ask for none."""
    device, call = DEVICES["cuda:90"], meta_call(QWEN3, 4096)
    row = next(row for row in candidates(device, QWEN3, 4096) if row.down.copies == copies)
    allocators = []

    def record(kernel: JITFunction, *arguments: Any, **options: Any) -> None:
        allocators.append(_allocation._allocator.get())

    with monkeypatch.context() as patched:
        patched.setattr(JITFunction, "run", record)
        fused_experts_with(row, call)
    assert len(allocators) == 5
    assert {allocator is _scratch for allocator in allocators} == {copies != THREADS}
    for launch in launches(row, call, monkeypatch):
        asked = launch.compile_for("cuda:90").metadata.global_scratch_size
        describes = copies != THREADS and launch.kernel.__name__ in ("gate_up", "down")
        assert (0 < asked <= 256) if describes else (asked == 0)


def copies_of(compiled: CompiledKernel) -> str:
    """How a kernel for Hopper copies its blocks, as its code says."""
    if "cp.async.bulk.tensor" not in compiled.asm["ptx"]:
        return THREADS
    # With own warps the multiplying ones get the registers that those give up.
    return TMA_WARPS if "setmaxnreg" in compiled.asm["ptx"] else TMA


@pytest.mark.parametrize("parts", ["gate", "halves", "pairs"])
def test_every_option_compiles_for_the_copy_engine(
    parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases, clamps, a weight on the input, sizes that no block divides."""
    device = DEVICES["cuda:90"]
    shape = Shape(
        num_experts=13,
        top_k=1,
        hidden_size=1096,
        intermediate_size=424,
        dtype="float16",
        is_gated=parts != "gate",
    )
    activation = "swigluoai" if shape.is_gated else "gelu_no_mul"
    call = meta_call(shape, 4096, activation=activation, bias=True)
    call = call._replace(interleaved=parts == "pairs", weight_on_input=True)
    for parameters in rows_that_copy_otherwise(device, shape):
        if parameters.block_m == 128:
            for launch in launches(parameters, call, monkeypatch):
                compiled = launch.compile_for("cuda:90")
                if launch.kernel.__name__ == "down":
                    assert copies_of(compiled) == parameters.down.copies


@pytest.mark.parametrize(
    ("first", "last", "copies"),
    [(1, 8, THREADS), (33, 64, THREADS), (2049, 4096, THREADS), (2049, 4096, TMA_WARPS)],
)
def test_one_binary_serves_a_bucket(
    first: int, last: int, copies: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a graph can be captured for a T that was never seen, once its bucket was."""
    device = DEVICES["cuda:90"]
    row = next(row for row in candidates(device, QWEN3, last) if row.down.copies == copies)
    binaries = {
        tuple(launch.source().hash() for launch in launches(row, meta_call(QWEN3, n), monkeypatch))
        for n in (first, first + 1, (first + last) // 2, last - 1, last)
    }
    assert len(binaries) == 1
