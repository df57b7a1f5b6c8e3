"""The order of the shared experts beside the routed ones."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import cmoe
from cmoe.overlap import fork_and_join, in_order, on_second_stream
from tests.layers import HIDDEN, layer_of, logits_of, x_of


class FakeStream:
    """A queue of work that runs later; `wait_stream` as torch documents it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], bool]] = []
        self.done = 0

    def submit(self, work: Callable[[], object]) -> None:
        self.queue.append(lambda: work() is not False)

    def wait_stream(self, other: FakeStream) -> None:
        length = len(other.queue)
        self.queue.append(lambda: other.done >= length)

    def advance(self) -> None:
        """Runs the next piece of work; a wait that is not over stays the next one."""
        if self.done < len(self.queue) and self.queue[self.done]():
            self.done += 1


class Gpu:
    """Two streams that progress in a random order, each in its own."""

    def __init__(self) -> None:
        self.first, self.second = FakeStream(), FakeStream()
        self.current = self.first

    @contextlib.contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        streams = (self.first, self.second)
        while any(stream.done < len(stream.queue) for stream in streams):
            choose.choice(streams).advance()


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("num_layers", [1, 3])
def test_every_progress_of_the_streams_gives_the_same(seed: int, num_layers: int) -> None:
    """Layers in a row, through memory that an allocator hands out again and again."""
    gpu = Gpu()
    x, shared_memory, routed_memory = ["input"], ["stale"], ["stale"]
    seen: list[str] = []

    def shared(x: list[str]) -> list[str]:
        gpu.current.submit(lambda: shared_memory.__setitem__(0, f"shared of {x[0]}"))
        return shared_memory

    def routed() -> list[str]:
        gpu.current.submit(lambda: routed_memory.__setitem__(0, f"routed of {x[0]}"))
        return routed_memory

    for layer in range(num_layers):
        y, z = fork_and_join(shared, x, routed, gpu.first, gpu.second, gpu.use)
        gpu.current.submit(lambda y=y, z=z: seen.append(f"{y[0]}, {z[0]}"))
        gpu.current.submit(lambda layer=layer: x.__setitem__(0, f"output {layer}"))
    assert len(gpu.second.queue) == 2 * num_layers  # a wait, the shared experts
    gpu.run(seed)
    inputs = ["input", *(f"output {layer}" for layer in range(num_layers - 1))]
    assert seen == [f"shared of {name}, routed of {name}" for name in inputs]


def test_the_streams_join_when_the_routed_experts_fail() -> None:
    gpu = Gpu()

    def routed() -> list[str]:
        raise ValueError("bad ids")

    with pytest.raises(ValueError, match="bad ids"):
        fork_and_join(lambda x: x, ["input"], routed, gpu.first, gpu.second, gpu.use)
    assert len(gpu.first.queue) == 1  # the wait
    assert gpu.current is gpu.first


def test_in_order_is_one_after_the_other() -> None:
    called: list[str] = []
    result = in_order(lambda x: called.append("shared") or x, 1, lambda: called.append("routed"))
    assert called == ["shared", "routed"]
    assert result == (1, None)


def overlapping(mlp: nn.Module) -> cmoe.SharedExperts:
    return cmoe.SharedExperts(mlp, nn.Linear(HIDDEN, 1), overlap=on_second_stream)


def pair(device: str) -> tuple[cmoe.MoERunner, cmoe.MoERunner]:
    """The same layer without overlap, with it."""
    plain = layer_of(
        shared_experts=nn.Linear(HIDDEN, HIDDEN), shared_expert_gate=nn.Linear(HIDDEN, 1)
    )
    other = layer_of(prefix="other", shared_experts=overlapping(nn.Linear(HIDDEN, HIDDEN)))
    other.load_state_dict(plain.state_dict())
    return plain.requires_grad_(False).to(device), other.requires_grad_(False).to(device)


def assert_equal(run: Callable[..., Tensor], plain: cmoe.MoERunner, device: str) -> None:
    for num_tokens in (1, 7, 0):
        x, logits = x_of(num_tokens).to(device), logits_of(num_tokens).to(device)
        assert torch.equal(run(x, logits), plain(x, logits))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("transparent", [False, True])
def test_without_streams_a_layer_computes_the_same(compiled: bool, transparent: bool) -> None:
    plain, other = pair("cpu")
    plain.transparent = other.transparent = transparent
    run = torch.compile(other, fullgraph=True, backend="aot_eager") if compiled else other
    assert_equal(run, plain, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_computes_the_same_on_two_streams(compiled: bool) -> None:
    plain, other = pair("cuda")
    assert_equal(torch.compile(other, fullgraph=True) if compiled else other, plain, "cuda")


@pytest.mark.gpu
def test_a_captured_graph_holds_both_streams() -> None:
    plain, other = pair("cuda")
    x, logits = x_of(7).cuda(), logits_of(7).cuda()
    with torch.cuda.stream(torch.cuda.Stream()):
        other(x, logits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = other(x, logits)
    for _ in range(3):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert torch.equal(y, plain(x, logits))
