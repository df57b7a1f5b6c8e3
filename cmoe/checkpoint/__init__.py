"""Checkpoints in Hugging Face format: what their names mean, how they are read."""

from cmoe.checkpoint.folder import Checkpoint, open_checkpoint
from cmoe.checkpoint.load import load_layer, load_model

__all__ = ["Checkpoint", "load_layer", "load_model", "open_checkpoint"]
