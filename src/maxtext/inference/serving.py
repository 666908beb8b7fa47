"""From asks to answers through a scheduler, and a scheduler of the size that a configuration and
its memory allow.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.hardware import host_memory_bytes
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine import Engine, Programs
from maxtext.inference.pages import Pages
from maxtext.inference.scheduler import News, Request, Scheduler
from maxtext.inference.text import Answer, Ask, Text
from maxtext.layers.cache import CacheSize
from maxtext.layers.joined import lay_out
from maxtext.sharding.manual import platform
from maxtext.tokenizers import Tokenizer

LEAST_SLOTS = 2  # on a GPU: a compiler's own products of a single row of floats are slower
MOST_OF_MEMORY = 0.7  # that caches may take; programs need some, too


def make_scheduler(
    programs: Programs, weights: Any, slots: int, length: int, shared: bool = False
) -> Scheduler:
    """For so many sequences at a time of up to such a length. Weights are laid out for them, unless
    they are `shared` with a scheduler that is at work."""
    config = programs.config
    own_products = config.quantization == "int8" or (
        not shared and lay_out(weights, config.dtype.value, slots == 1)
    )
    if slots < LEAST_SLOTS and platform(programs.rules) == "gpu" and not own_products:
        slots = slots_in_memory(programs, LEAST_SLOTS, length)
    size, prefixes = cache_size(config, slots, length), config.enable_prefix_caching
    if not programs.cached and (size.page or size.quantized is not None):
        reason = "some layer keeps nothing of them"
        if config.use_indexer:
            reason = (
                f"indexer_topk={config.indexer_topk} is below max_target_length={config.max_target_length}, and on "
                "CPUs its choice among equal scores, which is PyTorch's, depends on later tokens"
            )
        raise ConfigError(
            f"this model computes all tokens anew ({reason}), so there is no cache: leave out attention=paged, "
            "enable_prefix_caching and quantize_kvcache"
        )
    engine = Engine(programs, weights, size)
    known = host = 0
    if prefixes:
        # What a slot keeps beside pages is copied for each prefix.
        each = max(engine.page_bytes + engine.slot_bytes, 1)
        known, host = (
            config.prefix_caching_hbm_byte // each,
            config.prefix_caching_dram_byte // each,
        )
        if known + host == 0:
            raise ConfigError(
                f"enable_prefix_caching=true would do nothing: one page of prefixes takes {each} bytes, and "
                "prefix_caching_hbm_byte and prefix_caching_dram_byte are both less"
            )
    pages = Pages(
        size.pages or slots,
        size.page or length,
        known=known,
        host=host,
        store=engine,
        snapshots=engine.has_slot_caches,
    )
    chunk = config.prefill_chunk_size if config.use_chunked_prefill else None
    most = config.pagedattn_max_pages_per_group
    return Scheduler(engine, pages, chunk, most if size.page and most > 0 else None)


def slots_in_memory(programs: Programs, slots: int, length: int) -> int:
    """So many, or as many as the memory that is left has room for; at least one. A pool of pages is
    as large as its key says, however many share it."""
    if programs.config.attention == "paged":
        return slots
    one = jax.eval_shape(lambda: programs.scorer.empty(cache_size(programs.config, 1, length)))
    each = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(one))
    memory = jax.local_devices()[0].memory_stats() or {}
    left = memory.get("bytes_limit", host_memory_bytes() // 2) - memory.get("bytes_in_use", 0)
    while slots > 1 and slots * each > left * jax.device_count() * MOST_OF_MEMORY:
        slots //= 2
    return slots


def cache_size(config: MaxTextConfig, slots: int, length: int) -> CacheSize:
    page = pages = 0
    if config.attention == "paged" or config.enable_prefix_caching:
        page = config.pagedattn_tokens_per_page
        # Prefixes that nobody uses stay in pages that nobody needs: as many again as are needed at
        # most.
        pages = (
            config.pagedattn_num_pages
            if config.attention == "paged"
            else 2 * slots * -(-length // page)
        )
    quantized = (
        {"int8": jnp.int8, "int4": jnp.int4}[config.kv_quant_dtype]
        if config.quantize_kvcache
        else None
    )
    return CacheSize(
        slots,
        length,
        config.dtype.value,
        page,
        pages,
        quantized,
        config.kv_quant_axis.value == "dkv",
    )


@dataclass(eq=False)
class Open:
    """An ask that is being answered."""

    index: int
    request: Request
    text: Text | None
    stops: bool
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def add(self, news: News) -> tuple[str, str | None]:
        """New text, and how the answer is finished, if it is."""
        if self.text is None:
            self.ids += news.tokens
            self.log_probs += news.log_probs
            return "", news.finished
        piece = ""
        # One by one where a text may stop it: the answer has no token beyond.
        count = len(news.tokens)
        for place in range(count) if self.stops else [0] if count or news.finished else []:
            tokens = news.tokens[place : place + 1] if self.stops else news.tokens
            last = news.finished is not None and place + len(tokens) >= count
            shown = [token for token in tokens if token not in self.request.ends]
            piece += self.text.add(shown, last)
            self.ids += tokens
            self.log_probs += news.log_probs[place : place + len(tokens)]
            if self.text.stopped:
                return piece, "stop"
        return piece, news.finished

    def answer(self, finished: str, error: str | None) -> Answer:
        text = None if self.text is None else self.text.whole
        return Answer(self.index, tuple(self.ids), text, finished, error, tuple(self.log_probs))


@dataclass
class Serving:
    """Runs of asks. `schedulers` gives one that nobody uses; `request` makes the ids and limits of
    an ask, or raises a UserError."""

    schedulers: Callable[[], Scheduler]
    request: Callable[[Ask], Request]
    tokenizer: Tokenizer | None

    def run(self, asks: Iterator[Ask]) -> Iterator[tuple[str, Answer | None]]:
        """(a piece of text, None) as text comes, and ("", answer) when one is finished."""
        scheduler = self.schedulers()
        scheduler.taken = True
        opened: dict[int, Open] = {}
        source = enumerate(asks)
        more = True
        try:
            while more or opened:
                while more and scheduler.room > -scheduler.engine.size.slots:
                    index, ask = next(source, (-1, None))
                    if ask is None:
                        more = False
                        break
                    found = self.open(scheduler, index, ask)
                    if isinstance(found, Answer):
                        yield "", found
                    else:
                        opened[index] = found
                for news in self.step(scheduler):
                    current = opened.get(news.number)
                    if current is None:
                        continue  # a text has stopped it
                    piece, finished = current.add(news)
                    yield piece, None
                    if finished:
                        del opened[news.number]
                        if news.finished is None:
                            scheduler.cancel(news.number)
                        yield "", current.answer(finished, news.error)
        finally:
            scheduler.taken = False
            if not scheduler.broken:
                for number in opened:
                    scheduler.cancel(number)

    def step(self, scheduler: Scheduler) -> list[News]:
        """One step. An error in the middle of it, or Ctrl-C, leaves host and device with different
        beliefs.
        """
        try:
            return scheduler.step()
        except BaseException:
            scheduler.broken = True
            raise

    def open(self, scheduler: Scheduler, index: int, ask: Ask) -> Open | Answer:
        """Begin, or answer with what is wrong."""
        try:
            request = self.request(ask)
            error = scheduler.refusal(request)
        except UserError as refused:
            error = str(refused)
        if error is not None:
            return Answer(index, (), None if self.tokenizer is None else "", "error", error)
        text = None if self.tokenizer is None else Text(self.tokenizer, request.ids, ask.stop)
        scheduler.add(index, request)
        return Open(index, request, text, bool(ask.stop))
