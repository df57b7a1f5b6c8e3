"""What every test gets: poisoned memory, fixed seeds, a compiler without a past."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Read by libraries when they are imported, hence set before torch is.
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may need a network
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool costs more than our small graphs take
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by deterministic mode

import pytest
import torch
from torch._dynamo.utils import counters

SEED = 20260
NUM_THREADS = 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="I/N",
        help="of the chosen tests only number I, I + N, I + 2 N, ...: N processes share them",
    )


def pytest_configure() -> None:
    # On every machine the same number, so that sums are split the same way everywhere.
    torch.set_num_threads(NUM_THREADS)


@pytest.hookimpl(trylast=True)  # behind -k, -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("share"):
        index, number = map(int, share.split("/"))
        mine = items[index::number]
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA or ROCm device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN, or the largest integer: reading it before writing shows.

    Deterministic mode does it for every `empty` in eager Python and in C++ kernels, `resize_` too;
    not for the buffers that Inductor's own code allocates.
    """
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def restored_defaults() -> Iterator[None]:
    """A test may change the number of threads or the default dtype; the next one starts afresh."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """No test sees a graph, or a count towards the recompile limit, of another one."""
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def count_compiles() -> Callable[[], int]:
    """Call it for the number of graphs handed to a compiler backend since the test began.

    Recompilations count, each graph of a function that broke counts, cache hits do not.
    """
    return lambda: counters["stats"]["unique_graphs"]
