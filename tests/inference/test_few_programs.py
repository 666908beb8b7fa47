"""As on a GPU: pages are read where they lie (the kernel is interpreted), loops have a known
length, and there are few programs. The tokens are those of the other way, which gathers pages and
may end at any step."""

import jax
import numpy as np
import pytest

from maxtext.inference.engine import FIXED_STEPS
from maxtext.inference.serving import LEAST_SLOTS, make_scheduler
from maxtext.kernels.decode import paged_attention as decode
from maxtext.models.transformer import initial_weights
from tests.inference.test_scheduler import LENGTH, configuration, programs_of, random_request

pytestmark = pytest.mark.usefixtures("quick_programs")

WORDS = [
    "decoder_block=llama2",
    "base_num_decoder_layers=2",
    "head_dim=16",
    "attention=autoselected",
]
PAGED = ["attention=paged", "pagedattn_num_pages=9", "pagedattn_tokens_per_page=16"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], PAGED], ids=["a page each", "few pages"])
def test_as_on_a_gpu(monkeypatch, words):
    config = configuration(*WORDS, *words)
    weights = jax.jit(lambda: initial_weights(config))()
    random = np.random.default_rng(3)
    requests = [random_request(random, greedy=1.0) for _ in range(12)]
    usual = make_scheduler(programs_of(config), weights, 3, LENGTH)
    assert not usual.engine.few_programs
    assert not usual.engine.in_place
    right = usual.run(requests)

    def interpreted(*arrays, attend=decode.paged_attention, **options):
        return attend(*arrays, interpret=True, **options)

    monkeypatch.setattr(decode, "supports", lambda *facts: None)
    monkeypatch.setattr(decode, "paged_attention", interpreted)
    for place in ("engine", "serving"):
        monkeypatch.setattr(f"maxtext.inference.{place}.platform", lambda rules: "gpu")
    scheduler = make_scheduler(programs_of(config), weights, 3, LENGTH)
    assert scheduler.engine.in_place
    assert scheduler.run(requests) == right
    programs = scheduler.engine.programs
    assert programs.decode._cache_size() <= len(FIXED_STEPS)
    assert make_scheduler(programs, weights, 1, LENGTH).engine.size.slots == LEAST_SLOTS
