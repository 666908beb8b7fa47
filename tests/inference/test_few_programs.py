"""As on a GPU: attention reads blocks in place (the kernel is interpreted), decode loops have a
static length, and there are few programs. The tokens are the same as with gathered blocks and
dynamic loops.
"""

import jax
import numpy as np
import pytest

from maxtext.inference.batches import STATIC_DECODE_STEPS
from maxtext.inference.engine import MIN_GPU_SLOTS, InferenceEngine
from maxtext.kernels.decode import paged_attention as decode
from maxtext.layers.context import BuildContext
from maxtext.models.transformer import initial_weights
from tests.inference.test_scheduler import LENGTH, configuration, programs_of, random_request

WORDS = [
    "decoder_block=llama2",
    "base_num_decoder_layers=2",
    "head_dim=16",
    "attention=autoselected",
]
PAGED = ["attention=paged", "pagedattn_num_pages=9", "pagedattn_tokens_per_page=16"]


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

    def interpreted(*arrays, attend=decode.paged_attention, **options):
        return attend(*arrays, interpret=True, **options)

    monkeypatch.setattr(decode, "paged_attention", interpreted)
    build = BuildContext(platform="gpu", capability="9.0")
    engine = InferenceEngine(programs_of(config, build), weights, 3, LENGTH)
    assert engine.executor.reads_in_place
    assert engine.generate(requests) == expected
    assert engine.programs.decode._cache_size() <= len(STATIC_DECODE_STEPS)
    assert InferenceEngine(engine.programs, weights, 1, LENGTH).cache_config.slots == MIN_GPU_SLOTS
