"""The size of the caches, and of the chunks that fill them, as the configuration asks for it."""

import functools

from jax.typing import DTypeLike

from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.executor import Executor
from maxtext.inference.engine.layout import EngineLayout
from maxtext.inference.engine.prefix_cache import BlockPool, PrefixCache
from maxtext.inference.engine.programs import Programs
from maxtext.inference.engine.shapes import MAX_PREFILL_TOKENS, ChunkSize
from maxtext.kernels.weight_only import STORAGE
from maxtext.layers.cache import CacheConfig

# Tokens of a prompt in one prefill program, unless prefill_chunk_size is set. On CPUs a program of
# more tokens takes longer without being more efficient.
CPU_CHUNK_TOKENS, CHUNK_TOKENS = 512, MAX_PREFILL_TOKENS
# Logits of a chunk with its cache, over all heads, where attention materializes them:
# they bound the memory and, on CPUs, the time of a program, whatever the length of the prompt is.
CPU_CHUNK_LOGITS, CHUNK_LOGITS = 1 << 26, 1 << 29


def make_cache_config(
    programs: Programs, slots: int, length: int, num_blocks: int | None = None
) -> CacheConfig:
    """The caches for `slots` sequences of up to `length` tokens. `num_blocks`: of caches that have
    blocks; None: the most of `block_range`."""
    config = programs.config
    block_size = None
    if has_blocks(config):
        block_size = config.pagedattn_tokens_per_page
        num_blocks = num_blocks or block_range(config, slots, length)[1]
    quantized: DTypeLike | None = None
    if config.quantize_kvcache:
        quantized = STORAGE[config.kv_quant_dtype]
    return CacheConfig(
        slots,
        length,
        dtype=config.dtype.value,
        block_size=block_size,
        num_blocks=None if block_size is None else num_blocks,
        quantized=quantized,
        scale_by_head=config.kv_quant_axis.value == "dkv",
        num_drafts=programs.num_drafts,
        context=programs.build,
    )


def has_blocks(config: MaxTextConfig) -> bool:
    """Whether sequences share a pool of blocks."""
    return config.attention == "paged" or config.enable_prefix_caching


def block_range(
    config: MaxTextConfig,
    slots: int,
    length: int,
    all_at_once: bool = False,
    entry_bytes: int = 1,
) -> tuple[int, int]:
    """The fewest blocks for `slots` sequences of up to `length` tokens, and the most that they can
    use. A sequence waits for blocks unless `all_at_once`. With prefix caching, idle prefixes may
    have as many again, if prefix_caching_hbm_byte is enough for their `entry_bytes` each.
    """
    if not has_blocks(config):
        return slots, slots
    is_paged = config.attention == "paged"
    if is_paged and config.pagedattn_num_pages:
        return config.pagedattn_num_pages, config.pagedattn_num_pages
    sequence_blocks = -(-length // config.pagedattn_tokens_per_page)
    if config.pagedattn_max_pages_per_group > 0:
        sequence_blocks = min(sequence_blocks, config.pagedattn_max_pages_per_group)
    needed = slots * sequence_blocks
    idle = 0
    if config.enable_prefix_caching:
        idle = min(needed, config.prefix_caching_hbm_byte // max(entry_bytes, 1))
    return (sequence_blocks if is_paged and not all_at_once else needed), needed + idle


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
    programs: Programs, layout: EngineLayout, max_batched_tokens: int | None
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
        heads = layout.chunk_logits_heads(tokens)
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
