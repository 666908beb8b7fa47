"""The size of the caches: what the configuration asks for, and what fits in memory."""

import jax
import jax.numpy as jnp

from maxtext.common.hardware import host_memory_bytes
from maxtext.inference.programs import Programs
from maxtext.layers.cache import CacheConfig

MAX_CACHE_FRACTION = 0.7  # of free memory; programs need some, too


def make_cache_config(programs: Programs, slots: int, length: int) -> CacheConfig:
    """The caches for `slots` sequences of up to `length` tokens."""
    config = programs.config
    page_size = num_pages = None
    if config.attention == "paged" or config.enable_prefix_caching:
        page_size = config.pagedattn_tokens_per_page
        if config.attention == "paged":
            num_pages = config.pagedattn_num_pages
        else:  # as many blocks for idle prefixes as sequences need at most
            num_pages = 2 * slots * -(-length // page_size)
    quantized = None
    if config.quantize_kvcache:
        quantized = {"int8": jnp.int8, "int4": jnp.int4}[config.kv_quant_dtype]
    return CacheConfig(
        slots,
        length,
        dtype=config.dtype.value,
        page_size=page_size,
        num_pages=num_pages,
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
    cache_config = make_cache_config(programs, 1, length)
    caches = jax.eval_shape(lambda: programs.runner.init_caches(cache_config))
    slot_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(caches))
    memory = jax.local_devices()[0].memory_stats() or {}
    free = memory.get("bytes_limit", host_memory_bytes() // 2) - memory.get("bytes_in_use", 0)
    while slots > 1 and slots * slot_bytes > free * jax.device_count() * MAX_CACHE_FRACTION:
        slots //= 2
    return slots
