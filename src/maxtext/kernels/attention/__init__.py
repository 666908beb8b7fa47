"""Attention over arrays: `attend` runs a named back end, or the fastest that supports the request.

- dot_product: einsums and a softmax; every platform and every option; memory quadratic in length.
- flash: the splash kernel on TPUs; lengths are multiples of 128, positions are indices, no
  selection of keys.
- cudnn_flash_jax: cuDNN on NVIDIA GPUs in bfloat16 or float16; no soft cap, no sinks, no selection
  of keys, positions are indices.

`run_attention` is `attend` for an `AttentionInputs`, which `max_logits` and `mean_weights` take,
too.
"""

from maxtext.kernels.attention import cudnn
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
from maxtext.kernels.attention.dot_product import max_logits, mean_weights
from maxtext.kernels.attention.masks import (
    dense_head_mask,
    dense_mask,
    map_queries,
    zero_fully_masked_queries,
)
from maxtext.kernels.attention.request import (
    AttentionInputs,
    AttentionMask,
    AttentionRequest,
    BlockSizes,
    validate_inputs,
)
from maxtext.kernels.attention.topk import ties_depend_on_length, torch_topk_mask

# JAX primitives whose result is the output of attention: what they return cannot be named for
# rematerialization.
OUTPUT_PRIMITIVES = frozenset({cudnn.FORWARD_PRIMITIVE})

__all__ = [
    "AUTOSELECTED",
    "BACKENDS",
    "OUTPUT_PRIMITIVES",
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
