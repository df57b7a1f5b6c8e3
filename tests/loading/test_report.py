"""The report of a load, in few words."""

from __future__ import annotations

import pytest

from cmoe import LoadError, LoadReport
from cmoe.loading.report import listed

KEYS = tuple(f"experts.{expert}.up_proj.weight" for expert in range(5000))


def test_its_repr_is_short() -> None:
    assert repr(LoadReport(KEYS, KEYS[:7])) == "LoadReport(5000 keys used, 7 slots written)"
    report = LoadReport(KEYS, KEYS, KEYS, ("w13_weight[3].w1",), ("gate.weight",))
    assert len(repr(report)) < 800
    for part in (
        "no home for experts.0.up",
        "missing experts.3.up_proj.weight (for w13_weight[3].w1)",
        "in gate.weight",
    ):
        assert part in repr(report)


def test_each_problem_is_an_error() -> None:
    assert LoadReport(KEYS, KEYS).check("mlp").keys_used == KEYS
    for field, message in {
        "keys_without_home": "mlp: no home for a",
        "slots_unwritten": "mlp: missing a",
        "keys_overflowed": "mlp: finite values became infinite in a",
    }.items():
        with pytest.raises(LoadError, match=message):
            LoadReport(KEYS, KEYS)._replace(**{field: ("a",)}).check("mlp")


def test_names_are_listed_in_order_some_of_many() -> None:
    assert listed(["b", "a"]) == "a, b"
    assert listed(KEYS).endswith(" with 4988 more")
    assert listed(["x" * 1000]) == "x" * 200 + "..."
