"""A model with all kinds of caches (paged, sliding window, the recurrent state of Gated DeltaNet),
with random requests.

Prompts share prefixes, the pool is too small for all sequences, some requests are aborted, and
evicted blocks are offloaded to host memory. The tokens of a request do not depend on the batch.
"""

from dataclasses import replace

import numpy as np
import pytest

from maxtext.inference.engine.engine import InferenceEngine
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.cache import PagedKVCache, RecurrentState, SlidingWindowKVCache
from maxtext.layers.specs import AttentionSpec
from maxtext.models import registry
from tests.inference.engine.prefix_cache_checks import check_consistent
from tests.support import random_requests as helpers
from tests.support.random_requests import (
    LENGTH,
    VOCABULARY,
    check_released,
    compiled,
    random_request,
    random_weights,
    reference,
)

pytestmark = [pytest.mark.usefixtures("few_programs"), pytest.mark.slow]

KIND = "mixed"
POOL = [
    "attention=paged",
    "pagedattn_num_pages=14",
    "pagedattn_tokens_per_page=4",
    "enable_prefix_caching=true",
    "prefix_caching_hbm_byte=16384",
    "use_chunked_prefill=true",
    "prefill_chunk_size=9",
]
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


def serve(engine, requests, random):
    """The tokens of each request; None for requests that were aborted."""
    tokens = {index: [] for index in range(len(requests))}
    waiting, running = list(enumerate(requests)), set()
    while waiting or engine.has_unfinished:
        for _ in range(min(len(waiting), int(random.integers(0, 4)))):
            index, request = waiting.pop(0)
            assert engine.reject_reason(request) is None
            engine.add_request(index, request)
            running.add(index)
        if running and random.random() < 0.1:
            index = int(random.choice(sorted(running)))
            engine.abort(index)
            running.remove(index)
            tokens[index] = None
        for output in engine.step():
            if tokens[output.request_id] is None:
                continue
            assert output.error is None
            tokens[output.request_id] += output.sampled_tokens
            if output.finish_reason:
                running.remove(output.request_id)
        check_consistent(engine.prefix_cache)
    assert not running
    check_released(engine)
    return list(tokens.values())


@pytest.mark.representative(
    "float32",
)
@pytest.mark.parametrize("quantized", [False, True], ids=["float32", "int8"])
def test_tokens_do_not_depend_on_the_batch(quantized):
    overrides = [*POOL, *(INT8 if quantized else [])]
    weights = random_weights(KIND)
    if quantized:  # with the same quantization, in an engine of its own

        def expected(request):
            engine = InferenceEngine(compiled(KIND, *overrides), weights, 4, LENGTH)
            return engine.generate([request])[0]

    else:
        expected = reference(compiled(KIND), weights)
    engine = InferenceEngine(compiled(KIND, *overrides), weights, 4, LENGTH)
    caches = engine.executor.state.caches
    kinds = [RecurrentState, SlidingWindowKVCache, RecurrentState, PagedKVCache]
    assert [type(cache) for cache in caches] == kinds
    num_aborted = 0
    for seed in range(2):
        random = np.random.default_rng(seed)
        prefixes = random.integers(0, VOCABULARY, (2, 18)).tolist()
        requests = [random_request(random, prefixes=prefixes) for _ in range(14)]
        for request, tokens in zip(requests, serve(engine, requests, random), strict=True):
            if tokens is None:
                num_aborted += 1
            else:
                assert tokens == expected(request)
    assert engine.prefix_cache.hits > 0
    assert engine.scheduler.num_preemptions > 0
    assert num_aborted > 0
