"""The table of model families: rows, what rows are made of, the way to find one."""

from cmoe.families.row import Attr, Choice, Family, Layout, Modules
from cmoe.families.table import FAMILIES, SWITCH_ONLY, family_of

__all__ = [
    "FAMILIES",
    "SWITCH_ONLY",
    "Attr",
    "Choice",
    "Family",
    "Layout",
    "Modules",
    "family_of",
]
