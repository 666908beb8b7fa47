"""Sampled tokens against exact distributions, computed here in float64 from the definitions."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from maxtext.configs.derive import Devices
from maxtext.inference.sampling.params import SamplingMode, SamplingParams
from maxtext.inference.sampling.sampler import (
    BatchedSamplingParams,
    batch_mode,
    sample,
    token_keys,
    truncation_threshold,
)
from maxtext.inference.validation import RequestError
from maxtext.models.configuration import load

DRAWS = 30_000
FEW = 1000  # where every token is checked
RARE = 1e-4  # a p-value that the right distribution rarely gives
LOGITS = (2 * np.random.default_rng(0).standard_normal(40)).astype(np.float32)

compiled = jax.jit(sample, static_argnums=3)


@cache
def keys(count, seed=0):
    return token_keys(jnp.full(count, seed, jnp.uint32), jnp.arange(count))


def tokens(logits, params, seed=0, mode=None):
    """One token a row; all rows have the same logits if these are [V]."""
    logits = jnp.broadcast_to(jnp.asarray(logits), (len(params), np.shape(logits)[-1]))
    mode = batch_mode(params) if mode is None else mode
    return np.asarray(
        compiled(logits, keys(len(params), seed), BatchedSamplingParams.from_params(params), mode)
    )


def counts(logits, sampling, mode=None):
    drawn = tokens(logits, [sampling] * DRAWS, mode=mode)
    return np.bincount(drawn, minlength=len(logits))


def exact(logits, sampling):
    """The probability of each token, by applying top_k and then top_p."""
    scaled = np.asarray(logits, np.float64) / sampling.temperature
    allowed = {token for token in range(len(scaled)) if scaled[token] > -np.inf}

    def shares():
        most = max(scaled[token] for token in allowed)
        weights = {token: np.exp(scaled[token] - most) for token in allowed}
        return {token: weight / sum(weights.values()) for token, weight in weights.items()}

    def those_down_to(last):
        return {token for token in allowed if scaled[token] >= scaled[last]}

    falling = sorted(allowed, key=lambda token: -scaled[token])
    if 0 < sampling.top_k < len(falling):
        allowed = those_down_to(falling[sampling.top_k - 1])
    if sampling.top_p < 1:
        share, total = shares(), 0.0
        for token in sorted(allowed, key=lambda token: -scaled[token]):
            total += share[token]
            assert abs(total - sampling.top_p) > 1e-5, (
                "too close to the boundary for float32: choose other values"
            )
            if total > sampling.top_p:
                allowed = those_down_to(token)
                break
    result = np.zeros(len(scaled))
    for token, share in shares().items():
        result[token] = share
    return result


def chance(counted, expected):
    """The p-value of the counts, with rare tokens in one bin; 0 if a token came that cannot."""
    if counted[expected == 0].sum():
        return 0.0
    wanted = expected * counted.sum()
    often = wanted >= 5
    observed, wanted = (
        [*counted[often], counted[~often].sum()],
        [*wanted[often], wanted[~often].sum()],
    )
    bins = [pair for pair in zip(observed, wanted, strict=True) if pair[1] > 0]
    return 1.0 if len(bins) == 1 else stats.chisquare(*zip(*bins, strict=True)).pvalue


# Every strategy, and similar parameters that the test must distinguish from it.
STRATEGIES = {
    "weighted": (SamplingParams(1.0), SamplingParams(1.05)),
    "cooler": (SamplingParams(0.6), SamplingParams(0.63)),
    "warmer": (SamplingParams(2.5), SamplingParams(2.3)),
    "topk": (SamplingParams(1.0, top_k=7), SamplingParams(1.0, top_k=8)),
    "nucleus": (SamplingParams(1.0, top_p=0.8), SamplingParams(1.0, top_p=0.84)),
    "composite": (SamplingParams(0.9, top_k=10, top_p=0.7), SamplingParams(0.9, top_p=0.7)),
    "composite, cut by top_k alone": (
        SamplingParams(1.3, top_k=3, top_p=0.99),
        SamplingParams(1.3, top_k=4, top_p=0.99),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_frequencies(name):
    sampling, near = STRATEGIES[name]
    counted = counts(LOGITS, sampling)
    assert counted.sum() == DRAWS
    assert chance(counted, exact(LOGITS, sampling)) > RARE
    assert chance(counted, exact(LOGITS, near)) < RARE


@pytest.mark.parametrize("top_k", [len(LOGITS), len(LOGITS) + 1, 2**31, 2**70])
def test_top_k_above_the_vocabulary_is_all_of_it(top_k):
    params = SamplingParams(1.0, top_k=top_k)
    drawn = tokens(LOGITS, [params] * FEW)
    np.testing.assert_array_equal(drawn, tokens(LOGITS, [SamplingParams(1.0)] * FEW))


def test_top_p_applies_to_the_tokens_that_top_k_keeps():
    """Shares 0.4, 0.3, 0.2, 0.1. Of the first two 0.5 is the first alone (4/7); of all four it
    would be both.
    """
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3, 1e-9], np.float32))
    assert (exact(logits, SamplingParams(1.0, top_k=2, top_p=0.5)) > 0).tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert (exact(logits, SamplingParams(1.0, top_p=0.5)) > 0).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert np.flatnonzero(counts(logits, SamplingParams(1.0, top_k=2, top_p=0.5))).tolist() == [1]
    counted = counts(logits, SamplingParams(1.0, top_k=3, top_p=0.5))  # 4/9 is not enough
    assert chance(counted, np.array([0, 4 / 7, 0, 3 / 7, 0])) > RARE


def test_tokens_that_tie_with_the_last_one_are_kept():
    shares = np.array([0.2, 0.1, 0.2, 0.3, 0.2])
    logits = np.log(shares)
    for sampling in (
        SamplingParams(1.0, top_k=2),
        SamplingParams(1.0, top_p=0.4),
        SamplingParams(1.0, top_k=3, top_p=0.6),
    ):
        expected = np.where(shares >= 0.2, shares, 0) / 0.9
        np.testing.assert_allclose(exact(logits, sampling), expected)
        assert chance(counts(logits, sampling), expected) > RARE
    same = np.zeros(5)
    assert chance(counts(same, SamplingParams(1.0, top_k=1)), np.full(5, 0.2)) > RARE
    assert chance(counts(same, SamplingParams(1.0, top_p=0.1)), np.full(5, 0.2)) > RARE


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(1.0, top_k=1),
        SamplingParams(1.0, top_p=1e-6),
        SamplingParams(1e-6),
        SamplingParams(1e-30, top_k=3),
    ],
    ids=["greedy", "top_k=1", "tiny top_p", "tiny temperature", "tinier temperature"],
)
def test_settings_that_keep_the_most_likely_token_only(sampling):
    rows = np.random.default_rng(1).standard_normal((FEW, 40)).astype(np.float32)
    assert tokens(rows, [sampling] * FEW).tolist() == rows.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals():
    assert tokens(np.float32([1, 3, 2, 3]), [SamplingParams()]).tolist() == [1]


def test_limits_that_keep_all_tokens():
    free = tokens(LOGITS, [SamplingParams(1.0)] * FEW)
    for sampling in (
        SamplingParams(1.0, top_k=40),
        SamplingParams(1.0, top_k=1000),
        SamplingParams(1.0, top_k=1000, top_p=1.0),
    ):
        assert (tokens(LOGITS, [sampling] * FEW) == free).all()
    # Too rare to be seen in draws: the first has all of the probability as far as float32 can tell.
    logits = np.float32([[0, -30, -40, -50, -60]])
    assert truncation_threshold(
        logits, BatchedSamplingParams.from_params([SamplingParams(1.0)])
    ).tolist() == [[-60]]
    assert truncation_threshold(
        logits, BatchedSamplingParams.from_params([SamplingParams(1.0, top_k=3)])
    ).tolist() == [[-40]]
    assert truncation_threshold(
        logits, BatchedSamplingParams.from_params([SamplingParams(1.0, top_p=0.999)])
    ).tolist() == [[0]]


@pytest.mark.slow
def test_logits_of_any_magnitude():
    generator = np.random.default_rng(2)
    tiny = 1e-30 * generator.standard_normal(40).astype(np.float32)
    for sampling in (SamplingParams(1.0), SamplingParams(1.0, top_k=40), SamplingParams(1e30)):
        assert chance(counts(tiny, sampling), np.full(40, 1 / 40)) > RARE
    huge = np.full(40, -3e30, np.float32)
    huge[:4] = 1e30, 3e30, 0, 2e30
    for sampling in (
        SamplingParams(1.0),
        SamplingParams(1.0, top_k=2),
        SamplingParams(0.5, top_p=0.9),
        SamplingParams(7.0, 3, 0.5),
    ):
        assert set(tokens(huge, [sampling] * FEW).tolist()) == {1}
    # Far from 0, only differences count.
    shifted = np.array([1000.0, 1001.0, 999.0, 1002.0, 998.0])
    for sampling in (
        SamplingParams(1.0),
        SamplingParams(1.0, top_k=3),
        SamplingParams(1.0, top_p=0.85),
    ):
        assert chance(counts(shifted, sampling), exact(shifted - 1000, sampling)) > RARE
        assert chance(counts(-shifted, sampling), exact(1000 - shifted, sampling)) > RARE


@pytest.mark.slow
def test_tokens_with_infinite_negative_logits_are_never_sampled():
    logits = np.where(np.arange(40) % 3 == 0, LOGITS, -np.inf)
    assert np.isfinite(logits).sum() == 14
    for sampling in (
        SamplingParams(1.0),
        SamplingParams(1.0, top_k=5),
        SamplingParams(1.0, top_k=30),
        SamplingParams(1.0, top_p=0.9),
        SamplingParams(3.0, top_k=30, top_p=0.999),
    ):
        assert chance(counts(logits, sampling), exact(logits, sampling)) > RARE
    only = np.where(np.arange(40) == 17, LOGITS, -np.inf)
    for sampling in (
        SamplingParams(),
        SamplingParams(1.0),
        SamplingParams(2.0, top_k=9),
        SamplingParams(2.0, top_p=0.5),
        SamplingParams(2.0, 3, 0.5),
    ):
        assert set(tokens(only, [sampling] * FEW).tolist()) == {17}


MIXED = [SamplingParams(), *(sampling for pair in STRATEGIES.values() for sampling in pair)]


def test_token_of_a_row_does_not_depend_on_the_batch():
    """Every row of a mixed batch against the same row in a batch of one, in its own mode."""
    generator = np.random.default_rng(3)
    params = MIXED * 6
    rows = generator.standard_normal((len(params), 40)).astype(np.float32) * 2
    rows[::7, ::3] = -np.inf
    batch_tokens = tokens(rows, params, seed=2)
    row_keys = keys(len(params), 2)
    row_tokens = [
        int(
            compiled(
                rows[index][None],
                row_keys[index : index + 1],
                BatchedSamplingParams.from_params([sampling]),
                sampling.mode,
            )[0]
        )
        for index, sampling in enumerate(params)
    ]
    assert batch_tokens.tolist() == row_tokens
    greedy = [index for index, sampling in enumerate(params) if sampling.temperature == 0]
    assert batch_tokens[greedy].tolist() == rows[greedy].argmax(-1).tolist()


def test_token_does_not_depend_on_the_mode():
    for sampling, modes in (
        (SamplingParams(), (SamplingMode.GREEDY, SamplingMode.CATEGORICAL, SamplingMode.TRUNCATED)),
        (SamplingParams(1.3), (SamplingMode.CATEGORICAL, SamplingMode.TRUNCATED)),
    ):
        first, *others = [tokens(LOGITS, [sampling] * FEW, mode=mode).tolist() for mode in modes]
        assert all(sampled == first for sampled in others)


def test_prng_key_determines_the_tokens():
    params = [SamplingParams(1.0)] * FEW
    first, same_key, other_key = (tokens(LOGITS, params, seed=seed) for seed in (1, 1, 2))
    assert (first == same_key).all()
    assert (first != other_key).any()


def test_bfloat16_logits():
    """The same tokens as from the same logits in float32: nothing is computed in bfloat16."""
    low = jnp.asarray(LOGITS, jnp.bfloat16)
    for sampling in (
        SamplingParams(),
        SamplingParams(0.7),
        SamplingParams(0.7, top_k=9, top_p=0.8),
    ):
        params = [sampling] * FEW
        assert (tokens(low, params) == tokens(low.astype(jnp.float32), params)).all()


def test_batch_mode():
    assert batch_mode([]) == batch_mode([SamplingParams()]) == SamplingMode.GREEDY
    assert batch_mode([SamplingParams(), SamplingParams(0.5)]) == SamplingMode.CATEGORICAL
    for truncated in (
        SamplingParams(1.0, top_k=3),
        SamplingParams(1.0, top_p=0.5),
        SamplingParams(1.0, 3, 0.5),
    ):
        assert (
            batch_mode([truncated, SamplingParams(1.0), SamplingParams()]) == SamplingMode.TRUNCATED
        )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("greedy", SamplingParams()),
        ("greedy temperature=0.5 top_k=3 nucleus_p=0.5", SamplingParams()),
        ("weighted", SamplingParams(1.0)),
        ("weighted temperature=0.5 top_k=3 nucleus_p=0.5", SamplingParams(0.5)),
        ("topk top_k=3 nucleus_p=0.5", SamplingParams(1.0, top_k=3)),
        ("nucleus top_k=3 nucleus_p=0.5 temperature=2", SamplingParams(2.0, top_p=0.5)),
        ("nucleus nucleus_p=1", SamplingParams(1.0)),
        ("composite top_k=3 nucleus_p=0.5 temperature=0.7", SamplingParams(0.7, 3, 0.5)),
    ],
)
def test_from_config(settings, expected):
    strategy, *others = settings.split()
    overrides = [f"decode_sampling_strategy={strategy}"]
    overrides += [f"decode_sampling_{setting}" for setting in others]
    config = load(None, overrides, environ={}, devices=Devices(1))
    assert SamplingParams.from_config(config) == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=float("inf")), "temperature=inf"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature=1.0, top_k=-2), "top_k=-2"),
        (dict(temperature=1.0, top_p=0.0), "top_p=0.0"),
        (dict(temperature=1.0, top_p=1.1), "top_p=1.1"),
        (dict(temperature=1.0, top_p=float("nan")), "top_p=nan"),
        (dict(min_p=-0.1), "min_p=-0.1 must be a number from 0 to 1"),
        (dict(min_p=float("nan")), "min_p=nan"),
        (dict(presence_penalty=2.1), "presence_penalty=2.1 must be a number from -2 to 2"),
        (dict(frequency_penalty=-2.1), "frequency_penalty=-2.1 must be a number from -2 to 2"),
        (dict(repetition_penalty=0), "repetition_penalty=0 must be a number from 1e-06 to 1e"),
        (dict(logit_bias={"x": 1}), "logit_bias has the key"),
        (dict(logit_bias={-1: 1}), "logit_bias has the key -1"),
        (dict(logit_bias={"9" * 5000: 1}), "logit_bias has the key"),
        (dict(logit_bias={"07": 1, "7": 2}), 'logit_bias has the key "07"'),
        (dict(logit_bias={5: 101}), "logit_bias of token 5 must be a number from -100 to 100"),
        (dict(logit_bias={5: float("nan")}), "logit_bias of token 5"),
        (dict(logit_bias=[5]), "logit_bias must be an object"),
        (dict(logit_bias={5: 10**400}), "logit_bias of token 5"),
        (dict(stop_token_ids=[5] * 1025), "stop_token_ids has 1025 tokens: at most 1024"),
        (dict(allowed_token_ids=[5] * 262_145), "has 262145 tokens: at most 262144"),
        (dict(bad_words=["x" * 512] * 65), "bad_words has 33280 characters: at most 32768"),
        (dict(min_tokens=-1), "min_tokens=-1 must be a whole number of at least 0"),
        (dict(n=0), "n=0 must be a whole number from 1 to 128"),
        (dict(n=1.5), "n must be a whole number, not 1.5"),
        (dict(seed=2**64), "seed=18446744073709551616 has more than 64 bits"),
        (dict(seed="x"), 'seed must be a whole number, not "x"'),
        (dict(stop=["x", ""]), "stop must be a text or a list of texts, none of them empty"),
        (dict(stop=["x"] * 65), "stop has 65 texts: at most 64"),
        (dict(stop="x" * 1025), "stop has a text of 1025 characters: at most 1024"),
        (dict(stop_token_ids=[True]), "stop_token_ids must be a list of token ids"),
        (dict(ignore_eos=1), "ignore_eos must be true or false, not 1"),
    ],
)
def test_rejects_invalid_values(fields, message):
    with pytest.raises(RequestError, match=message) as caught:
        SamplingParams(**fields)
    assert caught.value.param == list(fields)[-1]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 10**400},
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": 1.5},
        {"top_p": None},
    ],
)
def test_rejects_values_that_no_array_can_hold(fields):
    with pytest.raises(RequestError, match=next(iter(fields))):
        SamplingParams(**({"temperature": 1.0} | fields))


def test_many_tokens_are_converted_once_for_all_copies():
    params = SamplingParams(logit_bias={7: 1.5, 10**30: -1}, allowed_token_ids=[3, 7, 3])
    copied = params.with_valid(seed=5, max_new_tokens=2)
    assert (copied.seed, copied.max_new_tokens, params.seed) == (5, 2, 0)
    assert copied.token_arrays is params.token_arrays
    biased, biases, allowed = copied.token_arrays
    assert (biased.tolist(), biases.tolist()) == ([7, 2**31 - 1], [1.5, -1])
    assert allowed.tolist() == [3, 7, 3]


def test_tiny_top_p_keeps_the_most_likely_token():
    """1e-60 is 0 in float32, which would exclude every token."""
    rows = BatchedSamplingParams.from_params([SamplingParams(1.0, 0, 1e-60)])
    logits = jnp.asarray([[0.0, 1.0, 3.0, 2.0]])
    assert sample(logits, keys(1), rows, SamplingMode.TRUNCATED).tolist() == [2]
