"""The size of the caches, and of the chunks that fill them: what the configuration asks for, and
what fits in memory."""

import functools

import jax
import jax.numpy as jnp

from maxtext.common.errors import ConfigError
from maxtext.common.hardware import host_memory_bytes
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.executor import Executor
from maxtext.inference.engine.prefix_cache import BlockPool, PrefixCache
from maxtext.inference.engine.programs import Programs
from maxtext.inference.engine.shapes import MAX_PREFILL_TOKENS, ChunkSize
from maxtext.layers.cache import CacheConfig

MAX_CACHE_FRACTION = 0.7  # of free memory; programs also need some
# Tokens of a prompt in one prefill program, unless prefill_chunk_size is set. On CPUs a program of
# more tokens takes longer without being more efficient.
CPU_CHUNK_TOKENS, CHUNK_TOKENS = 512, MAX_PREFILL_TOKENS
# Logits of a chunk with its cache, over all heads, where attention materializes them:
# they bound the memory and, on CPUs, the time of a program, whatever the length of the prompt is.
CPU_CHUNK_LOGITS, CHUNK_LOGITS = 1 << 26, 1 << 29


def make_cache_config(programs: Programs, slots: int, length: int) -> CacheConfig:
    """The caches for `slots` sequences of up to `length` tokens."""
    config = programs.config
    block_size = num_blocks = None
    if config.attention == "paged" or config.enable_prefix_caching:
        block_size = config.pagedattn_tokens_per_page
        if config.attention == "paged":
            num_blocks = config.pagedattn_num_pages
        else:  # as many blocks for idle prefixes as sequences need at most
            num_blocks = 2 * slots * -(-length // block_size)
    quantized = None
    if config.quantize_kvcache:
        quantized = {"int8": jnp.int8, "int4": jnp.int4}[config.kv_quant_dtype]
    return CacheConfig(
        slots,
        length,
        dtype=config.dtype.value,
        block_size=block_size,
        num_blocks=num_blocks,
        quantized=quantized,
        scale_by_head=config.kv_quant_axis.value == "dkv",
        context=programs.build,
    )


def fit_slots(
    programs: Programs, slots: int, length: int, memory_fraction: float = MAX_CACHE_FRACTION
) -> int:
    """`slots`, halved until their caches fit in this part of free memory; at least one. The key
    pagedattn_num_pages sets the size of a paged cache, however many slots share it.
    """
    if programs.config.attention == "paged":
        return slots
    cache_config = make_cache_config(programs, 1, length)
    with programs.context():
        state = programs.init_state.eval_shape(cache_config)  # traced once
    slot_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(state.caches))
    memory = jax.local_devices()[0].memory_stats() or {}
    free = memory.get("bytes_limit", host_memory_bytes() // 2) - memory.get("bytes_in_use", 0)
    while slots > 1 and slots * slot_bytes > free * programs.rules.mesh.size * memory_fraction:
        slots //= 2
    return slots


def check_cache(programs: Programs, cache_config: CacheConfig) -> None:
    """Raise ConfigError if keys configure the cache of a model that has none."""
    config = programs.config
    has_options = cache_config.block_size is not None or cache_config.quantized is not None
    if programs.has_caches or not has_options:
        return
    raise ConfigError(
        f"{no_cache_reason(config)}, so there is no cache: leave "
        "out attention=paged, enable_prefix_caching and quantize_kvcache"
    )


def no_cache_reason(config: MaxTextConfig) -> str:
    reason = "some layer has no cache"
    if config.use_indexer:
        reason = (
            f"indexer_topk={config.indexer_topk} is below "
            f"max_target_length={config.max_target_length}, and on CPUs its choice among equal "
            "scores, which is PyTorch's, depends on later tokens"
        )
    return f"this model recomputes all tokens in every step ({reason})"


def prefill_chunk_size(
    programs: Programs, executor: Executor, max_batched_tokens: int | None
) -> ChunkSize | None:
    """How much of a prompt one prefill program computes; None: all of it. No more than
    `max_batched_tokens`."""
    config, is_cpu = programs.config, programs.build.platform == "cpu"
    limit = max_batched_tokens
    if config.use_chunked_prefill and not programs.has_caches:
        log_once(f"prefill: without chunks, as {no_cache_reason(config)}")
    elif config.use_chunked_prefill:
        is_chosen = config.source("use_chunked_prefill").is_user
        if is_chosen or config.source("prefill_chunk_size").is_user:
            tokens = config.prefill_chunk_size
            return ChunkSize(tokens if limit is None else min(tokens, limit))
        tokens = CPU_CHUNK_TOKENS if is_cpu else CHUNK_TOKENS
        tokens = tokens if limit is None else min(tokens, limit)
        log_once(f"prefill: prompts of more than {tokens} tokens in chunks")
        heads = executor.chunk_logits_heads(tokens)
        max_logits = CPU_CHUNK_LOGITS if is_cpu else CHUNK_LOGITS
        # By fast attention, a whole prompt takes less time than its chunks: on an H200, 3.5 ms
        # instead of about 7.8 for 16,384 tokens of 32 heads in a layer.
        return ChunkSize(tokens, heads, max_logits, only_online=not heads and limit is None)
    return None if limit is None else ChunkSize(limit)


@functools.cache
def log_once(message: str) -> None:
    LOGGER.info(message)


def build_prefix_cache(config: MaxTextConfig, executor: Executor) -> PrefixCache:
    """The block pool of an executor, with a prefix cache as large as the keys allow."""
    cache_config = executor.cache_config
    max_idle = max_host = 0
    if config.enable_prefix_caching:
        # The per-slot caches are copied for each prefix.
        entry_bytes = max(executor.block_bytes + executor.slot_bytes, 1)
        max_idle = config.prefix_caching_hbm_byte // entry_bytes
        max_host = config.prefix_caching_dram_byte // entry_bytes
        if max_idle + max_host == 0:
            raise ConfigError(
                "enable_prefix_caching=true would do nothing: one block of a prefix takes "
                f"{entry_bytes} bytes, and prefix_caching_hbm_byte and prefix_caching_dram_byte "
                "are both less"
            )
    return PrefixCache(
        BlockPool(cache_config.total_blocks),
        cache_config.tokens_per_block,
        max_idle_blocks=max_idle,
        max_host_blocks=max_host,
        store=executor,
        snapshots=executor.has_slot_caches,
    )
