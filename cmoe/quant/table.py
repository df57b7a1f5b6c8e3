"""The table of weight formats."""

from __future__ import annotations

from collections.abc import Mapping

from cmoe.config import QuantConfig
from cmoe.quant.base import QuantMethod
from cmoe.quant.unquantized import Unquantized

QUANT_METHODS: Mapping[str, type[QuantMethod]] = {"unquantized": Unquantized}


def make_quant_method(config: QuantConfig) -> QuantMethod:
    """The method that the config names; ValueError lists the known ones."""
    if config.method not in QUANT_METHODS:
        raise ValueError(
            f"unknown quant method {config.method!r}; choose one of {', '.join(QUANT_METHODS)}"
        )
    return QUANT_METHODS[config.method]()
