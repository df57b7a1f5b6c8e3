"""Checkpoints in Hugging Face format: opened, loaded, written again."""

from cmoe.checkpoint.folder import Checkpoint, open_checkpoint
from cmoe.checkpoint.load import load_layer, load_model
from cmoe.checkpoint.save import save_model

__all__ = ["Checkpoint", "load_layer", "load_model", "open_checkpoint", "save_model"]
