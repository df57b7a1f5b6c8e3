"""Which families of the table a checkpoint's tensors look like, whatever its config.json says."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cmoe.checkpoint.translate import Names
from cmoe.families import FAMILIES, Family
from cmoe.loading.expert_names import parse_expert_name

_BIAS = "router.e_score_correction_bias"


def families_like(keys: Iterable[str]) -> tuple[str, ...]:
    """model_types whose blocks consist of what the names of a checkpoint speak of.

    Families that rename what is there go before those that take the names as they are.
    """
    # One expert stands for all of a block.
    keys = dict.fromkeys(re.sub(r"(?<=experts\.)\d+(?=\.)", "0", key) for key in keys)
    found: dict[bool, list[str]] = {True: [], False: []}
    for family in FAMILIES:
        names = Names(family)
        renames = any(names.in_model(key) != key for key in keys)
        if _fits(family, names, keys):
            found[renames].append(family.model_type)
    return (*found[True], *found[False])


def block_of(name: str) -> str | None:
    """Path of the sparse block that an expert tensor belongs to; None for other tensors."""
    if parse_expert_name(name) is None:
        return None
    return name[: name.rindex("experts.")].removesuffix("routed_").removesuffix("experts.")


def _fits(family: Family, names: Names, keys: Iterable[str]) -> bool:
    renamed = [names.in_model(key) for key in keys]
    start = next((block for block in map(block_of, renamed) if block is not None), None)
    if start is None:
        return False
    inner = {names.in_runner(n.removeprefix(start)) for n in renamed if n.startswith(start)}
    parts = {_part(name) for name in inner}
    biased = family.router.get("e_score_correction_bias", False)
    required = {"experts", "gate.weight", *([_BIAS] if biased is True else [])}
    optional = {"gate.bias", *(_part(ours) for _, ours in family.runner_names())}
    return required <= parts <= required | (optional if biased else optional - {_BIAS})


def _part(name: str) -> str:
    """The experts, a tensor of gate or router, or the module beside them that a tensor is of."""
    first = name.partition(".")[0]
    if first in ("gate", "router"):
        return name
    return "experts" if first in ("experts", "routed_experts") else first
