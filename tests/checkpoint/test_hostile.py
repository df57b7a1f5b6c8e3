"""Folders changed at random, configs full of nonsense: a LoadError, or a folder that is right."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cmoe import LoadError
from cmoe.checkpoint import open_checkpoint
from cmoe.inspection import report
from cmoe.inspection.report import inspect_folder
from tests.inspection.test_report import QWEN, folder_of, two_blocks

NONSENSE: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, "", "x" * 1000, "\ud800", float("nan")),
    *([], [1], {}, {"model_type": "mixtral"}, [[[]]], {"a": {"model_type": []}}),
)


def mutated(content: bytes, generator: random.Random) -> bytes:
    """A few bytes changed, a piece cut out, or a piece put twice."""
    start, stop = sorted(generator.randrange(len(content) + 1) for _ in range(2))
    change = generator.randrange(3)
    if change == 0:
        changed = bytearray(content)
        for _ in range(generator.randint(1, 8)):
            changed[generator.randrange(min(len(changed), 400))] = generator.choice(
                b'\x00\xff09-."[]{},:eE\\u'
            )
        return bytes(changed)
    return content[:start] + content[stop:] if change == 1 else content[:stop] + content[start:]


def is_refused(call: Callable[[], Any]) -> bool:
    """Whether it raises a LoadError of readable length; any other error is the test's."""
    try:
        call()
    except LoadError as error:
        if len(str(error)) > 2000:
            raise
        return True
    return False


def read_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name in checkpoint.tensors:
        checkpoint.get(name).clone()


@pytest.mark.parametrize("seed", range(20))
def test_mutated_files(seed: int, tmp_path: Path) -> None:
    """What still opens can be read to its last byte."""
    generator = random.Random(seed)
    names = [f"model-{number}.safetensors" for number in range(2)]
    for number, name in enumerate(names):
        save_file({f"t{number}": torch.ones(3, 4), f"u{number}": torch.ones(5)}, tmp_path / name)
    weight_map = {f"{letter}{number}": names[number] for letter in "tu" for number in range(2)}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    paths = [index, tmp_path / "config.json", *(tmp_path / name for name in names)]
    originals = {path: path.read_bytes() for path in paths}
    refused = 0
    for _ in range(30):
        path = generator.choice(paths)
        path.write_bytes(mutated(originals[path], generator))
        refused += is_refused(lambda: read_all(tmp_path))
        path.write_bytes(originals[path])
    assert refused > 10


@pytest.mark.parametrize("key", sorted(QWEN))
def test_nonsense_for_one_entry_of_the_config(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "read_gbps", lambda device: 10.0)
    folder = folder_of(tmp_path, two_blocks(), QWEN)
    for value in NONSENSE:
        (folder / "config.json").write_text(json.dumps({**QWEN, key: value}))
        is_refused(lambda: inspect_folder(folder))
    (folder / "config.json").write_text(json.dumps({k: v for k, v in QWEN.items() if k != key}))
    is_refused(lambda: inspect_folder(folder))


@pytest.mark.parametrize("value", NONSENSE)
def test_nonsense_in_the_index(value: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, two_blocks(), QWEN)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = folder / "model.safetensors.index.json"
    for content in (value, {"weight_map": value}, {"weight_map": {"a": value}}):
        index.write_text(json.dumps(content))
        with pytest.raises(LoadError):
            open_checkpoint(folder)
