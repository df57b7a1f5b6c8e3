"""The machine's limits, measured in the run that quotes them."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import cpu
from cmoe.environment import cxx_compiler

_SOURCE = Path(__file__).with_name("limits.cpp")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Rates that no kernel can pass. GB is 1e9 bytes, T is 1e12 flops a second."""

    read_gbps: float
    fma_fp32_tflops: float
    dot_bf16_tflops: float  # 0 where there is no such instruction
    matmul_bf16_tflops: float  # what torch reaches; it stands for AMX, for tensor cores
    threads: int
    cache_bytes: int
    method: str

    def peak_tflops(self, dtype: str) -> float:
        """The fastest multiplication measured for `dtype`."""
        if dtype == "bf16":
            return max(self.fma_fp32_tflops, self.dot_bf16_tflops, self.matmul_bf16_tflops)
        return self.fma_fp32_tflops


def best_of(first: Limits, second: Limits) -> Limits:
    """The higher rate of each: whatever else ran on the machine only lowers what is measured."""
    rates = ("read_gbps", "fma_fp32_tflops", "dot_bf16_tflops", "matmul_bf16_tflops")
    highest = {name: max(getattr(first, name), getattr(second, name)) for name in rates}
    return dataclasses.replace(first, **highest)


def measure(*, threads: int) -> Limits:
    """Measures this machine: about a second on an idle CPU."""
    if torch.cuda.is_available():
        return _measure_cuda()
    cache_bytes = cpu.last_level_cache_bytes()
    read_bytes = _read_bytes(cache_bytes)
    library = _native_library()
    if library is None:
        return _measure_with_torch(read_bytes, threads, cache_bytes)
    with ReadStream(read_bytes, threads, library) as stream:
        read_gbps = stream.gbps(5)
    return Limits(
        read_gbps=read_gbps,
        fma_fp32_tflops=library.fma_fp32_tflops(0.05, threads, 5),
        dot_bf16_tflops=library.dot_bf16_tflops(0.05, threads, 5),
        matmul_bf16_tflops=_matmul_tflops(torch.bfloat16, "cpu", 1024),
        threads=threads,
        cache_bytes=cache_bytes,
        method="limits.cpp, best of 5",
    )


def _read_bytes(cache_bytes: int) -> int:
    return min(max(1 << 30, 4 * cache_bytes), 4 << 30)


class ReadStream(AbstractContextManager["ReadStream"]):
    """A large buffer that stays open, so that the read rate can be taken again and again.

    Other guests of a host take their share of its memory, so the rate of a minute ago says little.
    MemoryError when there is no room for it.
    """

    def __init__(self, num_bytes: int, threads: int, library: ctypes.CDLL) -> None:
        self._library = library
        self._opened = library.read_open(num_bytes, threads)
        if not self._opened:
            raise MemoryError(f"no {num_bytes} bytes for the read stream")

    def gbps(self, repeats: int) -> float:
        """GB/s, the best of `repeats` whole passes with all threads."""
        return self._library.read_gbps(self._opened, repeats)

    def __exit__(self, *exception: object) -> None:
        self._library.read_close(self._opened)


def open_read_stream(*, threads: int) -> ReadStream | None:
    """The stream of this machine; None on a GPU, which is nobody else's, or without a compiler."""
    if torch.cuda.is_available():
        return None
    library = _native_library()
    if library is None:
        return None
    return ReadStream(_read_bytes(cpu.last_level_cache_bytes()), threads, library)


def _native_library() -> ctypes.CDLL | None:
    """limits.cpp compiled for this machine; None, with a line saying why, where that fails."""
    compiler = cxx_compiler()
    if compiler is None:
        _say("no C++ compiler (set CXX): limits come from torch, the peak is a lower bound")
        return None
    key = hashlib.sha256(_SOURCE.read_bytes() + repr((compiler, cpu.model_name())).encode())
    path = Path(tempfile.gettempdir()) / f"bench-limits-{os.getuid()}-{key.hexdigest()[:16]}.so"
    if not path.exists():
        building = path.with_suffix(f".{os.getpid()}")
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-pthread"]
        done = subprocess.run(
            [*compiler, *flags, str(_SOURCE), "-o", str(building)], capture_output=True, text=True
        )
        if done.returncode:
            _say(f"{compiler[0]} cannot build limits.cpp: limits come from torch\n{done.stderr}")
            return None
        building.rename(path)
    library = ctypes.CDLL(str(path))
    library.read_open.argtypes = [ctypes.c_size_t, ctypes.c_int]
    library.read_open.restype = ctypes.c_void_p
    library.read_gbps.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.read_gbps.restype = ctypes.c_double
    library.read_close.argtypes = [ctypes.c_void_p]
    library.read_close.restype = None
    for rate in (library.fma_fp32_tflops, library.dot_bf16_tflops):
        rate.argtypes = [ctypes.c_double, ctypes.c_int, ctypes.c_int]
        rate.restype = ctypes.c_double
    return library


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr)


def _best_seconds(
    call: Callable[[], object], repeats: int, synchronize: Callable[[], None]
) -> float:
    call()
    best = float("inf")
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        call()
        synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _matmul_tflops(dtype: torch.dtype, device: str, size: int) -> float:
    a = torch.randn(size, size, device=device).to(dtype)
    synchronize = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    return 2 * size**3 / _best_seconds(lambda: a @ a, 5, synchronize) / 1e12


def _measure_with_torch(read_bytes: int, threads: int, cache_bytes: int) -> Limits:
    buffer = torch.ones(read_bytes // 8, dtype=torch.int64)
    seconds = _best_seconds(buffer.sum, 5, lambda: None)
    return Limits(
        read_gbps=buffer.nbytes / seconds / 1e9,
        fma_fp32_tflops=_matmul_tflops(torch.float32, "cpu", 1024),
        dot_bf16_tflops=0.0,
        matmul_bf16_tflops=_matmul_tflops(torch.bfloat16, "cpu", 1024),
        threads=threads,
        cache_bytes=cache_bytes,
        method="torch sum, torch matmul (no compiler)",
    )


def _measure_cuda() -> Limits:
    """A device copy moves each byte twice; the rate counts both, as a read limit it is cautious."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    seconds = _best_seconds(lambda: target.copy_(source), 10, torch.cuda.synchronize)
    properties = torch.cuda.get_device_properties(0)
    return Limits(
        read_gbps=2 * source.nbytes / seconds / 1e9,
        fma_fp32_tflops=_matmul_tflops(torch.float32, "cuda", 4096),
        dot_bf16_tflops=0.0,
        matmul_bf16_tflops=_matmul_tflops(torch.bfloat16, "cuda", 8192),
        threads=1,
        cache_bytes=properties.L2_cache_size,
        method="torch copy, torch matmul",
    )
