"""A saved model with its experts on cmoe, each weight read straight to where it stays."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights

from cmoe.checkpoint import load_model, open_checkpoint
from cmoe.checkpoint.folder import CONFIG
from cmoe.checkpoint.load import judge_model
from cmoe.config import moe_part
from cmoe.errors import LoadError
from cmoe.families import SWITCH_ONLY
from cmoe.integrations.transformers.experts import register
from cmoe.integrations.transformers.replace import replace_moe
from cmoe.loading.report import listed

logger = logging.getLogger("cmoe")


def from_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """The folder's model in eval mode, its sparse blocks MoERunners.

    dtype: default that of config.json. The model is built without values, then its blocks are
    replaced, then `load_model` reads every tensor into its place: memory peaks at hardly more than
    the weights. Where transformers has to convert tensors outside of the experts, or where the
    table of families has no row for the block, transformers loads the model (a line in the log says
    so); without a row the blocks stay, with their experts on cmoe.
    LoadError for a folder that is damaged, incomplete, or has more than the model takes.
    """
    folder, device = Path(folder), torch.device(device)
    if device.type == "meta":
        raise ValueError("from_pretrained fills the weights, so they need a device; got meta")
    torch.empty(0, device=device)  # A device that is not there is an error before any work.
    checkpoint = open_checkpoint(folder)
    with _damage_is_said(folder):
        hf_config = AutoConfig.from_pretrained(folder)
        part = hf_config.get_text_config()
        dtype = dtype or hf_config.dtype or part.dtype or torch.get_default_dtype()
        cls = model_class(hf_config)
    if (reason := SWITCH_ONLY.get(moe_part(hf_config).model_type)) is not None:
        register()
        logger.warning("%s is loaded by transformers: %s", folder, reason)
        model = _loaded_by_transformers(cls, folder, dtype)
        model.set_experts_implementation("cmoe")
        return model.to(device).eval()
    with no_init_weights(), device, _damage_is_said(folder):
        model = cls._from_config(hf_config, dtype=dtype)
    model.tie_weights()  # Part of the initialisation that was left out.
    _widen(model, dtype)
    replace_moe(model)
    ignore = _not_needed(model)
    homeless = judge_model(model, checkpoint, ignore=ignore).keys_without_home
    if converted := _converted_by_transformers(model, homeless):
        logger.warning("%s is loaded by transformers: it converts %s", folder, listed(converted))
        del model
        model = _loaded_by_transformers(cls, folder, dtype).to(device)
        replace_moe(model)
    else:
        load_model(model, checkpoint, ignore=ignore)
    return model.eval()


@contextlib.contextmanager
def _damage_is_said(folder: Path) -> Iterator[None]:
    """LoadError for whatever transformers raises at a config.json that makes no model."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise LoadError(
            f"{folder / CONFIG} makes no model of transformers ({reason:.300}); is it damaged, or "
            "of another model?"
        ) from error


def model_class(hf_config: Any) -> Any:
    """The class that saved the model, where config.json tells; else the one for causal LMs."""
    for name in hf_config.architectures or ():
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel):
            return cls
    return AutoModelForCausalLM._model_mapping[type(hf_config)]


def _not_needed(model: nn.Module) -> tuple[str, ...]:
    """What transformers itself passes over in checkpoints of the model."""
    patterns: set[str] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            patterns.update(module._keys_to_ignore_on_load_unexpected or ())
    return tuple(sorted(patterns))


def _converted_by_transformers(model: PreTrainedModel, keys: tuple[str, ...]) -> list[str]:
    """Those that transformers gives another name or another form when it loads them."""
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    return [k for k in keys if rename_source_key(k, renamings, converters) != (k, None)]


def _loaded_by_transformers(cls: Any, folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """By its own from_pretrained. LoadError where that would only warn."""
    model, info = cls.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    problems = [
        f"{words} {listed(str(key) for key in info[kind])}"
        for kind, words in {
            "unexpected_keys": "no home for",
            "missing_keys": "missing",
            "mismatched_keys": "another shape for",
        }.items()
        if info[kind]
    ]
    if problems:
        raise LoadError(f"{folder}: {'; '.join(problems)}")
    return model


def _widen(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Keeps in float32 what transformers' from_pretrained keeps in float32."""
    for part, wide in model._get_dtype_plan(dtype).items():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.data = parameter.data.to(wide)
