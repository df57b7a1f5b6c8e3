"""A model back into a checkpoint: the load's own plan, followed in the other direction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from cmoe.checkpoint.folder import CONFIG, Checkpoint
from cmoe.checkpoint.homes import ModelHomes
from cmoe.checkpoint.layouts import with_layout
from cmoe.checkpoint.load import family_in, keys_without
from cmoe.checkpoint.translate import Names
from cmoe.checkpoint.write import Planned, new_folder, write_json, write_shards
from cmoe.loading.report import Homes, LoadReport

SHARD_BYTES = 5_000_000_000

_LAYOUTS = ("original", "per_expert", "fused")


def save_model(
    model: nn.Module,
    folder: str | Path,
    like: Checkpoint,
    *,
    layout: Literal["original", "per_expert", "fused"] = "original",
    ignore: Collection[str] = (),
    max_shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Writes the model under the names of the checkpoint that it came from; the files written.

    like: names, shapes, config.json are its; dtypes are the model's own. Nothing is cast, so that
        load_model of the result gives the same bits; where the dtype is that of `like`, so are the
        tensors of the files.
    layout: of the routed experts; "original" as `like` has them, "per_expert" a tensor for each
        projection of each expert, "fused" one for all of them, as transformers keeps them.
    ignore: regular expressions of names that the model does without, as for load_model.
    max_shard_bytes: what a file may have, unless it is one tensor.

    The folder must be new or empty; it appears whole or, after an error, not at all. A tokenizer's
    files are left to the caller. LoadError, before anything is written, for a name with no home in
    the model, for a place of the model without a name; ValueError for a folder that is there
    already; OSError where it cannot be written, such as on a full disk.
    """
    if layout not in _LAYOUTS:
        raise ValueError(f"unknown layout {layout!r}; choose one of {', '.join(_LAYOUTS)}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    folder = Path(folder)
    family = family_in(like)
    shapes = {key: like.tensors[key].shape for key in keys_without(like, ignore)}
    if layout != "original":
        shapes = with_layout(shapes, layout, family)
    homes = ModelHomes(model, Names(family)).whole(list(shapes))
    planned = _planned(shapes, homes, str(like.folder))

    def fill(key: str, tensor: Tensor) -> None:
        for write in homes.home_of(key, tensor) or ():
            write.source.copy_(write.target.detach())

    with new_folder(folder) as partial:
        files = write_shards(partial, planned, fill, max_shard_bytes=max_shard_bytes)
        write_json(partial / CONFIG, _config(like, planned))
    return [folder / file.name for file in files]


def _planned(shapes: Mapping[str, tuple[int, ...]], homes: Homes, what: str) -> list[Planned]:
    """Every tensor with the dtype that the model keeps it in. LoadError: see save_model."""
    planned: list[Planned] = []
    filled_by: dict[str, str] = {}
    homeless: list[str] = []
    for key, shape in shapes.items():
        writes = homes.home_of(key, torch.empty(shape, device="meta"))
        if not writes:
            homeless.append(key)
            continue
        planned.append(Planned(key, shape, writes[0].target.dtype))
        filled_by.update({slot: key for write in writes for slot in write.slots})
    unwritten = tuple(slot for slot in homes.slots if slot not in filled_by)
    keys = tuple(tensor.name for tensor in planned)
    LoadReport(keys, tuple(filled_by), tuple(homeless), unwritten, filled_by=filled_by).check(what)
    return planned


def _config(like: Checkpoint, planned: Sequence[Planned]) -> dict[str, Any]:
    """config.json of the checkpoint; its dtype is that of most of the bytes."""
    sizes: Counter[str] = Counter()
    for tensor in planned:
        sizes[str(tensor.dtype).removeprefix("torch.")] += tensor.num_bytes()
    name = "dtype" if "dtype" in like.config else "torch_dtype"
    return {**like.config, name: sizes.most_common(1)[0][0]}
