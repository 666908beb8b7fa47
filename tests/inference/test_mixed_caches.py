"""One model with all kinds of caches (pages, a window's ring, the states of Gated DeltaNet), served
at random.

Prompts share beginnings, the pool is too small for all sequences, some requests are cancelled, and
what a page loses goes to the host's memory. Each request gets the tokens that it gets alone.
"""

from dataclasses import replace

import numpy as np
import pytest

from maxtext.inference.serving import make_scheduler
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.attention import AttentionSpec
from maxtext.layers.cache import PAGES, POSITION
from maxtext.layers.gated_delta_net import STATE
from maxtext.models import registry
from tests.inference import test_scheduler as helpers
from tests.inference.test_scheduler import (
    LENGTH,
    VOCABULARY,
    alone,
    compiled,
    drawn_weights,
    random_request,
)

pytestmark = [pytest.mark.usefixtures("quick_programs", "few_programs"), pytest.mark.slow]

KIND = "mixed"
POOL = [
    "attention=paged", "pagedattn_num_pages=14", "pagedattn_tokens_per_page=4", "enable_prefix_caching=true",
    "prefix_caching_hbm_byte=16384", "use_chunked_prefill=true", "prefill_chunk_size=9",
]  # fmt: skip
INT8 = ["quantize_kvcache=true", "kv_quant_axis=dkv"]


@pytest.fixture(autouse=True)
def mixed(monkeypatch):
    """Gated DeltaNet, a window of five tokens, Gated DeltaNet, full attention."""
    family = registry.FAMILIES["qwen3_next"]

    def layers(config):
        specs = family.layers(config)
        full = specs[3]
        assert isinstance(full.attention, AttentionSpec)
        specs[1] = replace(full, attention=replace(full.attention, mask=AttentionMask(window=5)))
        return specs

    monkeypatch.setitem(registry.FAMILIES, "qwen3_next", replace(family, layers=layers))
    monkeypatch.setitem(helpers.KINDS, KIND, [*helpers.KINDS["delta"], "scan_layers=false"])


def serve(scheduler, requests, random):
    """The tokens of each request that was not cancelled, None of those that were."""
    tokens = {number: [] for number in range(len(requests))}
    waiting, open_numbers = list(enumerate(requests)), set()
    while waiting or scheduler.busy:
        for _ in range(min(len(waiting), int(random.integers(0, 4)))):
            number, request = waiting.pop(0)
            assert scheduler.refusal(request) is None
            scheduler.add(number, request)
            open_numbers.add(number)
        if open_numbers and random.random() < 0.1:
            number = int(random.choice(sorted(open_numbers)))
            scheduler.cancel(number)
            open_numbers.remove(number)
            tokens[number] = None
        for news in scheduler.step():
            if tokens[news.number] is None:
                continue
            assert news.error is None
            tokens[news.number] += news.tokens
            if news.finished:
                open_numbers.remove(news.number)
        scheduler.pages.check()
    assert not open_numbers
    assert scheduler.pages.held == 0
    assert sorted(scheduler.slots) == list(range(scheduler.engine.size.slots))
    return list(tokens.values())


@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "int8"])
def test_random_requests_are_served_as_if_alone(quantized):
    words = [*POOL, *(INT8 if quantized else [])]
    weights = drawn_weights(KIND)
    if quantized:  # through the same quantizer, by itself in an engine of its own

        def expected(request):
            return make_scheduler(compiled(KIND, *words), weights, 4, LENGTH).run([request])[0]

    else:
        expected = alone(compiled(KIND), weights)
    scheduler = make_scheduler(compiled(KIND, *words), weights, 4, LENGTH)
    caches = scheduler.engine.state.caches
    assert [STATE in caches[0], POSITION in caches[1], STATE in caches[2], PAGES in caches[3]] == [
        True
    ] * 4
    cancelled = 0
    for seed in range(2):
        random = np.random.default_rng(seed)
        prefixes = random.integers(0, VOCABULARY, (2, 18)).tolist()
        requests = [random_request(random, prefixes=prefixes) for _ in range(14)]
        for request, tokens in zip(requests, serve(scheduler, requests, random), strict=True):
            if tokens is None:
                cancelled += 1
            else:
                assert tokens == expected(request)
    assert scheduler.pages.hits > 0
    assert scheduler.preempted > 0
    assert cancelled > 0
