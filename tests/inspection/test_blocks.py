"""Every family's own files, inspected without transformers' help: nothing is missing or unused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cmoe.checkpoint import open_checkpoint
from cmoe.checkpoint.resemblance import families_like
from cmoe.families import SWITCH_ONLY
from cmoe.inspection import report
from cmoe.inspection.report import inspect_folder
from tests.integrations.transformers.architectures import ARCHITECTURES, tiny

# Its files have names for everything that no row translates: only transformers can load them.
WITHOUT = ("mistral_large4",)


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a not in WITHOUT])
def test_an_architectures_files(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "read_gbps", lambda device: 10.0)
    model = tiny(architecture)
    model.save_pretrained(tmp_path)
    text, is_loadable = inspect_folder(tmp_path)
    assert is_loadable, text
    if model.config.model_type not in SWITCH_ONLY:
        assert "missing      nothing\nunused       nothing" in text
        assert re.search(r"^blocks +[2-3]: ", text, re.MULTILINE)
        assert model.config.model_type in families_like(open_checkpoint(tmp_path).tensors)
