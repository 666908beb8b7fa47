"""Long prompts in chunks: the default of loaded models, and what others wait for meanwhile."""

import dataclasses
import itertools

import numpy as np
import pytest

from maxtext import LLM
from maxtext.inference import GenerationRequest, SamplingParams
from maxtext.inference.engine import cache_config
from maxtext.inference.engine.engine import InferenceEngine, InFlightStep
from maxtext.inference.engine.shapes import ChunkSize
from tests.support.random_requests import (
    VOCABULARY,
    compiled,
    new_request,
    random_weights,
    reference,
)

pytestmark = pytest.mark.usefixtures("few_programs")
EXACT = {"dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest"}
CHUNK, LENGTH = 8, 64
CHUNKED = ["use_chunked_prefill=true", f"prefill_chunk_size={CHUNK}"]


@pytest.fixture
def engine():
    return InferenceEngine(compiled("causal", *CHUNKED), random_weights("causal"), 4, LENGTH)


def request(length, count, seed=0):
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()
    return new_request(ids, count)


def collect(engine, tokens):
    """Of one step: what was prefilled, and the requests that have new tokens."""
    before = engine.num_prefilled
    outputs = engine.step()
    for output in outputs:
        tokens.setdefault(output.request_id, []).extend(output.sampled_tokens)
    return engine.num_prefilled - before, {each.request_id for each in outputs}


def test_a_running_stream_waits_for_one_chunk(engine):
    """While a prompt of seven chunks is prefilled, each step prefills one and decodes a few."""
    requests = [request(5, 40), request(50, 3, seed=1)]
    expected = [reference(engine.programs, engine.weights)(each) for each in requests]
    tokens, steps = {}, []
    with engine.lease(expects_requests=True):
        engine.add_request(0, requests[0])
        while not tokens:
            collect(engine, tokens)
        engine.add_request(1, requests[1])
        while engine.has_unfinished:
            steps.append(collect(engine, tokens))
    assert [tokens[0], tokens[1]] == expected
    chunks = [count for count, _ in steps if count]
    assert len(chunks) == 7
    assert sum(chunks) == 50
    assert max(chunks) <= CHUNK
    during = [ids for _, ids in itertools.takewhile(lambda step: 1 not in step[1], steps)]
    assert all(0 in ids for ids in during[1:7])


def test_a_short_prompt_overtakes_a_long_one(engine):
    """It is prefilled after the chunk in progress, and the long prompt gets every second turn."""
    tokens, finished = {}, []
    with engine.lease(expects_requests=True):
        engine.add_request(0, request(60, 2))
        collect(engine, tokens)
        for index in range(1, 4):
            engine.add_request(index, request(6, 2, seed=index))
        while engine.has_unfinished:
            _, ids = collect(engine, tokens)
            finished += sorted(ids - set(finished))
    assert finished[-1] == 0
    assert sorted(finished) == [0, 1, 2, 3]


def batches_per_step(engine, requests, limit, monkeypatch):
    """How many programs prefill the other requests in each step in which the first one decodes."""
    engine.timed, engine.max_interleaved_tokens = False, limit
    batches, tokens, steps = [], {}, []
    prefill = engine.prefill
    monkeypatch.setattr(engine, "prefill", lambda *group: (batches.append(group), prefill(*group)))
    with engine.lease(expects_requests=True):
        engine.add_request(0, requests[0])
        while not tokens:
            collect(engine, tokens)
        for index, each in enumerate(requests[1:], 1):
            engine.add_request(index, each)
        while engine.has_unfinished:
            batches.clear()
            collect(engine, tokens)
            steps.append(len(batches))
    expected = [reference(engine.programs, engine.weights)(each) for each in requests]
    assert [tokens[index] for index in range(len(requests))] == expected
    return [count for count in steps if count]


@pytest.mark.parametrize(("limit", "batches"), [(0, [1, 1]), (16, [1, 1]), (17, [2])])
def test_short_prompts_start_together(engine, monkeypatch, limit, batches):
    """Two programs prefill them, of 16 and 8 tokens; decode programs for a part would cost more."""
    requests = [request(5, 40), *(request(CHUNK, 5, seed=index) for index in range(1, 4))]
    assert batches_per_step(engine, requests, limit, monkeypatch) == batches


def test_a_running_stream_waits_for_one_chunk_with_short_prompts_beside(engine, monkeypatch):
    requests = [request(5, 40), request(40, 3, seed=1), request(6, 3, seed=2)]
    assert set(batches_per_step(engine, requests, 1000, monkeypatch)) == {1}


def test_limit_follows_from_the_time_of_a_prefill(engine, monkeypatch):
    """16 tokens in 1/16 s: 25 tokens fit into 0.1 s."""
    monkeypatch.setattr("time.monotonic", lambda: 2.0625)
    done = InFlightStep(None, (), num_steps=0, dispatched_at=2.0, num_prefilled=16)
    engine.update_limits(done)
    assert engine.max_interleaved_tokens == 25
    engine.update_limits(dataclasses.replace(done, num_prefilled=0))  # a fork
    assert engine.max_interleaved_tokens == 25


def test_offline_batches_have_no_pauses(engine):
    """Nobody reads deltas: all prompts are prefilled before the sequences decode."""
    engine.add_request(0, request(5, 20))
    engine.step()
    engine.add_request(1, request(50, 3, seed=1))
    with engine.lease():
        assert collect(engine, {})[0] == 50


def test_idle_engine_is_one_chunk_ahead_of_the_device(engine):
    """A request that arrives does not wait for a queue of programs."""
    with engine.lease(expects_requests=True):
        engine.add_request(0, request(60, 2))
        for _ in range(4):
            engine.step()
            assert len(engine.in_flight) == 1


def chunk_size(llm):
    size = llm.engine_for(2, 128).scheduler.chunk_size
    return size and size.tokens


def test_loaded_models_prefill_in_chunks(folder):
    """Unless keys say otherwise."""
    assert chunk_size(LLM.load(folder, **EXACT)) == cache_config.CPU_CHUNK_TOKENS
    assert chunk_size(LLM.load(folder, **EXACT, use_chunked_prefill=False)) is None
    assert chunk_size(LLM.load(folder, **EXACT, use_chunked_prefill=True)) == 256
    assert chunk_size(LLM.load(folder, **EXACT, prefill_chunk_size=7)) == 7


def test_chunks_become_shorter_as_the_cache_grows():
    """The logits between a chunk and its cache, in all heads, are bounded."""
    size = ChunkSize(512, heads=4, max_logits=4 * 512 * 4096)
    assert [size.at(kv_len) for kv_len in (100, 4096, 4097, 16_384)] == [512, 512, 256, 128]
    assert size.at(1 << 30) == 32
    assert ChunkSize(512).at(1 << 30) == 512


def test_models_without_a_cache_have_no_chunks(caplog):
    """Each chunk would compute all of the sequence again. The reason is logged once."""
    cache_config.log_once.cache_clear()
    with caplog.at_level("INFO"):
        for _ in range(2):
            programs = compiled("recomputed", *CHUNKED)
            engine = InferenceEngine(programs, random_weights("recomputed"), 2, LENGTH)
            assert engine.scheduler.chunk_size is None
    assert caplog.text.count("without chunks, as this model recomputes all tokens") == 1


@pytest.mark.parametrize("paged", [False, True], ids=["contiguous", "paged"])
def test_logprobs_of_a_default_chunked_prompt(folder, ids, monkeypatch, paged):
    """Log-probabilities of prompt and completion, choices, allowed tokens and text are those
    without chunks."""
    monkeypatch.setattr(cache_config, "CPU_CHUNK_TOKENS", 9)
    keys = {"attention": "paged", "pagedattn_tokens_per_page": 4, "pagedattn_num_pages": 60}
    keys = EXACT | (keys if paged else {})
    prompts = [ids[0].tolist() * 4, ids[1].tolist()]
    options = [
        SamplingParams(max_new_tokens=5, logprobs=2, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(max_new_tokens=5, temperature=1.2, seed=3, n=2, repetition_penalty=1.3),
        SamplingParams(max_new_tokens=5, allowed_token_ids=(7, 8, 9, 10)),
    ]
    requests = [GenerationRequest(prompt, each) for prompt in prompts for each in options]
    results = []
    for chunked in (True, False):
        llm = LLM.load(folder, **keys, **({} if chunked else {"use_chunked_prefill": False}))
        assert (chunk_size(llm) == 9) == chunked
        found = sorted(llm.completions(iter(requests)), key=lambda each: (each.index, each.choice))
        results.append(found)
    for chunked, whole in zip(*results, strict=True):
        assert chunked.error is None
        assert chunked.token_ids == whole.token_ids
        assert chunked.text == whole.text
        for name in ("logprobs", "prompt_logprobs"):
            a = [each.logprob for each in getattr(chunked, name) if each]
            b = [each.logprob for each in getattr(whole, name) if each]
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_fast_attention_has_chunks_only_while_requests_may_arrive(engine):
    """For a list of requests, a prompt as a whole takes less time."""
    engine.scheduler.max_chunk = ChunkSize(CHUNK, only_online=True)
    engine.add_request(0, request(40, 2))
    assert collect(engine, {})[0] == 40
    engine.abort(0)
    with engine.lease(expects_requests=True):
        engine.add_request(1, request(40, 2, seed=1))
        assert collect(engine, {})[0] == CHUNK
