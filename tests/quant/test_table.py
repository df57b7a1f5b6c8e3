"""The table of weight formats."""

from __future__ import annotations

import pytest

import cmoe
from cmoe.quant.base import QuantMethod
from cmoe.quant.table import QUANT_METHODS, make_quant_method
from tests.layers import config_of


@pytest.mark.parametrize("name", QUANT_METHODS)
def test_every_row_makes_its_method(name: str) -> None:
    method = make_quant_method(cmoe.QuantConfig(method=name))
    assert type(method) is QUANT_METHODS[name]
    assert isinstance(method, QuantMethod)


def test_no_row_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown quant method 'int3'; choose one of unquantized"):
        make_quant_method(cmoe.QuantConfig(method="int3"))


def test_a_layer_with_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown quant method 'int3'"):
        cmoe.FusedMoE(config_of(quant=cmoe.QuantConfig(method="int3")), "mlp")
