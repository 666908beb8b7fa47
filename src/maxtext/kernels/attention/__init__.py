"""Attention over arrays: `attend` with a named back end, or with the fastest that can do what is asked.

dot_product: einsums and a softmax, everywhere and for everything; memory quadratic in the length.
flash: the splash kernel on TPUs; lengths that are multiples of 128, positions by index.
cudnn_flash_jax: cuDNN on NVIDIA GPUs in bfloat16 or float16; no soft cap, no sinks, positions by index.
"""

from maxtext.kernels.attention.dispatch import BACKENDS, Backend, attend, choose, try_backends
from maxtext.kernels.attention.request import BlockSizes, Inputs, Request, Visibility

__all__ = [
    "BACKENDS",
    "Backend",
    "BlockSizes",
    "Inputs",
    "Request",
    "Visibility",
    "attend",
    "choose",
    "try_backends",
]
