"""Prints docs/families.md: what cmoe does for each family, with the errors that the walk sees."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from tabulate import tabulate

from cmoe.families import SWITCH_ONLY, family_of
from tests.integrations.transformers import walk
from tests.integrations.transformers.architectures import ARCHITECTURES, model_class

COMMAND = "python -m tests.integrations.transformers.families_table > docs/families.md"
TEXT = """# Model families

What cmoe does for each family of transformers whose experts go through its experts interface. This
page is made by

    {command}

which builds a two-layer model of each family with random weights, sizes that divide nothing, a
correction bias that changes the choice; then compares float32 results with those of transformers'
own eager experts. Printed with transformers {transformers}, torch {torch}.

- **switch**: `experts_implementation="cmoe"`; **replace**: `replace_moe(model)`. The largest
  difference of the logits (of a model without a head, of its last hidden states) over the largest
  logit.
- **gradients**: the largest difference of a parameter's gradient over that gradient's largest
  value, the worse of both ways.
- **load**: the same of logits, for what transformers saved, loaded into a model on cmoe. **save**:
  for what a model on cmoe saved, loaded by transformers.
- A model that amplifies rounding shows larger errors: its eager run in float32 is as far from
  float64 (`rounding` in `tests/integrations/transformers/walk.py`).

`tests/integrations/transformers/test_architectures.py` holds these numbers against a budget,
compiles each model into one graph, compares greedy tokens; `test_routing.py` compares the routers
on logits with ties, with one group of winners, on negative ones, in bfloat16.

## Where a replaced block differs

- Logits are formed in float32, weights stay in float32. Several families round one of them to
  bfloat16 in a bfloat16 model, so such a run differs by that rounding. `lfm2_moe` rounds the scores
  too, before it adds the bias, so that experts of nearly equal choice change places.
- The lower id wins a tie; transformers leaves that open.
- A token's weights are divided by their sum plus 1e-20 (`lfm2_moe`: 1e-6, as there). Families that
  add nothing differ where the sum is as small; `ernie4_5_moe` divides by no less than 1e-12.

## {num_replaced} families whole

The row of a family in `cmoe/families/table.py` says what its block computes. Under *where* is the
setting that the row holds for; a model with another is refused, the switch serves it.

{replaced}

## {num_switched} families by the switch alone

{switched}
"""


def table() -> str:
    """The page."""
    rows = [(name, model_class(name).config_class.model_type) for name in ARCHITECTURES]
    replaced = [row for row in rows if row[1] not in SWITCH_ONLY]
    switched = [row for row in rows if row[1] in SWITCH_ONLY]
    return TEXT.format(
        command=COMMAND,
        transformers=transformers.__version__,
        torch=torch.__version__.partition("+")[0],
        num_replaced=len(replaced),
        num_switched=len(switched),
        replaced=tabulate(
            list(whole(replaced)),
            headers=("family", "switch", "replace", "gradients", "load", "save", "where"),
            tablefmt="github",
            disable_numparse=True,
        ),
        switched=tabulate(
            list(by_the_switch(switched)),
            headers=("family", "switch", "gradients", "load", "save", "why not whole"),
            tablefmt="github",
            disable_numparse=True,
        ),
    )


def whole(rows: list[tuple[str, str]]) -> Iterator[tuple[str, ...]]:
    """A line for each family with a row."""
    for architecture, model_type in rows:
        holds_when = family_of(model_type).holds_when
        yield (
            f"`{model_type}`",
            _error(walk.logits_error(architecture, "switch")),
            _error(walk.logits_error(architecture, "replace")),
            *measured(architecture, ("switch", "replace")),
            ", ".join(f"`{key}` is {value}" for key, value in holds_when.items()),
        )


def by_the_switch(rows: list[tuple[str, str]]) -> Iterator[tuple[str, ...]]:
    """A line for each family without."""
    for architecture, model_type in rows:
        yield (
            f"`{model_type}`",
            _error(walk.logits_error(architecture, "switch")),
            *measured(architecture, ("switch",)),
            SWITCH_ONLY[model_type],
        )


def measured(architecture: str, ways: tuple[str, ...]) -> tuple[str, str, str]:
    """Gradients, load, save: the worst of the ways."""
    gradients = max(walk.gradient_error(architecture, way) for way in ways)
    loads, saves = [], []
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            loads.append(walk.load_error(architecture, way, Path(folder)))
        with tempfile.TemporaryDirectory() as folder:
            saves.append(walk.save_error(architecture, way, Path(folder)))
    save = "to the bit" if max(saves) == 0 else _error(max(saves))
    return _error(gradients), _error(max(loads)), save


def _error(value: float) -> str:
    return f"{value:.0e}" if value else "0"


if __name__ == "__main__":
    sys.stdout.write(table())
