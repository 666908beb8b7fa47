"""Pallas kernels of a decode step on NVIDIA GPUs: one token a sequence, so reading weights and
caches is the time.
"""
