"""The layer that config.json describes, with transformers' defaults for what it leaves out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from cmoe.config import MoEConfig, moe_part
from cmoe.families import Attr, Family

_DTYPES = ("dtype", "torch_dtype")


class Described(NamedTuple):
    """A layer; the entries that config.json does not have, as transformers' config class does."""

    config: MoEConfig
    defaults: Mapping[str, Any]


def described(hf_config: Mapping[str, Any], family: Family) -> Described:
    """The layer of a config.json.

    transformers is imported only where an entry is absent: that takes seconds. ValueError for
    values that no layer has, for an entry that has no default, or is absent where transformers is.
    """
    try:
        return Described(MoEConfig.from_hf(hf_config), {})
    except ValueError as error:
        part = moe_part(hf_config)
        absent = [a.name for a in family.attributes() if _is_absent(a, part)]
        if not absent:
            raise
        if importlib.util.find_spec("transformers") is None:
            raise ValueError(
                f"{error} config.json has no {', '.join(absent)}; install transformers, whose "
                "defaults are taken then"
            ) from error
        defaults = _defaults(part, family, absent)
        outer = {} if _given(part, _DTYPES) else _given(hf_config, _DTYPES)
        return Described(MoEConfig.from_hf({**part, **outer, **defaults}), defaults)


def _is_absent(attribute: Attr, part: Mapping[str, Any]) -> bool:
    names = [name for name in (attribute.name, attribute.other_name) if name is not None]
    return attribute.default is None and not any(name in part for name in names)


def _given(entries: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: entries[name] for name in names if entries.get(name) is not None}


def _defaults(part: Mapping[str, Any], family: Family, absent: list[str]) -> dict[str, Any]:
    """What transformers' config class has under the absent names, given the row's others.

    No more than these: what a class computes of a damaged config.json may take for ever.
    """
    from transformers import CONFIG_MAPPING  # Takes seconds, and is seldom needed.

    names = [n for a in family.attributes() for n in (a.name, a.other_name) if n is not None]
    try:
        config = CONFIG_MAPPING[family.model_type](**_given(part, names))
    except Exception:  # Its own checks refuse what is given, or there is no such class.
        return {}
    known = {name: vars(config).get(config.attribute_map.get(name, name)) for name in absent}
    return {name: value for name, value in known.items() if value is not None}
