"""As on a GPU: attention reads blocks in place (the kernel is interpreted), decode loops have a
static length, and there are few programs. The tokens are the same as with gathered blocks and
dynamic loops.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

from maxtext.inference.engine.batches import STATIC_DECODE_STEPS
from maxtext.inference.engine.drafting import DraftModelProposer
from maxtext.inference.engine.engine import MIN_GPU_SLOTS, InferenceEngine
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.params import SamplingParams
from maxtext.kernels.decode import paged_attention as decode
from maxtext.layers.context import BuildContext
from maxtext.models.transformer import initial_weights
from tests.support.random_requests import LENGTH, configuration, programs_of, random_request

WORDS = [
    "decoder_block=llama2",
    "base_num_decoder_layers=2",
    "head_dim=16",
    "attention=autoselected",
]
GPU = BuildContext(platform="gpu", capability="9.0")
PAGED = ["attention=paged", "pagedattn_num_pages=9", "pagedattn_tokens_per_page=16"]


def interpret_kernel(monkeypatch):
    def interpreted(*arrays, attend=decode.paged_attention, **options):
        return attend(*arrays, interpret=True, **options)

    monkeypatch.setattr(decode, "paged_attention", interpreted)


@pytest.mark.representative(
    "few blocks",
)
@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], PAGED], ids=["contiguous", "few blocks"])
def test_as_on_a_gpu(monkeypatch, overrides):
    config = configuration(*WORDS, *overrides)
    weights = jax.jit(lambda: initial_weights(config))()
    random = np.random.default_rng(3)
    requests = [random_request(random, greedy=1.0) for _ in range(12)]
    cpu_engine = InferenceEngine(programs_of(config), weights, 3, LENGTH)
    assert not cpu_engine.executor.few_programs
    assert not cpu_engine.executor.reads_in_place
    expected = cpu_engine.generate(requests)

    interpret_kernel(monkeypatch)
    engine = InferenceEngine(programs_of(config, GPU), weights, 3, LENGTH)
    assert engine.executor.reads_in_place
    assert engine.generate(requests) == expected
    assert engine.programs.decode._cache_size() <= len(STATIC_DECODE_STEPS)
    assert InferenceEngine(engine.programs, weights, 1, LENGTH).cache_config.slots == MIN_GPU_SLOTS


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], PAGED], ids=["contiguous", "few blocks"])
def test_drafts_as_on_a_gpu(monkeypatch, overrides):
    """The kernel reads the caches of the draft model, and drafts are verified without it."""
    config = configuration(*WORDS, *overrides)
    weights = jax.jit(lambda: initial_weights(config))()
    random = np.random.default_rng(3)
    requests = [random_request(random, greedy=1.0) for _ in range(8)]
    programs = programs_of(config)
    expected = InferenceEngine(programs, weights, 3, LENGTH).generate(requests)
    interpret_kernel(monkeypatch)
    programs = programs_of(config, GPU)
    proposer = DraftModelProposer(3, model_runner=programs.runner, weights=weights)
    programs = replace(programs, proposer=proposer)
    engine = InferenceEngine(programs, weights, 3, LENGTH)
    assert engine.executor.reads_in_place
    assert engine.generate(requests) == expected
    assert engine.drafts.num_accepted > 0


@pytest.mark.slow
def test_blocks_of_a_prompt_are_read_once_for_its_completions(monkeypatch):
    config = configuration(*WORDS, *PAGED, "pagedattn_num_pages=20")
    weights = jax.jit(lambda: initial_weights(config))()
    random = np.random.default_rng(3)
    prompts = [random.integers(0, config.vocab_size, size=length).tolist() for length in (20, 35)]
    requests = [
        GenerationRequest(prompt, SamplingParams(max_new_tokens=count, n=3))
        for prompt in prompts
        for count in (6, 20, 27)
    ]
    expected = InferenceEngine(programs_of(config), weights, 3, LENGTH).generate(requests)
    interpret_kernel(monkeypatch)
    engine = InferenceEngine(programs_of(config, GPU), weights, 3, LENGTH, shared_prompts=True)
    shared = []

    def run_decode(batch, run=engine.executor.decode):
        shared.append(batch.prefix_groups.lengths.max())
        return run(batch)

    monkeypatch.setattr(engine.executor, "decode", run_decode)
    assert engine.generate(requests) == expected
    assert {16, 32} <= set(shared)
