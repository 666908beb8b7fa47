"""Attention over arrays: `attend` with a named back end, or with the fastest that can do what is
asked.

dot_product: einsums and a softmax, everywhere and for everything; memory quadratic in the length.
flash: the splash kernel on TPUs; lengths that are multiples of 128, positions by index, no
selection of keys. cudnn_flash_jax: cuDNN on NVIDIA GPUs in bfloat16 or float16; no soft cap, no
sinks, no selection, positions by index.

`compute` is `attend` from gathered `Inputs`, from which `max_logits` and `mean_weights` are had as
well.
"""

from maxtext.kernels.attention.checks import checked
from maxtext.kernels.attention.dispatch import (
    AUTOSELECTED,
    BACKENDS,
    Backend,
    attend,
    backend_for,
    choose,
    compute,
    try_backends,
)
from maxtext.kernels.attention.masks import hide_blind_queries, mask, mask_by_head
from maxtext.kernels.attention.queries import map_queries
from maxtext.kernels.attention.request import BlockSizes, Inputs, Request, Visibility
from maxtext.kernels.attention.statistics import max_logits, mean_weights
from maxtext.kernels.attention.ties import largest_keys, ties_depend_on_length

__all__ = [
    "AUTOSELECTED",
    "BACKENDS",
    "Backend",
    "BlockSizes",
    "Inputs",
    "Request",
    "Visibility",
    "attend",
    "backend_for",
    "checked",
    "choose",
    "compute",
    "hide_blind_queries",
    "largest_keys",
    "map_queries",
    "mask",
    "mask_by_head",
    "max_logits",
    "mean_weights",
    "ties_depend_on_length",
    "try_backends",
]
