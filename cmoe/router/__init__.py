"""Routers: which experts each token goes to. One file each; `base.py` is the contract."""

from cmoe.router.base import FusedMoERouter
from cmoe.router.custom import CustomRouter
from cmoe.router.given import GivenTopKRouter
from cmoe.router.hash import HashRouter
from cmoe.router.simulated import SimulatedRouter
from cmoe.router.topk import TopKRouter
from cmoe.router.zero_expert import ZeroExpertRouter

__all__ = [
    "CustomRouter",
    "FusedMoERouter",
    "GivenTopKRouter",
    "HashRouter",
    "SimulatedRouter",
    "TopKRouter",
    "ZeroExpertRouter",
]
