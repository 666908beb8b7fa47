"""Pallas kernels for NVIDIA GPUs by Triton whose programs read whole rows."""
