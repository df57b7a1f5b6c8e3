"""Kernel ops: pure functions of tensors, each with its fake, its reference, its backends."""
