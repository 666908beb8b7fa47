"""Requests with several choices, stop reasons, and what the choices share."""

import numpy as np
import pytest

from maxtext import LLM
from maxtext.inference import GenerationRequest, SamplingParams
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.prefix_cache import BlockPool, PrefixCache
from maxtext.inference.engine.programs import Programs
from maxtext.inference.engine.scheduler import Scheduler
from maxtext.inference.engine.sequence import Sequence

EXACT = {"dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest"}
pytestmark = pytest.mark.usefixtures("few_programs")
HOT = {"temperature": 2.0, "ignore_eos": True, "max_new_tokens": 6}


@pytest.mark.slow
def test_choices(llm, ids):
    """Each choice is what a request of its own with that seed gives, whatever else is running. The
    first has the seed of the request.
    """
    prompt = ids[0].tolist()
    alone = llm.generate(prompt, seed=5, **HOT)
    choices = llm.generate(prompt, seed=5, n=4, **HOT)
    assert choices[0] == alone
    assert len({tuple(choice) for choice in choices}) == 4
    other = GenerationRequest(ids[1].tolist(), SamplingParams(seed=9, n=3, **HOT))
    request = GenerationRequest(prompt, SamplingParams(seed=5, n=4, **HOT))
    completions = [each for each in llm.completions([other, request]) if each.index == 1]
    completions.sort(key=lambda completion: completion.choice)
    assert [completion.choice for completion in completions] == [0, 1, 2, 3]
    assert [list(completion.token_ids) for completion in completions] == choices


@pytest.mark.slow
def test_shapes_of_results(llm, ids):
    prompts = ids[:2].tolist()
    nested = llm.generate(prompts, n=2, **HOT)
    assert [len(choices) for choices in nested] == [2, 2]
    array = llm.generate(ids[:2], n=2, **HOT)
    assert isinstance(array, np.ndarray)
    assert array.tolist() == nested
    texts = llm.generate("w5 w9", n=2, **HOT)
    assert len(texts) == 2
    assert all(isinstance(text, str) for text in texts)
    assert texts[0] == llm.generate("w5 w9", **HOT)


@pytest.mark.slow
def test_choices_share_the_blocks_of_their_prompt(folder):
    """Without a prefix cache from request to request. 18 tokens have 4 full blocks."""
    llm = LLM.load(
        folder,
        **EXACT,
        attention="paged",
        pagedattn_tokens_per_page=4,
        pagedattn_num_pages=24,
        per_device_batch_size=8,
        max_target_length=32,
    )
    prompt = list(range(5, 23))
    request = GenerationRequest(prompt, SamplingParams(n=6, seed=1, **HOT))
    choices = sorted(llm.completions(iter([request])), key=lambda each: each.choice)
    cache = llm.engine.prefix_cache
    assert cache.hits == 5 * 16
    assert llm.engine.num_prefilled == 18 + 5 * 2
    assert llm.engine.scheduler.num_preemptions == 0  # six prompts of their own need 30 blocks
    assert cache.pool.num_referenced == cache.num_on_device == 0
    dense = LLM.load(folder, **EXACT).generate(prompt, seed=1, n=6, **HOT)
    assert [list(choice.token_ids) for choice in choices] == dense
    list(llm.completions(iter([GenerationRequest(prompt, SamplingParams(**HOT))])))
    assert cache.hits == 5 * 16


@pytest.mark.slow
@pytest.mark.parametrize("slots", [5, 16])
def test_a_prompt_is_prefilled_once_for_its_completions(llm, monkeypatch, slots):
    """As in reinforcement learning. Prompts of 16 and 18 tokens end with a block and within one;
    3 tokens have no block to share. With too few slots, some completions start later."""
    config = llm.config.model_copy(
        update={
            "attention": "paged",
            "pagedattn_tokens_per_page": 4,
            "pagedattn_num_pages": 100,
        }
    )
    programs = Programs(config, llm.template, llm.rules)
    requests = [
        GenerationRequest(
            list(range(length, 2 * length)), SamplingParams(n=4, seed=seed, logprobs=0, **HOT)
        )
        for length in (16, 18, 3)
        for seed in range(4)
    ]
    engine = InferenceEngine(programs, llm.weights, slots, 32, shared_prompts=True)
    expected = InferenceEngine(programs, llm.weights, 4, 32).generate(requests)
    shares_last_block = {}

    def fork(logits, batch, run=engine.executor.fork):
        is_used = batch.slots < slots
        shared = batch.own_blocks == batch.last_blocks
        shares_last_block.update(zip(batch.positions[is_used], shared[is_used], strict=True))
        return run(logits, batch)

    monkeypatch.setattr(engine.executor, "fork", fork)
    assert engine.generate(requests) == expected
    assert shares_last_block == {16: True, 18: False}
    assert len(set(map(tuple, expected))) == len(requests)
    assert not engine.prefilled
    if slots == 16:
        assert engine.num_prefilled == 16 + 18 + 4 * 3
    assert engine.prefix_cache.pool.num_referenced == 0


def test_choices_wait_for_no_other_prompt_than_their_own():
    """The first choice of each request is prefilled with those of the others, the rest after it."""
    cache = PrefixCache(BlockPool(num_blocks=32), block_size=4)
    scheduler = Scheduler(8, cache, contiguous=False)
    for index, first_id in enumerate((1, 1, 1, 51, 51, 51)):
        prompt = tuple(range(first_id, first_id + 10))
        scheduler.add(Sequence(index, prompt, SamplingParams(n=3)))
    scheduler.admit()
    assert [sequence.request_id for sequence in scheduler.running] == [0, 3]
    for sequence in scheduler.running:
        sequence.num_computed = sequence.prefill_length
        cache.insert(sequence.token_ids[:8], sequence.blocks[:2])
    scheduler.admit()
    assert [sequence.request_id for sequence in scheduler.running] == [0, 3, 1, 2, 4, 5]
    assert [sequence.num_computed for sequence in scheduler.running] == [10, 10, 8, 8, 8, 8]
    assert not scheduler.waiting


@pytest.mark.slow
def test_stop_reasons(llm, ids):
    prompt = ids[0].tolist()
    free = llm.generate(prompt, max_new_tokens=8, ignore_eos=True)
    text = llm.generate("w5 w9", max_new_tokens=12, ignore_eos=True)
    word = f" {text.split()[2]}"

    def complete(prompt, **params):
        request = GenerationRequest(prompt, SamplingParams(ignore_eos=True, **params))
        return next(iter(llm.completions([request])))

    by_id = complete(prompt, max_new_tokens=8, stop_token_ids=[free[4]])
    assert (by_id.finish_reason, by_id.stop_reason) == ("end", free[4])
    by_text = complete("w5 w9", max_new_tokens=12, stop=["never", word])
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", word)
    with_stop = complete("w5 w9", max_new_tokens=12, stop=word, include_stop_str_in_output=True)
    assert with_stop.text == by_text.text + word
    by_length = complete(prompt, max_new_tokens=3)
    assert (by_length.finish_reason, by_length.stop_reason) == ("length", None)
    late = complete("w5 w9", max_new_tokens=12, stop=word, min_tokens=len(by_text.token_ids))
    assert late.text.startswith(by_text.text + word)
