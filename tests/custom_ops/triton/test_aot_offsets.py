"""Offsets of weights, of activations are counted in 64 bits: T * K * N, E * N * K pass 2^31.

Read from the code that Triton makes of the kernels, since memory of that size is not at hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from cmoe.custom_ops.triton.parameters import buckets, candidates
from cmoe.environment import triton_is_interpreted

pytest.importorskip("triton", reason="Triton is not installed")

from cmoe.custom_ops.triton import route
from tests.custom_ops.triton.aot import launches_of
from tests.custom_ops.triton.test_aot_fused_experts import CALLS, DEVICES, launches, meta_call

pytestmark = pytest.mark.skipif(
    triton_is_interpreted(), reason="TRITON_INTERPRET=1: this process has no Triton compiler"
)

PASSES_ON = ("extsi", "splat", "broadcast", "expand_dims", "addi", "subi", "muli", "minsi")
"""Operations whose result is as large as their operands say; others begin or bound a number."""

DEFINITION = re.compile(r"^\s*(%\w+) = (?:arith|tt)\.(\w+) (.*?)(?: loc\(.*)?$", re.MULTILINE)
FLOATS = re.compile(r"!tt\.ptr<(?:bf16|f16|f32)>")


def narrow_products(ttir: str) -> set[str]:
    """Products in 32 bits, by a stride or of two variables, in the offsets of float pointers."""
    definitions = {name: (op, rest) for name, op, rest in DEFINITION.findall(ttir)}

    def products_in(name: str) -> Iterator[str]:
        op, rest = definitions.get(name, ("argument", ""))
        if op not in PASSES_ON:
            return
        operands = re.findall(r"%\w+", rest)
        variables = [o for o in operands if definitions.get(o, ("argument",))[0] != "constant"]
        far = len(variables) > 1 or any("stride" in root(operand) for operand in variables)
        if op == "muli" and rest.endswith(("i32", "i32>")) and far:
            yield f"{name} = {rest}"
        for operand in variables:
            yield from products_in(operand)

    def root(name: str) -> str:
        op, rest = definitions.get(name, ("argument", ""))
        return root(re.findall(r"%\w+", rest)[0]) if op in ("splat", "broadcast") else name

    return {
        product
        for op, rest in definitions.values()
        if op == "addptr" and FLOATS.search(rest)
        for product in products_in(re.findall(r"%\w+", rest)[1])
    }


def test_a_narrow_product_is_found() -> None:
    ttir = """
    %c = arith.constant 64 : i32 loc(#loc1)
    %row = tt.get_program_id x : i32 loc(#loc1)
    %block = arith.muli %row, %c : i32 loc(#loc2)
    %far = arith.muli %row, %hidden : i32 loc(#loc2)
    %far_1 = arith.addi %far, %block : i32 loc(#loc2)
    %far_2 = arith.extsi %far_1 : i32 to i64 loc(#loc2)
    %p = tt.addptr %x_ptr, %far_2 : !tt.ptr<bf16>, i64 loc(#loc3)
    %step = arith.muli %stride_wk, %c : i32 loc(#loc2)
    %steps = tt.splat %step : i32 -> tensor<64xi32> loc(#loc2)
    %q = tt.addptr %p, %steps : tensor<64x!tt.ptr<bf16>>, tensor<64xi32> loc(#loc3)
    %number = tt.addptr %ids_ptr, %far : !tt.ptr<i32>, i32 loc(#loc3)
    """
    assert narrow_products(ttir) == {
        "%far = %row, %hidden : i32",
        "%step = %stride_wk, %c : i32",
    }


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_of_the_experts_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way of copying, rows of x that lie column by column, weights of either layout."""
    shape, options = CALLS[name]
    device = DEVICES["cuda:90"]
    seen = set()
    for bucket in (2, buckets()[-1]):
        call = meta_call(shape, bucket, **options)
        call = call._replace(x=call.x.new_empty(call.x.shape[::-1]).mT)
        for row in candidates(device, shape, bucket):
            kind = (row.copies(), row.down.num_programs, row.block_m == 1)
            if kind in seen:
                continue
            seen.add(kind)
            for launch in launches(row, call, monkeypatch):
                ttir = launch.compile_for("cuda:90").asm["ttir"]
                assert "tt.addptr" in ttir
                assert narrow_products(ttir) == set(), launch.kernel.__name__
    assert len(seen) == (6 if name == "qwen3" else 3)


def test_of_the_router_s_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.empty(160, 7, device="meta").mT
    options = ("sigmoid", False, True, 1e-20, 8, 3, 1.0)
    (launch,) = launches_of(
        lambda: route._route(logits, torch.empty(160, device="meta"), 6, *options), monkeypatch
    )
    assert narrow_products(launch.compile_for("cuda:90").asm["ttir"]) == set()
