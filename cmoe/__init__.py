"""cmoe: the Mixture-of-Experts layer for torch.compile'd PyTorch models."""

from cmoe.activation import ACTIVATIONS, Activation
from cmoe.config import CheckpointLayout, MoEConfig, ParallelConfig, QuantConfig, RouterConfig
from cmoe.context import get_layer_from_name, static_context
from cmoe.errors import LoadError, UnsupportedError
from cmoe.expert_map import ExpertMapManager
from cmoe.gate import GateLinear
from cmoe.layer import FusedMoE
from cmoe.loading.report import LoadReport
from cmoe.packed_weights import pack_weights, unpack_weights
from cmoe.pluggable import PluggableLayer
from cmoe.routed_experts import RoutedExperts
from cmoe.router import (
    CustomRouter,
    FusedMoERouter,
    GivenTopKRouter,
    HashRouter,
    SimulatedRouter,
    TopKRouter,
    ZeroExpertRouter,
)
from cmoe.routing import RouterInputs, Routing
from cmoe.runner import MoERunner
from cmoe.runner_interface import MoEOutput, MoERunnerInterface
from cmoe.shared_experts import SharedExperts

__version__ = "0.1.0.dev0"

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "CheckpointLayout",
    "CustomRouter",
    "ExpertMapManager",
    "FusedMoE",
    "FusedMoERouter",
    "GateLinear",
    "GivenTopKRouter",
    "HashRouter",
    "LoadError",
    "LoadReport",
    "MoEConfig",
    "MoEOutput",
    "MoERunner",
    "MoERunnerInterface",
    "ParallelConfig",
    "PluggableLayer",
    "QuantConfig",
    "RoutedExperts",
    "RouterConfig",
    "RouterInputs",
    "Routing",
    "SharedExperts",
    "SimulatedRouter",
    "TopKRouter",
    "UnsupportedError",
    "ZeroExpertRouter",
    "get_layer_from_name",
    "pack_weights",
    "static_context",
    "unpack_weights",
]
