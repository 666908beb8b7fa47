"""Continuous batching: the tokens of a request do not depend on the batch.

The reference recomputes the whole sequence for every new token, one request at a time, without any
part of the engine.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common.errors import ConfigError
from maxtext.inference.engine import layout as layout_module
from maxtext.inference.engine import shapes
from maxtext.inference.engine.batches import PrefillBatch
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.executor import Executor
from maxtext.kernels.decode import paged_attention as decode
from maxtext.layers.context import BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.models.transformer import initial_weights
from tests.inference.engine.prefix_cache_checks import check_consistent
from tests.support.random_requests import (
    HARDEST,
    KINDS,
    LAYOUTS,
    LENGTH,
    MODELS,
    VOCABULARY,
    check_released,
    compiled,
    configuration,
    new_request,
    programs_of,
    random_request,
    random_weights,
    reference,
)


@pytest.fixture(scope="module")
def models():
    """By kind: (weights, the tokens of requests by the reference)."""
    cache = {}

    def get(name):
        if name not in cache:
            weights = random_weights(name)
            cache[name] = weights, reference(compiled(name), weights)
        return cache[name]

    return get


def serve(engine, requests, random):
    """The tokens of each request, with requests that come at random times."""
    tokens = {index: [] for index in range(len(requests))}
    finished, waiting = set(), list(enumerate(requests))
    while waiting or engine.has_unfinished:
        for _ in range(min(len(waiting), int(random.integers(0, 4)))):
            index, request = waiting.pop(0)
            assert engine.reject_reason(request) is None
            engine.add_request(index, request)
        for output in engine.step():
            assert output.request_id not in finished
            tokens[output.request_id] += output.sampled_tokens
            if output.finish_reason:
                assert output.error is None
                finished.add(output.request_id)
        check_consistent(engine.prefix_cache)
    assert finished == set(tokens)
    check_released(engine)
    return list(tokens.values())


# A kind for each cache and mask; test_mixed_caches.py has the recurrent state, test_steps.py the
# caches of the other kinds, and the parity tests generate with every family.
REPRESENTATIVE = {
    ("window", "prefixes"),
    ("causal", "contiguous"),
    *((kind, HARDEST) for kind in ("latent", "chunks")),
}
CASES = [
    ("window", "prefixes"),
    *(("causal", layout) for layout in LAYOUTS if layout != "few blocks"),
    *((kind, HARDEST) for kind in MODELS if kind != "causal"),
    ("recomputed", "chunked"),
]


def marks(case):
    if case not in REPRESENTATIVE:
        return pytest.mark.exhaustive
    return () if case == CASES[0] else pytest.mark.slow


@pytest.mark.slow
def test_tokens_do_not_depend_on_the_batch(models, monkeypatch):
    """In programs of many shapes, with too few blocks for all sequences."""
    rows = collect_decode_rows(monkeypatch, 1)
    check_served(models, "causal", "few blocks")
    assert rows >= {1, 2}  # of four


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("kind", "layout"), [pytest.param(*case, marks=marks(case)) for case in CASES]
)
def test_every_kind_of_cache_in_every_layout(models, kind, layout):
    check_served(models, kind, layout)


def check_served(models, kind, layout):
    weights, expected = models(kind)
    engine = InferenceEngine(compiled(kind, *LAYOUTS[layout]), weights, 4, LENGTH)
    random = np.random.default_rng(3)
    prefixes = random.integers(0, VOCABULARY, (2, 18)).tolist()
    requests = [random_request(random, prefixes=prefixes) for _ in range(14)]
    # Their first token depends on the cached prefix, whatever the window of a layer.
    requests += [new_request((*prefixes[0], token), 6) for token in range(3)]
    assert serve(engine, requests, random) == [expected(request) for request in requests]
    if "prefixes" in layout:
        assert engine.prefix_cache.hits > 0
    if layout == "few blocks":
        assert engine.scheduler.num_preemptions > 0


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_ties_between_blocks_of_keys():
    """With zero keys, all MoBA blocks have equal scores; a padded row makes the same choice as one
    without padding.
    """

    def without_keys(path, leaf):
        return (
            jnp.zeros_like(leaf)
            if any(getattr(key, "key", None) == "key" for key in path)
            else leaf
        )

    weights = jax.tree_util.tree_map_with_path(without_keys, random_weights("recomputed"))
    unchanged = jax.tree.map(jnp.array_equal, weights, random_weights("recomputed"))
    assert not all(jax.tree.leaves(unchanged))
    programs = compiled("recomputed")
    requests = [new_request(range(3, 20), 2), new_request((5, 6, 7), 2)]

    @jax.jit
    def next_token(weights, ids):
        model = programs.template.bind(weights)
        hidden, _ = model.hidden(ids, LayerInputs(jnp.arange(ids.shape[1])[None]))
        return model.logits(hidden[:, -1:])[0, 0].argmax()

    expected = []
    for request in requests:
        ids = list(request.prompt)
        for _ in range(request.params.max_new_tokens):
            with programs.context():
                ids.append(int(next_token(weights, jnp.asarray([ids]))))
        expected.append(ids[len(request.prompt) :])
    assert InferenceEngine(programs, weights, 4, LENGTH).generate(requests) == expected


def collect_decode_rows(monkeypatch, min_rows):
    """The numbers of slots of decode programs, which may be a quarter of all slots."""
    rows = set()

    def spy(executor, batch, decode=Executor.decode):
        rows.add(len(batch.block_tables))
        return decode(executor, batch)

    monkeypatch.setattr(layout_module, "MIN_DECODE_ROWS", min_rows)
    monkeypatch.setattr(Executor, "decode", spy)
    return rows


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_many_requests(models, monkeypatch):
    """In a pool that is too small for all running sequences, with shared prefixes."""
    rows = collect_decode_rows(monkeypatch, 2)
    weights, expected = models("causal")
    overrides = [
        "attention=paged",
        "pagedattn_num_pages=36",
        "pagedattn_tokens_per_page=4",
        "enable_prefix_caching=true",
    ]
    engine = InferenceEngine(compiled("causal", *overrides), weights, 8, LENGTH)
    random = np.random.default_rng(5)
    prefixes = random.integers(0, VOCABULARY, (3, 20)).tolist()
    requests = [random_request(random, prompts=(1, 40), prefixes=prefixes) for _ in range(100)]
    assert serve(engine, requests, random) == [expected(request) for request in requests]
    assert engine.scheduler.num_preemptions > 0
    assert engine.prefix_cache.hits > 100
    assert rows >= {2, 4}  # of eight


@pytest.fixture
def packing(monkeypatch):
    """Prompts share rows of 24 or 48 tokens; the number of prompts in each row is collected."""
    counts = []

    def spy(executor, batch, prefill=Executor.prefill):
        if batch.segments is not None:
            assert batch.token_ids.shape in ((1, 24), (1, 48))
            counts.append(int(batch.segments.max()))
        return prefill(executor, batch)

    monkeypatch.setattr(Executor, "supports_packing", True)
    monkeypatch.setattr(Executor, "prefill", spy)
    monkeypatch.setattr(shapes, "PACKED_SHAPES", ((24, 2), (48, 2), (48, 4)))
    return counts


@pytest.mark.parametrize(
    ("kind", "overrides", "shared"),
    [
        ("causal", ["attention=paged", "dtype=bfloat16"], True),
        (
            "causal",
            ["enable_prefix_caching=true", "attention=autoselected", "dtype=bfloat16"],
            True,
        ),
        (
            "causal",
            ["enable_prefix_caching=true", "dtype=bfloat16"],
            False,
        ),  # dot_product attention
        ("causal", ["attention=paged"], False),  # float32 uses dot_product attention
        ("causal", ["attention=paged", "dtype=bfloat16", "attn_logits_soft_cap=5"], False),
        ("causal", ["attention=autoselected", "dtype=bfloat16"], False),  # a contiguous cache
        (
            "window",
            ["attention=paged", "dtype=bfloat16"],
            False,
        ),  # sliding-window caches are per slot
        ("latent", ["attention=paged", "dtype=bfloat16"], False),
    ],
)
def test_where_prompts_can_be_packed(kind, overrides, shared):
    """As on a GPU."""
    executor = InferenceEngine(compiled(kind, *overrides), {}, 2, LENGTH).executor
    assert not executor.supports_packing
    build = BuildContext(platform="gpu", capability="9.0")
    programs = programs_of(executor.programs.config, build)
    gpu_executor = Executor(programs, {}, executor.cache_config)
    assert gpu_executor.supports_packing == shared


@pytest.mark.parametrize("kind", ["causal", pytest.param("latent", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_packed_prompts(models, packing, kind):
    weights, expected = models(kind)
    overrides = ["attention=paged", "pagedattn_num_pages=80", "pagedattn_tokens_per_page=4"]
    engine = InferenceEngine(compiled(kind, *overrides), weights, 6, LENGTH)
    random = np.random.default_rng(4)
    requests = [random_request(random, counts=(1, 6)) for _ in range(16)]
    assert engine.generate(requests) == [expected(request) for request in requests]
    assert {1, 2, 4} <= set(packing)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_paged_attention_kernel(monkeypatch):
    """The kernel, interpreted, instead of gathered blocks; ragged_block_size sets its tile size."""
    overrides = [
        "decoder_block=llama2",
        "base_num_decoder_layers=1",
        "head_dim=16",
        "attention=paged",
        "pagedattn_num_pages=30",
        "pagedattn_tokens_per_page=16",
    ]
    ragged = ["use_ragged_attention=true", "ragged_block_size=8"]
    random = np.random.default_rng(7)
    requests = [random_request(random) for _ in range(3)]
    weights = jax.jit(lambda: initial_weights(configuration(*overrides)))()

    def tokens(*more):
        return InferenceEngine(
            programs_of(configuration(*overrides, *more)), weights, 2, LENGTH
        ).generate(requests)

    with pytest.raises(
        ConfigError,
        match="use_ragged_attention=true is not supported here: it is a kernel for NVIDIA GPUs",
    ):
        tokens(*ragged)
    gathered = tokens()
    tile_sizes = []

    def interpreted(*arrays, attend=decode.paged_attention, **options):
        tile_sizes.append(options["tile_size"])
        return attend(*arrays, interpret=True, **options)

    monkeypatch.setattr(decode, "unsupported_reason", lambda *facts: None)
    monkeypatch.setattr(decode, "paged_attention", interpreted)
    assert tokens(*ragged) == gathered
    assert set(tile_sizes) == {8}


def test_log_probabilities(models):
    """Of each sampled token, under the softmax of the unmodified logits."""
    weights, _ = models("causal")
    programs = compiled("causal")
    engine = InferenceEngine(programs, weights, 2, LENGTH)
    engine.add_request(0, new_request((5, 6, 7), 6, 1.5, 9, 0.9, seed=11, logprobs=0))
    engine.add_request(1, new_request((5, 6, 7), 6, 1.5, 9, 0.9, seed=11))
    tokens, log_probs, other_tokens = [], [], []
    while engine.has_unfinished:
        for output in engine.step():
            (other_tokens if output.request_id else tokens).extend(output.sampled_tokens)
            log_probs += [each.logprob for each in output.logprobs]
            assert output.request_id == 0 or not output.logprobs
    assert tokens == other_tokens
    ids = np.array([[5, 6, 7, *tokens]])
    positions = np.arange(ids.shape[1])[None]
    model = jax.jit(lambda weights: programs.template.bind(weights)(ids, positions)[0])
    logits = np.asarray(model(weights), np.float64)
    all_log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [all_log_probs[2 + index, token] for index, token in enumerate(tokens)]
    np.testing.assert_allclose(log_probs, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal", "recomputed"])
def test_log_probabilities_of_prompts(models, packing, monkeypatch, kind):
    """Of prompts that share a row, and of a model without caches."""
    overrides = ["attention=paged", "pagedattn_num_pages=80", "pagedattn_tokens_per_page=4"]
    if kind == "recomputed":
        overrides = []
        monkeypatch.setattr(Executor, "supports_packing", False)
    weights, _ = models(kind)
    programs = compiled(kind, *overrides)
    engine = InferenceEngine(programs, weights, 6, LENGTH)
    random = np.random.default_rng(7)
    prompts = [random.integers(0, VOCABULARY, size).tolist() for size in (9, 14, 1, 5)]
    for index, prompt in enumerate(prompts):
        wants = {} if index == 3 else {"prompt_logprobs": 2}
        engine.add_request(index, new_request(prompt, 2, **wants))
    records = {}
    while engine.has_unfinished:
        for output in engine.step():
            records.setdefault(output.request_id, output.prompt_logprobs)
    assert (max(packing, default=0) > 2) == (kind == "causal")
    assert records[3] == ()
    for index, prompt in enumerate(prompts[:3]):
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(prompt)] = prompt
        with programs.context():
            logits = np.asarray(programs.forward(weights, padded)[0], np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = [log_probs[position, token] for position, token in enumerate(prompt[1:])]
        assert records[index][0] is None
        np.testing.assert_allclose([e.logprob for e in records[index][1:]], expected, atol=1e-3)


def test_aborted_request_frees_its_slot(models):
    weights, expected = models("causal")
    engine = InferenceEngine(compiled("causal"), weights, 1, LENGTH)
    first, second = new_request((1, 2), 60), new_request((3, 4), 9)
    engine.add_request(0, first)
    engine.add_request(1, second)
    tokens, aborted = [], False
    while engine.has_unfinished:
        for output in engine.step():
            if output.request_id == 0 and not aborted:
                engine.abort(0)
                aborted = True
            elif output.request_id == 1:
                tokens += output.sampled_tokens
    assert aborted
    assert tokens == expected(second)


@pytest.mark.usefixtures("few_programs")
def test_slots_that_become_free_are_filled_before_a_single_sequence_goes_on(models, monkeypatch):
    """Three of four sequences end in the program in flight, and three others wait for their slots:
    another program would decode one row meanwhile.
    """
    weights, expected = models("causal")
    engine = InferenceEngine(compiled("causal"), weights, 4, LENGTH, timed=False)
    programs = []

    def run(executor, program, batch, run=Executor.run):
        programs.append("prefill" if isinstance(batch, PrefillBatch) else "decode")
        return run(executor, program, batch)

    monkeypatch.setattr(Executor, "run", run)
    requests = [new_request((index, 2), 40 if index == 0 else 5) for index in range(7)]
    assert engine.generate(requests) == [expected(request) for request in requests]
    assert programs[:4] == ["prefill", "decode", "prefill", "decode"]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    ("counts", "rows"),
    [
        pytest.param([12] * 12, [2, 2, 4, 4], id="equal"),
        pytest.param([12, 12, 12, 12, 16, *[12] * 7], [2, 2, 2, 2], id="one is longer"),
    ],
)
def test_groups_of_equal_length_start_together_later(models, monkeypatch, counts, rows):
    """Two of four slots are filled some steps after the others. When the first two sequences end,
    those that wait start with the next two, if all of them will end together."""
    weights, expected = models("causal")
    engine = InferenceEngine(compiled("causal"), weights, 4, LENGTH, timed=False)
    engine.max_tokens = 4
    batches = []

    def run(executor, program, batch, run=Executor.run):
        if isinstance(batch, PrefillBatch):
            batches.append(int((np.asarray(batch.slots) < 4).sum()))
        return run(executor, program, batch)

    monkeypatch.setattr(Executor, "run", run)
    requests = [new_request((index, 2), count) for index, count in enumerate(counts)]
    tokens = [[] for _ in requests]
    waiting = list(enumerate(requests))
    for arrivals in itertools.chain([waiting[:2], waiting[2:]], itertools.repeat([])):
        for index, request in arrivals:
            engine.add_request(index, request)
        if not engine.has_unfinished:
            break
        for output in engine.step():
            tokens[output.request_id] += output.sampled_tokens
    assert tokens == [expected(request) for request in requests]
    assert batches[: len(rows)] == rows


@pytest.mark.parametrize("penalty", [0.0, 1.0])  # without and with logits processors
def test_programs_of_a_new_engine_are_compiled_once(models, penalty):
    programs = programs_of(configuration(*KINDS["causal"]))
    weights = jax.device_put(models("causal")[0], programs.rules.replicated())
    request = new_request((1, 2), 9, presence_penalty=penalty)
    for _ in range(2):
        engine = InferenceEngine(programs, weights, 2, LENGTH, timed=False)
        for _ in range(2):
            engine.generate([request])
    assert programs.prefill._cache_size() == programs.decode._cache_size() == 1


REJECTED = {
    "empty": (new_request((), 3), "the prompt is empty"),
    "no tokens wanted": (
        new_request((1,), 0),
        "max_new_tokens=0 must be a whole number of at least 1",
    ),
    "unknown id": (new_request((1, 41), 3), "token id 41 is outside the vocabulary, 0 to 40"),
    "negative id": (new_request((1, -1), 3), "token id -1 is outside the vocabulary"),
    "too long": (new_request((1,) * 60, 5), "a prompt of 60 tokens and 5 new tokens exceed 64"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_rejects_invalid_requests(models, name):
    request, sentence = REJECTED[name]
    engine = InferenceEngine(compiled("causal"), models("causal")[0], 1, LENGTH)
    assert sentence in str(engine.reject_reason(request))


def test_rejects_sequences_that_need_more_blocks_than_there_are(models):
    overrides = ["attention=paged", "pagedattn_num_pages=5", "pagedattn_tokens_per_page=4"]
    engine = InferenceEngine(compiled("causal", *overrides), models("causal")[0], 2, LENGTH)
    assert "exceed 20" in str(engine.reject_reason(new_request((1,) * 12, 9)))
    assert engine.reject_reason(new_request((1,) * 12, 8)) is None
    overrides += ["pagedattn_max_pages_per_group=3"]
    engine = InferenceEngine(compiled("causal", *overrides), models("causal")[0], 2, LENGTH)
    assert "exceed 12" in str(engine.reject_reason(new_request((1,) * 5, 8)))


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("kind", "layout"), [("causal", HARDEST), ("window", "prefixes")])
def test_nonfinite_logits_do_not_affect_other_requests(models, kind, layout):
    check_broken(models, kind, layout)


@pytest.mark.slow
def test_nonfinite_logits_do_not_affect_prompts_in_the_same_row(models, packing):
    check_broken(models, "causal", "few blocks")
    assert packing


@pytest.mark.slow
def test_nonfinite_keys_are_reported_in_a_shared_row(models, packing):
    """Even if all other values of the sequence are finite."""

    def broken(path, leaf):
        return leaf * 1e38 if [step.key for step in path[-2:]] == ["key", "weight"] else leaf

    overrides = ["attention=paged", "pagedattn_num_pages=80", "pagedattn_tokens_per_page=4"]
    weights = jax.tree.map_with_path(broken, models("causal")[0])
    engine = InferenceEngine(compiled("causal", *overrides), weights, 6, LENGTH)
    for number in range(6):
        engine.add_request(number, new_request((1, 2, number, *range(9)), 3))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.finish_reason for output in outputs] == ["error"] * 6
    assert not any(output.sampled_tokens for output in outputs)
    assert packing


def check_broken(models, kind, layout):
    """The embedding of one token is NaN: requests with that token fail, and the others are not
    affected.
    """
    weights, expected = models(kind)
    table = weights["embedder"]["embedding"]
    broken = {**weights, "embedder": {"embedding": table.at[VOCABULARY - 1].set(np.nan)}}
    engine = InferenceEngine(compiled(kind, *LAYOUTS[layout]), broken, 4, LENGTH)
    random = np.random.default_rng(11)
    good = [
        new_request(tuple(random.integers(0, VOCABULARY - 1, 20).tolist()), 6) for _ in range(6)
    ]
    bad = new_request((*good[0].prompt[:9], VOCABULARY - 1, *range(9)), 8)
    order = [bad, good[0], good[1], bad, *good[2:]]
    for number, request in enumerate(order):
        engine.add_request(number, request)
    tokens, finish_reasons = {index: [] for index in range(len(order))}, {}
    while engine.has_unfinished:
        for output in engine.step():
            tokens[output.request_id] += output.sampled_tokens
            finish_reasons[output.request_id] = output.finish_reason
    assert [finish_reasons[index] for index in (0, 3)] == ["error", "error"]
    for index, request in enumerate(order):
        if request is not bad and VOCABULARY - 1 not in expected(request):
            assert (tokens[index], finish_reasons[index]) == (expected(request), "length")
    check_consistent(engine.prefix_cache)


def test_nonfinite_weights_are_reported(models):
    weights, _ = models("causal")
    broken = jax.tree.map(lambda x: x * np.nan, weights)
    engine = InferenceEngine(compiled("causal"), broken, 1, LENGTH)
    engine.add_request(0, new_request((1, 2), 5))
    outputs = [output for _ in range(3) for output in engine.step()]
    assert [output.finish_reason for output in outputs] == ["error"]
    assert "logits are NaN or infinite" in outputs[0].error
