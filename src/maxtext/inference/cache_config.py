"""The size of the caches: what the configuration asks for, and what fits in memory."""

import jax
import jax.numpy as jnp

from maxtext.common.hardware import host_memory_bytes
from maxtext.inference.programs import Programs
from maxtext.layers.cache import CacheSize

MAX_CACHE_FRACTION = 0.7  # of free memory; programs need some, too


def cache_size(programs: Programs, slots: int, length: int) -> CacheSize:
    """The caches for `slots` sequences of up to `length` tokens."""
    config = programs.config
    block_size = num_blocks = 0
    if config.attention == "paged" or config.enable_prefix_caching:
        block_size = config.pagedattn_tokens_per_page
        if config.attention == "paged":
            num_blocks = config.pagedattn_num_pages
        else:  # as many blocks for idle prefixes as sequences need at most
            num_blocks = 2 * slots * -(-length // block_size)
    quantized = None
    if config.quantize_kvcache:
        quantized = {"int8": jnp.int8, "int4": jnp.int4}[config.kv_quant_dtype]
    return CacheSize(
        slots,
        length,
        dtype=config.dtype.value,
        page=block_size,
        pages=num_blocks,
        quantized=quantized,
        scale_by_head=config.kv_quant_axis.value == "dkv",
        context=programs.build,
    )


def fit_slots(programs: Programs, slots: int, length: int) -> int:
    """`slots`, halved until their caches fit in free memory; at least one. The key
    pagedattn_num_pages sets the size of a paged cache, however many slots share it.
    """
    if programs.config.attention == "paged":
        return slots
    size = cache_size(programs, 1, length)
    caches = jax.eval_shape(lambda: programs.runner.init_caches(size))
    slot_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(caches))
    memory = jax.local_devices()[0].memory_stats() or {}
    free = memory.get("bytes_limit", host_memory_bytes() // 2) - memory.get("bytes_in_use", 0)
    while slots > 1 and slots * slot_bytes > free * jax.device_count() * MAX_CACHE_FRACTION:
        slots //= 2
    return slots
