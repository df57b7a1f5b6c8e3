"""The two models that are compared, each loaded from the checkpoint its own way."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from cmoe.checkpoint.folder import open_checkpoint
from cmoe.checkpoint.load import load_model
from cmoe.integrations.transformers import replace_moe


def load_transformers(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' own model, by from_pretrained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True)
    return model.to(device).eval()


def load_cmoe(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """transformers' model with cmoe's blocks; every weight is read by cmoe.checkpoint.

    The model is built without values: memory that nobody has written to costs nothing yet.
    """
    config = AutoConfig.from_pretrained(folder)
    with no_init_weights(), torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _widen(model, dtype)
    replace_moe(model)
    load_model(
        model,
        open_checkpoint(folder),
        ignore=tuple(model._keys_to_ignore_on_load_unexpected or ()),
    )
    return model.eval()


def _widen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keeps in float32 what from_pretrained keeps in float32."""
    for part, wide in model._get_dtype_plan(dtype).items():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.data = parameter.data.to(wide)
