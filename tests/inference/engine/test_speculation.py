"""Speculative decoding changes no token: engines that draft generate the tokens of engines that do
not, which the other tests compare with references.
"""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.inference.engine.acceptance import DraftControl
from maxtext.inference.engine.batches import NO_TOKEN
from maxtext.inference.engine.drafting import DraftModelProposer, NgramProposer, lookup_ngrams
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.requests import GenerationRequest
from maxtext.inference.sampling.grammar import GrammarCompiler
from maxtext.inference.sampling.params import SamplingParams
from maxtext.inference.sampling.structured_outputs import StructuredOutputs
from maxtext.tokenizers import ByteTokenizer
from tests.inference.engine.prefix_cache_checks import check_consistent
from tests.support.random_requests import (
    HARDEST,
    LAYOUTS,
    LENGTH,
    VOCABULARY,
    check_released,
    compiled,
    new_request,
    random_request,
    random_weights,
    reference,
)

EOS = 2
NGRAMS = NgramProposer(num_tokens=3, max_length=3, min_length=1)


def drafting_engine(kind, *overrides, slots=4, proposer=NGRAMS):
    programs = replace(compiled(kind, *overrides), proposer=proposer)
    return InferenceEngine(programs, random_weights(kind), slots, LENGTH)


@pytest.fixture(autouse=True)
def drafts_always(monkeypatch):
    """Engines draft whether that pays or not."""
    monkeypatch.setattr("maxtext.inference.engine.acceptance.PAUSE_PROGRAMS", 0)


def serve(engine, requests, random):
    """The tokens of each request, with requests that come at random times."""
    tokens = {index: [] for index in range(len(requests))}
    waiting = list(enumerate(requests))
    while waiting or engine.has_unfinished:
        for _ in range(min(len(waiting), int(random.integers(0, 4)))):
            engine.add_request(*waiting.pop(0))
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.sampled_tokens
        check_consistent(engine.prefix_cache)
    check_released(engine)
    return list(tokens.values())


CASES = [
    ("causal", HARDEST),
    ("window", "prefixes"),
    ("latent", "contiguous"),
    ("sinks, windows and experts", "chunked"),
    ("chunks", HARDEST),
    ("learned positions", "few blocks"),
    ("streams", "prefixes"),
    ("delta", HARDEST),
    ("delta", "contiguous"),
]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_drafts_change_no_token(kind, layout):
    """Greedy and sampled requests of mixed lengths, with stop ids and continuous batching."""
    random = np.random.default_rng(5)
    prefixes = random.integers(0, VOCABULARY, (2, 18)).tolist()
    requests = [random_request(random, counts=(1, 30), prefixes=prefixes) for _ in range(9)]
    engine = drafting_engine(kind, *LAYOUTS[layout])
    # Up to the longest length, which is that of the pool if it has few blocks.
    requests.append(new_request([1, 2] * 27 + [1], engine.max_length - 55))
    expected = reference(compiled(kind), random_weights(kind))
    assert serve(engine, requests, random) == [expected(request) for request in requests]
    assert 0 < engine.drafts.num_accepted < engine.drafts.num_drafted


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_programs_for_some_of_the_slots(monkeypatch):
    """With penalties, whose counts of tokens are selected with the slots."""
    monkeypatch.setattr("maxtext.inference.engine.layout.MIN_DECODE_ROWS", 1)
    requests = [
        new_request([1, 2, 3] * 3, count, temperature, seed=count, repetition_penalty=1.2)
        for count, temperature in ((4, 0.0), (11, 1.0), (21, 0.0), (30, 1.0))
    ]
    engine = drafting_engine("causal", *LAYOUTS["few blocks"])
    rows = set()

    def decode(batch, run=engine.executor.decode):
        rows.add(None if batch.slots is None else len(batch.slots))
        return run(batch)

    monkeypatch.setattr(engine.executor, "decode", decode)
    plain = InferenceEngine(compiled("causal"), random_weights("causal"), 4, LENGTH)
    assert engine.generate(requests) == plain.generate(requests)
    assert len(rows - {None}) > 1
    assert engine.drafts.num_accepted > 0


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_grammars():
    """Every second request has a grammar, of which every second one samples from truncated logits:
    those rows do not draft, the others do."""
    pytest.importorskip("llguidance")
    compiler = GrammarCompiler(ByteTokenizer(), VOCABULARY, [EOS])
    constraint = StructuredOutputs("regex", "( !#){2,4}[$%]+")

    def generate(engine):
        tokens = {index: [] for index in range(8)}
        for index in tokens:
            prompt = [3, 4, 6, 3, 4, 6, 3 + index]
            params = SamplingParams(
                1.0,
                top_k=9 if index % 4 == 3 else 0,
                max_new_tokens=16,
                seed=index,
                stop_token_ids=(EOS,),
            )
            grammar = compiler.matcher(constraint) if index % 2 else None
            engine.add_request(index, GenerationRequest(prompt, params), grammar=grammar)
        while engine.has_unfinished:
            for output in engine.step():
                assert output.error is None
                tokens[output.request_id] += output.sampled_tokens
        check_released(engine)
        return tokens

    engine = drafting_engine("causal")
    plain = InferenceEngine(compiled("causal"), random_weights("causal"), 4, LENGTH)
    tokens = generate(engine)
    assert tokens == generate(plain)
    for index in (1, 3, 5, 7):
        assert re.fullmatch("( !#){2,4}[$%]+", ByteTokenizer().decode(tokens[index]))
    assert engine.drafts.num_accepted > 0


def draft_model(kind):
    return DraftModelProposer(3, model_runner=compiled(kind).runner, weights=random_weights(kind))


def sampled_requests(count):
    random = np.random.default_rng(7)
    return [random_request(random, counts=(4, 24)) for _ in range(count)]


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("layout", [HARDEST, "contiguous"])
def test_a_draft_model_with_the_weights_of_the_target_is_always_accepted(layout):
    """Also at a temperature, since both sample with the same noise. The last step of a sequence
    drafts fewer tokens, and a stop id rejects those after it."""
    requests = [replace_stops(request) for request in sampled_requests(9)]
    engine = drafting_engine("causal", *LAYOUTS[layout], proposer=draft_model("causal"))
    expected = reference(compiled("causal"), random_weights("causal"))
    tokens = serve(engine, requests, np.random.default_rng(3))
    assert tokens == [expected(request) for request in requests]
    assert engine.drafts.num_accepted == engine.drafts.num_drafted > 0


def replace_stops(request):
    return replace(request, params=replace(request.params, stop_token_ids=()))


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_drafts_of_another_model_change_no_token():
    """One with windows, for a model without: its caches are of another kind."""
    requests = sampled_requests(9)
    engine = drafting_engine("causal", *LAYOUTS["prefixes"], proposer=draft_model("window"))
    expected = reference(compiled("causal"), random_weights("causal"))
    tokens = serve(engine, requests, np.random.default_rng(3))
    assert tokens == [expected(request) for request in requests]
    assert engine.drafts.num_accepted < engine.drafts.num_drafted


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
def test_pauses_while_drafts_are_rejected(monkeypatch):
    """Programs without drafts keep the caches of the draft model complete, so that it is accepted
    again afterwards."""
    monkeypatch.setattr("maxtext.inference.engine.acceptance.WINDOW_STEPS", 8)
    monkeypatch.setattr("maxtext.inference.engine.acceptance.PAUSE_PROGRAMS", 2)
    engine = drafting_engine("causal", proposer=draft_model("causal"))
    engine.drafts.num_paused = 2
    request = new_request([1, 2, 3], 40)
    expected = reference(compiled("causal"), random_weights("causal"))(request)
    assert engine.generate([request]) == [expected]
    drafts = engine.drafts
    assert drafts.num_accepted == drafts.num_drafted
    assert 0 < drafts.num_drafts + drafts.num_accepted < 39  # tokens of programs with drafts


def test_control_of_drafts():
    control = DraftControl(num_tokens=4, max_sequences=2)
    assert [control.next_drafts(count) for count in (1, 2, 3)] == [4, 4, 0]
    drafted = np.array([[4, 0], [2, NO_TOKEN]])  # of two steps and sequences; one is inactive
    tokens = np.full((10, 2), NO_TOKEN)
    tokens[:3, 0] = tokens[5, 0] = tokens[0, 1] = 7  # two drafts of the first step are accepted
    control.add(drafted, tokens)
    assert (control.num_drafts, control.num_drafted, control.num_accepted) == (2, 6, 2)


def test_control_pauses_and_tries_again(monkeypatch):
    monkeypatch.setattr("maxtext.inference.engine.acceptance.WINDOW_STEPS", 4)
    monkeypatch.setattr("maxtext.inference.engine.acceptance.PAUSE_PROGRAMS", 3)
    control = DraftControl(num_tokens=1, max_sequences=8)
    drafted, rejected = np.full((4, 1), 1), np.tile([[7], [NO_TOKEN]], (4, 1))
    control.add(drafted, rejected)
    assert [control.next_drafts(1) for _ in range(5)] == [0, 0, 0, 1, 1]
    control.add(drafted, np.full((8, 1), 7))  # all are accepted
    assert control.next_drafts(1) == 1


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),  # after the latest 1, 2
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),  # of two occurrences the later one
        ([5, 1, 2, 7, 3, 2, 8, 1, 2], [7, 3, 2]),  # 1, 2 rather than the later 2
        ([4, 4, 4], [4, 4, 4]),  # a draft goes on beyond the newest token
        ([6, 5, 6, 5], [6, 5, 6]),
        ([1, 2, 3, 4], [NO_TOKEN] * 3),
        ([1], [NO_TOKEN] * 3),
    ],
)
def test_ngram_lookup(row, expected):
    history = np.full((2, 12), 2, np.int32)  # beyond the newest token, the history is arbitrary
    history[0, : len(row)] = row
    positions = np.array([len(row) - 1, -1])  # the second row is inactive
    drafts = lookup_ngrams(
        jnp.asarray(history), jnp.asarray(positions), num_tokens=3, max_length=2, min_length=1
    )
    assert drafts.tolist() == [expected, [NO_TOKEN] * 3]


def test_ngrams_shorter_than_the_minimum_are_no_match():
    history = jnp.asarray([[1, 2, 3, 1]])
    lengths = dict(num_tokens=2, max_length=3)
    at = jnp.asarray([3])
    assert lookup_ngrams(history, at, min_length=1, **lengths).tolist() == [[2, 3]]
    assert lookup_ngrams(history, at, min_length=2, **lengths).tolist() == [[NO_TOKEN] * 2]
