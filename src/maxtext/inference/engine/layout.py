"""The abilities of an engine's programs, and the size of its state, by the size of its caches."""

from dataclasses import replace
from functools import cached_property

import jax

from maxtext.inference.engine import shapes
from maxtext.inference.engine.batches import BatchBuilder, EngineState
from maxtext.inference.engine.model_runner import select_caches
from maxtext.inference.engine.programs import Programs
from maxtext.kernels import attention
from maxtext.layers.attention_sharding import packed_request
from maxtext.layers.cache import CacheConfig, PagedKVCache, view_backend
from maxtext.layers.specs import AttentionSpec, MlaSpec
from maxtext.models.common import backend
from maxtext.models.registry import layers
from maxtext.models.transformer import Caches

MIN_DECODE_ROWS = 64  # of a program for some of the slots: fewer would cost about as much


class EngineLayout:
    """An engine with caches of this size. `state` has the shapes of its arrays on the device."""

    def __init__(self, programs: Programs, cache_config: CacheConfig):
        self.programs = programs
        self.cache_config = cache_config
        with programs.context():
            self.state: EngineState = programs.init_state.eval_shape(cache_config)
        self.reads_in_place = reads_blocks_in_place(self.state.caches)
        self.contiguous = cache_config.block_size is None  # slot n has block n, and no other
        # On accelerators compilation is slow, so there are few programs; and in a loop that may end
        # early, a GPU waits for the host before each step.
        self.few_programs = programs.build.platform != "cpu"

    def batch_builder(
        self, shared_prompts: bool, max_batched_tokens: int = shapes.MAX_PREFILL_TOKENS
    ) -> BatchBuilder:
        """`shared_prompts`: many sequences have the prompt of another. `max_batched_tokens`: of a
        prefill batch, unless a single row has more."""
        block_size = self.cache_config.tokens_per_block
        return BatchBuilder(
            num_slots=self.cache_config.slots,
            max_blocks=-(-self.cache_config.length // block_size),
            block_size=block_size,
            contiguous=self.contiguous,
            few_programs=self.few_programs,
            reads_in_place=self.reads_in_place,
            decode_rows=self.decode_rows,
            max_batched_tokens=max_batched_tokens,
            vocab_size=self.programs.config.vocab_size,
            has_adapters=self.programs.build.adapters is not None,
            can_roll_back=not self.has_slot_caches,
            groups_prefixes=shared_prompts and self.reads_in_place,
            history_length=self.cache_config.length if self.programs.num_drafts else 0,
            forks_prompts=shared_prompts and not self.contiguous and not self.has_slot_caches,
        )

    @cached_property
    def has_slot_caches(self) -> bool:
        """Whether some layer has a cache per slot: a sliding window or a recurrent state."""
        return bool(select_caches(self.state.caches, paged=False))

    @cached_property
    def supports_packing(self) -> bool:
        """Whether several prompts can share a row of a prefill batch, which needs no padding."""
        config, rules = self.programs.config, self.programs.rules
        if not self.few_programs or self.contiguous or self.has_slot_caches or rules.mesh.size > 1:
            return False
        mixers = [getattr(layer, "attention", None) for layer in layers(config)]
        specs = [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]
        if len(specs) < len(mixers) or backend(config) != attention.AUTOSELECTED:
            return False
        dtype = config.dtype.value
        requests = [
            packed_request(spec, tokens, dtype, self.programs.build.platform)
            for spec in specs
            for tokens, _ in shapes.PACKED_SHAPES
        ]
        return all(attention.fastest_backend(request) != "dot_product" for request in requests)

    def chunk_logits_heads(self, tokens: int) -> int:
        """The most heads of a layer whose attention between `tokens` tokens of a prompt and their
        cache materializes its logits; layers with a window are not counted."""
        config, build = self.programs.config, self.programs.build
        length, heads = self.cache_config.length, 0
        for spec in (getattr(layer, "attention", None) for layer in layers(config)):
            if not isinstance(spec, AttentionSpec | MlaSpec):
                continue
            if min(spec.mask.window or length, spec.mask.chunk or length) < length:
                continue
            request = packed_request(spec, tokens, config.dtype.value, build.platform)
            request = replace(request, k_length=2 * tokens, custom_positions=True)
            with self.programs.context():
                backend = view_backend(spec.backend, tokens)
            if backend == attention.AUTOSELECTED:
                backend = attention.fastest_backend(request)
            if backend == "dot_product":
                heads = max(heads, request.q_heads)
        return heads

    @cached_property
    def decode_rows(self) -> tuple[int, ...]:
        """How many slots a decode program may have, in increasing order. If all caches are paged, a
        program can leave out inactive slots.
        """
        slots, devices = self.cache_config.slots, self.programs.rules.mesh.size
        if self.contiguous or self.has_slot_caches:
            return (slots,)
        rows = [slots * part // 4 for part in (1, 2, 3) if slots * part % (4 * devices) == 0]
        return (*(n for n in rows if min(n, slots - n) >= MIN_DECODE_ROWS), slots)

    @cached_property
    def total_bytes(self) -> int:
        """The bytes of the state, on all devices together."""
        return sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(self.state))

    @cached_property
    def block_bytes(self) -> int:
        """The bytes of one block, in all layers."""
        return self.bytes_per_entry(paged=True)

    @cached_property
    def slot_bytes(self) -> int:
        """The bytes of the per-slot caches of one slot, in all layers."""
        return self.bytes_per_entry(paged=False)

    def bytes_per_entry(self, paged: bool) -> int:
        caches = select_caches(self.state.caches, paged)
        return sum(
            array.size // array.shape[0] * array.dtype.itemsize for array in jax.tree.leaves(caches)
        )


def reads_blocks_in_place(caches: Caches) -> bool:
    """Whether decode attention reads blocks in place, as far as they are filled. Then a program
    does not depend on the length of sequences.
    """
    pools = [cache for cache in caches if isinstance(cache, PagedKVCache)]
    return bool(pools) and all(pool.in_place for pool in pools)
