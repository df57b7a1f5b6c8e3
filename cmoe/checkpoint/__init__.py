"""Checkpoints in Hugging Face format: what their names mean, how they are read."""
