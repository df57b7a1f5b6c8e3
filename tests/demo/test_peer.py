"""An implementation of transformers that fails is left out, with its reason; the others remain."""

from __future__ import annotations

import pytest
import torch

from cmoe.demo.greedy import Greedy
from cmoe.demo.peer import Mode, Peer
from tests.integrations.transformers.architectures import VOCABULARY, tiny


@pytest.fixture(autouse=True)
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)


def peer_of(dtype: torch.dtype = torch.float32) -> Peer:
    model = tiny("qwen3_moe").to(dtype)
    return Peer(model, Greedy(model, torch.randint(VOCABULARY, (1, 5)), 3))


def test_sizes_that_torch_refuses() -> None:
    """torch's grouped_mm on a CPU wants rows of a multiple of 16 bytes: not so with I = 11."""
    peer = peer_of()
    chosen = peer.choose()
    assert (
        peer.trials["grouped_mm"]
        == "left out: RuntimeError: strides should be multiple of 16 bytes"
    )
    assert peer.trials["eager"].startswith("prefill ")
    assert "grouped_mm" not in {mode.implementation for mode in chosen}


@pytest.mark.parametrize("error", [AssertionError("of\nlines"), KeyError("of"), MemoryError("of")])
def test_a_failure_of_any_kind(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peer_of()
    use = Peer.use

    def failing(self: Peer, mode: Mode) -> None:
        if mode.implementation == "batched_mm":
            raise error
        use(self, mode)

    monkeypatch.setattr(Peer, "use", failing)
    assert {mode.implementation for mode in peer.choose()} == {"eager"}
    assert peer.trials["batched_mm"].startswith(f"left out: {type(error).__name__}: ")


def test_nothing_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = peer_of()
    monkeypatch.setattr(Greedy, "run", lambda *args: 1 / 0)
    with pytest.raises(
        RuntimeError, match=r"transformers could not run its model: .*division by z"
    ):
        peer.choose()
