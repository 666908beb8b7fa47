"""Penalties, biases and minimum lengths: against the processors of transformers, and against the
formula of OpenAI's reference for presence and frequency, computed here in numpy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.inference import GenerationRequest, SamplingParams
from maxtext.inference.engine.sequence import Sequence
from maxtext.inference.sampling.sampler import (
    BatchedSamplingParams,
    ProcessorState,
    process_logits,
    sample,
    token_keys,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
VOCABULARY = 40
PROMPT = (3, 7, 7, 11, 20)
OUTPUT = (5, 7, 5, 5, 31)


def processed(logits, params, prompt=PROMPT, output=OUTPUT):
    """The processed logits of the token after prompt and output."""
    sequence = Sequence(0, prompt, params)
    # The last token is counted on the device.
    row = ProcessorState.from_tokens(prompt, output[:-1], params, VOCABULARY)
    rows = jax.tree.map(lambda x: jnp.asarray(x)[None], row).add_tokens(
        jnp.asarray(output[-1:] or [-1])
    )
    batched = BatchedSamplingParams.from_params([params], [100], [sequence.min_position])
    position = jnp.asarray([len(prompt) + len(output)])
    return np.asarray(process_logits(jnp.asarray(logits)[None], rows, batched, position))[0]


@pytest.fixture(scope="module")
def logits():
    return (3 * np.random.default_rng(0).standard_normal(VOCABULARY)).astype(np.float32)


@pytest.mark.parametrize("penalty", [1.4, 0.7])
def test_repetition_penalty(logits, penalty):
    """Of all tokens of the prompt and the completion, as in transformers."""
    processor = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = processor(torch.tensor([PROMPT + OUTPUT]), torch.tensor(logits[None]))[0].numpy()
    got = processed(logits, SamplingParams(repetition_penalty=penalty))
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0.7), (-0.5, 0.0), (0.0, 2.0)])
def test_frequency_and_presence_penalty(logits, frequency, presence):
    """l - count · frequency - [count > 0] · presence, of the completion alone."""
    counts = np.bincount(OUTPUT, minlength=VOCABULARY)
    expected = logits - counts * frequency - (counts > 0) * presence
    params = SamplingParams(frequency_penalty=frequency, presence_penalty=presence)
    np.testing.assert_allclose(processed(logits, params), expected, rtol=1e-5, atol=1e-5)


def test_logit_bias_comes_before_the_penalties(logits):
    params = SamplingParams(logit_bias={"7": 50, 9: -100}, repetition_penalty=2.0)
    expected = logits.copy()
    expected[7] += 50
    expected[9] -= 100
    for token in {*PROMPT, *OUTPUT}:
        expected[token] *= 0.5 if expected[token] > 0 else 2.0
    np.testing.assert_allclose(processed(logits, params), expected, rtol=1e-6)


def test_tokens_that_end_a_sequence_are_excluded_before_min_tokens(logits):
    """More stop ids than a program checks itself."""
    stop_ids = tuple(range(10, 20))
    for count in range(4):
        params = SamplingParams(min_tokens=2, stop_token_ids=stop_ids)
        got = processed(logits, params, output=OUTPUT[:count])
        excluded = np.flatnonzero(np.isneginf(got)).tolist()
        assert excluded == (list(stop_ids) if count < 2 else [])


def test_only_allowed_tokens_remain(logits):
    """As transformers' `prefix_allowed_tokens_fn`."""
    allowed = [4, 9, 31]
    processor = transformers.PrefixConstrainedLogitsProcessor(lambda batch, ids: allowed, 1)
    expected = processor(torch.tensor([PROMPT + OUTPUT]), torch.tensor(logits[None]))[0].numpy()
    params = SamplingParams(allowed_token_ids=allowed)
    np.testing.assert_array_equal(processed(logits, params), expected)


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, 0), (2.0, 6)])
def test_min_p(logits, min_p, temperature, top_k):
    """The tokens that are sampled are those that transformers keeps."""
    scores = torch.tensor(logits[None]) / temperature
    if top_k:
        scores = transformers.TopKLogitsWarper(top_k)(None, scores)
    kept = transformers.MinPLogitsWarper(min_p)(None, scores)[0].numpy()
    params = SamplingParams(temperature, top_k, min_p=min_p)
    draws = 4000
    tokens = sample(
        jnp.broadcast_to(logits, (draws, VOCABULARY)),
        token_keys(jnp.zeros(draws, jnp.uint32), jnp.arange(draws)),
        BatchedSamplingParams.from_params([params] * draws),
        params.mode,
    )
    counts = np.bincount(tokens, minlength=VOCABULARY)
    probabilities = torch.softmax(torch.tensor(kept), -1).numpy()
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(np.isfinite(kept)))
    likely = probabilities * draws >= 5
    assert (counts[likely] > 0).all()
    np.testing.assert_allclose(counts / draws, probabilities, atol=0.04)


OPTIONS = [
    {},
    {"frequency_penalty": 1.5, "presence_penalty": 0.7},
    {"repetition_penalty": 1.6},
    {"logit_bias": {9: 4.0, 12: -100.0}},
    {"allowed_token_ids": tuple(range(0, 61, 3))},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {1: 100}, "min_tokens": 5},
]


def reference_greedy(model, prompt, count, options, end):
    """Greedy tokens under the options, from the logits of transformers."""
    params, new = SamplingParams(**options), []
    while len(new) < count and end not in new:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *new]])).logits[0, -1].numpy()
        logits = logits.astype(np.float64)
        for token, bias in params.logit_bias.items():
            logits[token] += bias
        seen = sorted({*prompt, *new})
        penalty = params.repetition_penalty
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        counts = np.bincount(new, minlength=len(logits)) if new else np.zeros(len(logits))
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if params.allowed_token_ids is not None:
            logits[np.setdiff1d(np.arange(len(logits)), params.allowed_token_ids)] = -np.inf
        if len(new) < params.min_tokens:
            logits[end] = -np.inf
        new.append(int(logits.argmax()))
    return new


@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize(
    "paged", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["contiguous", "preempted"]
)
def test_engine(llm, folder, model, ids, paged):
    """A batch that mixes requests with and without processors; with few blocks, sequences are
    preempted and prefilled again.
    """
    if paged:
        llm = type(llm).load(
            folder,
            dtype="float32",
            weight_dtype="float32",
            matmul_precision="highest",
            attention="paged",
            pagedattn_num_pages=12,
            pagedattn_tokens_per_page=4,
            max_target_length=32,
            per_device_batch_size=4,
        )
    prompt = ids[0].tolist()
    requests = [
        GenerationRequest(prompt, SamplingParams(max_new_tokens=14, **options))
        for options in OPTIONS
    ]
    completions = sorted(llm.completions(iter(requests)), key=lambda each: each.index)
    got = [list(completion.token_ids) for completion in completions]
    assert got == [reference_greedy(model, prompt, 14, options, end=1) for options in OPTIONS]
    assert got[-1][-1] == 1
    assert len(got[-1]) == 6
    assert len({tuple(tokens) for tokens in got}) == len(OPTIONS)
    if paged:
        assert llm.engine.scheduler.num_preemptions > 0
