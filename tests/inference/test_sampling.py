"""Draws against exact distributions, which are computed here in float64 from the definitions."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from maxtext.common.errors import UserError
from maxtext.configs import load
from maxtext.configs.derive import Devices
from maxtext.inference.sampling import Kind, Rows, Sampling, draw, kind_of, least_kept

DRAWS = 30_000
FEW = 1000  # where each is checked by itself
RARE = 1e-4  # what the right distribution may give by chance
LOGITS = (2 * np.random.default_rng(0).standard_normal(40)).astype(np.float32)

compiled = jax.jit(draw, static_argnums=3)


@cache
def keys(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def tokens(logits, samplings, seed=0, kind=None):
    """One token a row; all rows have the same logits if these are [V]."""
    logits = jnp.broadcast_to(jnp.asarray(logits), (len(samplings), np.shape(logits)[-1]))
    kind = kind_of(samplings) if kind is None else kind
    return np.asarray(compiled(logits, keys(len(samplings), seed), Rows.of(samplings), kind))


def counts(logits, sampling, kind=None):
    drawn = tokens(logits, [sampling] * DRAWS, kind=kind)
    return np.bincount(drawn, minlength=len(logits))


def exact(logits, sampling):
    """The probability of each token, one decision after the other."""
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
                "too near the border for float32: choose other numbers"
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
    bins = [(one, other) for one, other in zip(observed, wanted, strict=True) if other > 0]
    return 1.0 if len(bins) == 1 else stats.chisquare(*zip(*bins, strict=True)).pvalue


# Each strategy, and one so near that the test has to be sharp to tell them apart.
STRATEGIES = {
    "weighted": (Sampling(1.0), Sampling(1.05)),
    "cooler": (Sampling(0.6), Sampling(0.63)),
    "warmer": (Sampling(2.5), Sampling(2.3)),
    "topk": (Sampling(1.0, top_k=7), Sampling(1.0, top_k=8)),
    "nucleus": (Sampling(1.0, top_p=0.8), Sampling(1.0, top_p=0.84)),
    "composite": (Sampling(0.9, top_k=10, top_p=0.7), Sampling(0.9, top_p=0.7)),
    "composite, cut by top_k alone": (
        Sampling(1.3, top_k=3, top_p=0.99),
        Sampling(1.3, top_k=4, top_p=0.99),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_frequencies(name):
    sampling, near = STRATEGIES[name]
    counted = counts(LOGITS, sampling)
    assert counted.sum() == DRAWS
    assert chance(counted, exact(LOGITS, sampling)) > RARE
    assert chance(counted, exact(LOGITS, near)) < RARE


def test_composite_takes_the_share_of_what_top_k_left():
    """Shares 0.4, 0.3, 0.2, 0.1. Of the first two 0.5 is the first alone (4/7); of all four it
    would be both.
    """
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3, 1e-9], np.float32))
    assert (exact(logits, Sampling(1.0, top_k=2, top_p=0.5)) > 0).tolist() == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert (exact(logits, Sampling(1.0, top_p=0.5)) > 0).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert np.flatnonzero(counts(logits, Sampling(1.0, top_k=2, top_p=0.5))).tolist() == [1]
    counted = counts(logits, Sampling(1.0, top_k=3, top_p=0.5))  # 4/9 is not enough
    assert chance(counted, np.array([0, 4 / 7, 0, 3 / 7, 0])) > RARE


def test_tokens_that_tie_with_the_last_are_in():
    shares = np.array([0.2, 0.1, 0.2, 0.3, 0.2])
    logits = np.log(shares)
    for sampling in (
        Sampling(1.0, top_k=2),
        Sampling(1.0, top_p=0.4),
        Sampling(1.0, top_k=3, top_p=0.6),
    ):
        expected = np.where(shares >= 0.2, shares, 0) / 0.9
        np.testing.assert_allclose(exact(logits, sampling), expected)
        assert chance(counts(logits, sampling), expected) > RARE
    same = np.zeros(5)
    assert chance(counts(same, Sampling(1.0, top_k=1)), np.full(5, 0.2)) > RARE
    assert chance(counts(same, Sampling(1.0, top_p=0.1)), np.full(5, 0.2)) > RARE


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(1.0, top_k=1),
        Sampling(1.0, top_p=1e-6),
        Sampling(1e-6),
        Sampling(1e-30, top_k=3),
    ],
    ids=["greedy", "top_k=1", "top_p of nothing", "no temperature to speak of", "even less"],
)
def test_the_likeliest_alone(sampling):
    rows = np.random.default_rng(1).standard_normal((FEW, 40)).astype(np.float32)
    assert tokens(rows, [sampling] * FEW).tolist() == rows.argmax(-1).tolist()


def test_greedy_takes_the_first_of_equals():
    assert tokens(np.float32([1, 3, 2, 3]), [Sampling()]).tolist() == [1]


def test_limits_that_leave_all_in():
    free = tokens(LOGITS, [Sampling(1.0)] * FEW)
    for sampling in (
        Sampling(1.0, top_k=40),
        Sampling(1.0, top_k=1000),
        Sampling(1.0, top_k=1000, top_p=1.0),
    ):
        assert (tokens(LOGITS, [sampling] * FEW) == free).all()
    # Too rare to be seen in draws: the first has all of the probability as far as float32 can tell.
    logits = np.float32([[0, -30, -40, -50, -60]])
    assert least_kept(logits, Rows.of([Sampling(1.0)])).tolist() == [[-60]]
    assert least_kept(logits, Rows.of([Sampling(1.0, top_k=3)])).tolist() == [[-40]]
    assert least_kept(logits, Rows.of([Sampling(1.0, top_p=0.999)])).tolist() == [[0]]


def test_scores_of_any_size():
    generator = np.random.default_rng(2)
    tiny = 1e-30 * generator.standard_normal(40).astype(np.float32)
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=40), Sampling(1e30)):
        assert chance(counts(tiny, sampling), np.full(40, 1 / 40)) > RARE
    huge = np.full(40, -3e30, np.float32)
    huge[:4] = 1e30, 3e30, 0, 2e30
    for sampling in (
        Sampling(1.0),
        Sampling(1.0, top_k=2),
        Sampling(0.5, top_p=0.9),
        Sampling(7.0, 3, 0.5),
    ):
        assert set(tokens(huge, [sampling] * FEW).tolist()) == {1}
    # Far from 0, only differences count.
    shifted = np.array([1000.0, 1001.0, 999.0, 1002.0, 998.0])
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.85)):
        assert chance(counts(shifted, sampling), exact(shifted - 1000, sampling)) > RARE
        assert chance(counts(-shifted, sampling), exact(1000 - shifted, sampling)) > RARE


def test_tokens_that_are_ruled_out_never_come():
    logits = np.where(np.arange(40) % 3 == 0, LOGITS, -np.inf)
    assert np.isfinite(logits).sum() == 14
    for sampling in (
        Sampling(1.0),
        Sampling(1.0, top_k=5),
        Sampling(1.0, top_k=30),
        Sampling(1.0, top_p=0.9),
        Sampling(3.0, top_k=30, top_p=0.999),
    ):
        assert chance(counts(logits, sampling), exact(logits, sampling)) > RARE
    only = np.where(np.arange(40) == 17, LOGITS, -np.inf)
    for sampling in (
        Sampling(),
        Sampling(1.0),
        Sampling(2.0, top_k=9),
        Sampling(2.0, top_p=0.5),
        Sampling(2.0, 3, 0.5),
    ):
        assert set(tokens(only, [sampling] * FEW).tolist()) == {17}


MIXED = [Sampling(), *(sampling for pair in STRATEGIES.values() for sampling in pair)]


def test_a_row_does_not_depend_on_the_others():
    """Each row of a mixed batch against the row alone in the program of its own kind."""
    generator = np.random.default_rng(3)
    samplings = MIXED * 6
    rows = generator.standard_normal((len(samplings), 40)).astype(np.float32) * 2
    rows[::7, ::3] = -np.inf
    together = tokens(rows, samplings, seed=2)
    own = keys(len(samplings), 2)
    alone = [
        int(
            compiled(rows[place][None], own[place : place + 1], Rows.of([sampling]), sampling.kind)[
                0
            ]
        )
        for place, sampling in enumerate(samplings)
    ]
    assert together.tolist() == alone
    greedy = [place for place, sampling in enumerate(samplings) if sampling.temperature == 0]
    assert together[greedy].tolist() == rows[greedy].argmax(-1).tolist()


def test_the_kind_of_the_program_changes_no_token():
    for sampling, kinds in (
        (Sampling(), (Kind.GREEDY, Kind.WEIGHTED, Kind.TRUNCATED)),
        (Sampling(1.3), (Kind.WEIGHTED, Kind.TRUNCATED)),
    ):
        found = [tokens(LOGITS, [sampling] * FEW, kind=kind).tolist() for kind in kinds]
        assert all(each == found[0] for each in found)


def test_the_key_decides():
    sampling = [Sampling(1.0)] * FEW
    one, same, other = (tokens(LOGITS, sampling, seed=seed) for seed in (1, 1, 2))
    assert (one == same).all()
    assert (one != other).any()


def test_scores_in_bfloat16():
    """The same draws as from the same numbers in float32: nothing is computed in bfloat16."""
    low = jnp.asarray(LOGITS, jnp.bfloat16)
    for sampling in (Sampling(), Sampling(0.7), Sampling(0.7, top_k=9, top_p=0.8)):
        samplings = [sampling] * FEW
        assert (tokens(low, samplings) == tokens(low.astype(jnp.float32), samplings)).all()


def test_kinds():
    assert kind_of([]) == kind_of([Sampling()]) == Kind.GREEDY
    assert kind_of([Sampling(), Sampling(0.5)]) == Kind.WEIGHTED
    for truncated in (Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.5), Sampling(1.0, 3, 0.5)):
        assert kind_of([truncated, Sampling(1.0), Sampling()]) == Kind.TRUNCATED


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("greedy", Sampling()),
        ("greedy temperature=0.5 top_k=3 nucleus_p=0.5", Sampling()),
        ("weighted", Sampling(1.0)),
        ("weighted temperature=0.5 top_k=3 nucleus_p=0.5", Sampling(0.5)),
        ("topk top_k=3 nucleus_p=0.5", Sampling(1.0, top_k=3)),
        ("nucleus top_k=3 nucleus_p=0.5 temperature=2", Sampling(2.0, top_p=0.5)),
        ("nucleus nucleus_p=1", Sampling(1.0)),
        ("composite top_k=3 nucleus_p=0.5 temperature=0.7", Sampling(0.7, 3, 0.5)),
    ],
)
def test_from_the_configuration(words, expected):
    strategy, *rest = words.split()
    words = [f"decode_sampling_strategy={strategy}", *(f"decode_sampling_{word}" for word in rest)]
    assert Sampling.of(load(None, words, environ={}, devices=Devices(1))) == expected


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=float("inf")), "temperature=inf"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(temperature=1.0, top_k=-1), "top_k=-1"),
        (dict(temperature=1.0, top_p=0.0), "top_p=0.0"),
        (dict(temperature=1.0, top_p=1.1), "top_p=1.1"),
        (dict(temperature=1.0, top_p=float("nan")), "top_p=nan"),
        (dict(top_k=3), "temperature=0 draws nothing"),
        (dict(top_p=0.5), "temperature=0 draws nothing"),
    ],
)
def test_what_is_refused(wishes, message):
    with pytest.raises(UserError, match=message):
        Sampling(**wishes)


@pytest.mark.parametrize(
    "wishes",
    [
        {"temperature": 10**400},
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": 1.5},
        {"top_p": None},
    ],
)
def test_values_that_no_array_can_hold_are_refused(wishes):
    with pytest.raises(UserError, match=next(iter(wishes))):
        Sampling(**({"temperature": 1.0} | wishes))


def test_a_tiny_top_p_leaves_the_likeliest_token():
    """1e-60 is 0 in float32, which would leave none."""
    rows = Rows.of([Sampling(1.0, 0, 1e-60)])
    logits = jnp.asarray([[0.0, 1.0, 3.0, 2.0]])
    assert draw(logits, jax.random.split(jax.random.key(0), 1), rows, Kind.TRUNCATED).tolist() == [
        2
    ]
