"""Which layers the triton backend takes, with its reasons against the others."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cmoe.custom_ops.backends import LayerSpec, choose_backend, list_backends
from cmoe.custom_ops.triton import BACKEND, tuned
from cmoe.errors import UnsupportedError

ON_GPU = LayerSpec(
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    num_experts=8,
    top_k=2,
    hidden_size=64,
    intermediate_size=32,
    activation="silu",
)
WHERE = "runs on CUDA devices of compute capability 8.0 up and on ROCm devices"
ON_CPU = dataclasses.replace(ON_GPU, device=torch.device("cpu"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with Triton, with one Hopper GPU, as far as the judgement looks."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_layer_is_taken(gpu: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    assert BACKEND.refuses(dataclasses.replace(ON_GPU, dtype=dtype)) == ()


def test_it_is_preferred_on_a_gpu(gpu: pytest.MonkeyPatch) -> None:
    assert choose_backend(ON_GPU).name == "triton"
    assert [backend.name for backend in list_backends()][-1] == "reference"


def test_without_triton(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(importlib.util, "find_spec", lambda name: None)
    assert BACKEND.refuses(ON_GPU) == ("triton is not installed (pip install triton)",)


def test_an_old_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert BACKEND.refuses(ON_GPU) == ("needs compute capability 8.0 up, cuda:0 has 7.5",)


def test_an_amd_gpu_has_no_compute_capability(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.version, "hip", "7.1")
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert BACKEND.refuses(ON_GPU) == ()


def test_no_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert BACKEND.refuses(ON_GPU) == ("torch finds no CUDA or ROCm device",)


def test_every_reason_is_said(gpu: pytest.MonkeyPatch) -> None:
    spec = dataclasses.replace(
        ON_GPU, device=torch.device("meta"), dtype=torch.float64, activation="swish"
    )
    assert BACKEND.refuses(spec) == (
        f"{WHERE}, not on meta",
        "takes bfloat16, float16, float32, not torch.float64",
        "has no activation 'swish'",
    )


def test_on_a_cpu_only_in_the_interpreter(gpu: pytest.MonkeyPatch) -> None:
    assert BACKEND.refuses(ON_CPU) == (f"{WHERE}, not on cpu (unless TRITON_INTERPRET=1)",)
    gpu.setenv("TRITON_INTERPRET", "1")
    assert BACKEND.refuses(ON_CPU) == ()
    assert choose_backend(ON_CPU).name != "triton"  # slower than every other one


def test_forced_on_a_cpu(gpu: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=rf"triton +: {WHERE}, not on cpu"):
        choose_backend(ON_CPU, "triton")


def test_kernels() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    assert str(BACKEND.kernels().fused_experts) == "cmoe_triton.fused_experts.default"


def test_a_bad_file_of_parameters_stops_the_build_of_a_layer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    path = tmp_path / "parameters.json"
    path.write_text("[]")
    monkeypatch.setenv("CMOE_TRITON_PARAMETERS", str(path))
    tuned.user_table.cache_clear()
    with pytest.raises(ValueError, match="not a file of Triton parameters"):
        BACKEND.kernels()
    tuned.user_table.cache_clear()


def test_judging_imports_no_triton() -> None:
    """Nor does `import cmoe`; both work where Triton is missing."""
    code = (
        "import sys, torch; had = 'triton' in sys.modules; import cmoe; "
        "from cmoe.custom_ops.backends import explain_backends; "
        "from cmoe.machine import typical_layer; "
        "explain_backends(typical_layer(torch.device('cuda'))); "
        "sys.exit('triton' in sys.modules and not had)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
