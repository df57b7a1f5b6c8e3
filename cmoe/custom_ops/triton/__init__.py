"""The triton backend: one source for CUDA, ROCm devices."""
