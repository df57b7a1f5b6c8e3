"""The table of implementations that the harness knows."""

from __future__ import annotations

import runpy
from collections.abc import Callable

from bench.peers.base import Peer
from bench.peers.cmoe import CmoeExperts
from bench.peers.dense import DenseControl
from bench.peers.torch_grouped_mm import TorchGroupedMM
from bench.peers.transformers import TransformersExperts
from bench.peers.vllm import CpuFusedMoe, FusedExpertsCpu

CONTROL = DenseControl.impl

PEERS: dict[str, Callable[[], Peer]] = {
    "cmoe:auto": lambda: CmoeExperts("auto"),
    "cmoe:cpu": lambda: CmoeExperts("cpu"),
    "cmoe:cpu_packed": lambda: CmoeExperts("cpu", packed=True),
    "cmoe:triton": lambda: CmoeExperts("triton"),
    "cmoe:reference": lambda: CmoeExperts("reference"),
    "transformers:eager": lambda: TransformersExperts("eager"),
    "transformers:batched_mm": lambda: TransformersExperts("batched_mm"),
    "transformers:grouped_mm": lambda: TransformersExperts("grouped_mm"),
    "torch:grouped_mm": TorchGroupedMM,
    "vllm:cpu_fused_moe": CpuFusedMoe,
    "vllm:fused_experts_cpu": FusedExpertsCpu,
    CONTROL: DenseControl,
}


def make_peer(impl: str) -> Peer:
    """The adapter called `impl`. Raises ValueError for a name that is not in the table."""
    if impl not in PEERS:
        raise ValueError(f"unknown implementation {impl!r}; choose one of {', '.join(PEERS)}")
    return PEERS[impl]()


def add_peers_from(path: str) -> None:
    """Adds the adapters of a Python file that defines a dict PEERS, as this one does."""
    found = runpy.run_path(path).get("PEERS")
    if not isinstance(found, dict):
        raise ValueError(f"{path} must define PEERS, a dict from name to a function making a Peer")
    PEERS.update(found)
