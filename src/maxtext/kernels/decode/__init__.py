"""Pallas kernels of a decode step on NVIDIA GPUs: with one token a sequence, time is spent on
reading weights and caches.
"""
