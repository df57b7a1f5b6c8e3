"""How the CPU kernels get compiled, kept, chosen."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from cmoe.custom_ops.backends import Kernels, LayerSpec, choose_backend
from cmoe.custom_ops.cpu import BACKEND, build
from cmoe.environment import cxx_compiler

SPEC = LayerSpec(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    num_experts=8,
    top_k=2,
    hidden_size=64,
    intermediate_size=32,
    activation="silu",
)


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has not asked for the kernels yet, with an empty cache."""
    monkeypatch.setenv("CMOE_CACHE_DIR", str(tmp_path))
    build.load.cache_clear()
    yield tmp_path
    build.load.cache_clear()


def test_without_a_compiler_the_backend_says_so(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert BACKEND.refuses(SPEC) == ("no C++ compiler found; install g++ or point CXX at one",)
    assert choose_backend(SPEC).name == "reference"


def test_a_compiler_that_fails_is_quoted(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = unloaded / "broken++"
    compiler.write_text("#!/bin/sh\necho 'fatal error: no space left' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    (reason,) = BACKEND.refuses(SPEC)
    assert reason.endswith("broken++ failed: fatal error: no space left")
    assert list(unloaded.rglob("*.so")) == []


def test_a_cache_that_cannot_be_written_is_a_reason(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (unloaded / "file").write_text("")
    monkeypatch.setenv("CMOE_CACHE_DIR", str(unloaded / "file"))
    (reason,) = BACKEND.refuses(SPEC)
    assert reason.startswith("the CPU kernels could not be built: ")


def test_a_library_that_does_not_load_is_a_reason(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    junk = unloaded / "junk.so"
    junk.write_bytes(b"not a library")
    monkeypatch.setattr(build, "library", lambda: junk)
    (reason,) = BACKEND.refuses(SPEC)
    assert reason.startswith("the compiled CPU kernels do not load: ")


@pytest.fixture
def small_build(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Building takes a moment and gives a few bytes; the folders it was done in."""
    folders: list[Path] = []

    def build_now(compiler: Sequence[str], flags: Sequence[str], folder: Path) -> Path:
        folders.append(folder)
        (folder / "linked.so").write_bytes(b"some bytes")
        return folder / "linked.so"

    monkeypatch.setattr(build, "_build", build_now)
    return folders


@pytest.mark.parametrize("damage", ["truncated", "emptied", "foreign", "changed"])
def test_a_damaged_library_is_built_anew(small_build: list[Path], damage: str) -> None:
    library = build.library()
    good = library.read_bytes()
    assert build.library() == library
    assert len(small_build) == 1
    if damage == "foreign":
        library.rename(library.with_name("0123.so"))
    else:
        bad = {"truncated": good[:4], "emptied": b"", "changed": good[:-1] + b"!"}[damage]
        library.write_bytes(bad)
    again = build.library()
    assert len(small_build) == 2
    assert again.read_bytes() == good
    assert list(again.parent.iterdir()) == [again]


def test_a_truncated_library_does_not_end_the_process(tmp_path: Path, cpu_kernels: Kernels) -> None:
    """Loading it would: the loader maps pages that the file no longer has."""
    intact = build.library()
    cached = tmp_path / intact.parent.name / intact.name
    cached.parent.mkdir()
    cached.write_bytes(intact.read_bytes()[: intact.stat().st_size // 3])
    program = (
        "import shutil\n"
        "from cmoe.custom_ops.cpu import build\n"
        "def build_now(compiler, flags, folder):\n"
        f"    return shutil.copy({str(intact)!r}, folder / 'new.so')\n"
        "build._build = build_now\n"
        "print(build.load(), end='')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CMOE_CACHE_DIR": str(tmp_path)},
        cwd=build.SOURCES.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "None"), done.stderr
    assert cached.read_bytes() == intact.read_bytes()


def test_a_library_without_the_ops_is_a_reason(
    unloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_OPS", ("cmoe_cpu::no_such_op",))
    monkeypatch.setattr(build, "library", lambda: Path(torch._C.__file__))
    (reason,) = BACKEND.refuses(SPEC)
    assert reason == f"{torch._C.__file__} does not register cmoe_cpu::no_such_op; remove it"


def test_the_compiler_may_have_arguments(unloaded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = unloaded / "log"
    compiler = unloaded / "my g++"
    compiler.write_text(f'#!/bin/sh\necho "$1" >> {log}\necho "error: enough" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{compiler}' -m64")
    assert cxx_compiler() == (str(compiler), "-m64")
    (reason,) = BACKEND.refuses(SPEC)
    assert reason.endswith("my g++ failed: error: enough")
    assert set(log.read_text().split()) == {"-m64"}
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    assert cxx_compiler() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(device=torch.device("meta")), "runs on cpu, not on meta"),
        (dict(dtype=torch.float64), "takes bfloat16, float16, float32, not torch.float64"),
        (dict(activation="swish"), "has no activation 'swish'"),
    ],
)
def test_what_the_kernels_cannot_run(changes: dict[str, object], reason: str) -> None:
    arguments = {name: getattr(SPEC, name) for name in SPEC.__slots__}
    assert BACKEND.refuses(LayerSpec(**{**arguments, **changes})) == (reason,)


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, ()),
        ({"hidden_size": 96, "intermediate_size": 768}, ()),
        ({"dtype": torch.float16}, ("reads packed weights of bfloat16, not of torch.float16",)),
    ],
)
def test_which_packed_weights_the_kernels_read(
    changes: dict[str, object], reasons: tuple[str, ...]
) -> None:
    assert BACKEND.refuses_packed(dataclasses.replace(SPEC, **changes)) == reasons


def test_the_key_knows_sources_flags_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {
        build._key(("g++",), ("-O2",)),
        build._key(("g++",), ("-O1",)),
        build._key(("g++", "-m64"), ("-O2",)),
        build._key(("clang++",), ("-O2",)),
    }
    monkeypatch.setattr(torch, "__version__", "0.0")
    keys.add(build._key(("g++",), ("-O2",)))
    assert len(keys) == 5


@pytest.mark.slow
def test_two_processes_may_build_at_once(tmp_path: Path, cpu_kernels: Kernels) -> None:
    """Both end with working kernels, in one folder with one library, nothing left beside it."""
    program = (
        "from cmoe.custom_ops.cpu import build\n"
        "build._KERNEL_SETS = {}\n"  # the generic one alone: faster to compile
        "import torch\n"
        "assert build.load() is None, build.load()\n"
        "print(torch.ops.cmoe_cpu.kernel_sets()[-1])\n"
    )
    environment = {**os.environ, "CMOE_CACHE_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            cwd=build.SOURCES.parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        assert output == "generic\n"
        assert errors.count("compiling the CPU kernels") == 1
    (folder,) = tmp_path.iterdir()
    names = [path.name for path in folder.iterdir()]
    assert names == [f"{build._digest(folder / names[0])}.so"]


def test_the_kernel_set_can_be_named(cpu_kernels: Kernels) -> None:
    ops = torch.ops.cmoe_cpu
    chosen = ops.use_kernel_set("generic")
    assert chosen in ops.kernel_sets()
    assert ops.use_kernel_set("auto") == "generic"
    assert ops.use_kernel_set("auto") == chosen
    with pytest.raises(ValueError, match="no kernel set 'mmx' runs here; choose auto or one of"):
        ops.use_kernel_set("mmx")


def test_one_openmp_in_the_process(cpu_kernels: Kernels) -> None:
    """The kernels run on torch's threads, so loading them brings no second OpenMP."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    loaded = {line.split()[-1] for line in maps.read_text().splitlines() if "omp" in line}
    assert len({Path(path).name.split(".")[0] for path in loaded if ".so" in path}) <= 1
