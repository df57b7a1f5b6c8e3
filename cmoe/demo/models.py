"""The two models that are compared, each loaded from the checkpoint its own way."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from cmoe.integrations.transformers import from_pretrained
from cmoe.integrations.transformers.pretrained import model_class


def load_transformers(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' own model, by its from_pretrained, on the experts that run at any size."""
    cls = model_class(AutoConfig.from_pretrained(folder))
    model = cls.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, experts_implementation="eager"
    )
    return model.to(device).eval()


def load_cmoe(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' model with cmoe's blocks."""
    return from_pretrained(folder, dtype=dtype, device=device)
