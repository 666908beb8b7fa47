"""Attention over arrays: `attend` with a named back end, or with the fastest that can do what is
asked.

dot_product: einsums and a softmax, everywhere and for everything; memory quadratic in the length.
flash: the splash kernel on TPUs; lengths that are multiples of 128, positions by index, no
selection of keys. cudnn_flash_jax: cuDNN on NVIDIA GPUs in bfloat16 or float16; no soft cap, no
sinks, no selection, positions by index.

`run_attention` is `attend` from gathered `AttentionInputs`, from which `max_logits` and `mean_weights` are had as
well.
"""

from maxtext.kernels.attention.checks import validate_inputs
from maxtext.kernels.attention.dispatch import (
    AUTOSELECTED,
    BACKENDS,
    Backend,
    attend,
    fastest_backend,
    run_attention,
    select_backend,
    try_backends,
)
from maxtext.kernels.attention.masks import dense_head_mask, dense_mask, zero_fully_masked_queries
from maxtext.kernels.attention.queries import map_queries
from maxtext.kernels.attention.request import (
    AttentionInputs,
    AttentionMask,
    AttentionRequest,
    BlockSizes,
)
from maxtext.kernels.attention.statistics import max_logits, mean_weights
from maxtext.kernels.attention.topk import ties_depend_on_length, torch_topk_mask

__all__ = [
    "AUTOSELECTED",
    "BACKENDS",
    "AttentionInputs",
    "AttentionMask",
    "AttentionRequest",
    "Backend",
    "BlockSizes",
    "attend",
    "dense_head_mask",
    "dense_mask",
    "fastest_backend",
    "map_queries",
    "max_logits",
    "mean_weights",
    "run_attention",
    "select_backend",
    "ties_depend_on_length",
    "torch_topk_mask",
    "try_backends",
    "validate_inputs",
    "zero_fully_masked_queries",
]
