"""The two models that are compared, each loaded from the checkpoint its own way."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cmoe.integrations.transformers import from_pretrained


def load_transformers(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' own model, by from_pretrained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return model.to(device).eval()


def load_cmoe(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' model with cmoe's blocks."""
    return from_pretrained(folder, dtype=dtype, device=device)
