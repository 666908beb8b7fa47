"""Caches of integers: how far they are off, how little they take, and that a sequence's tokens do
not depend on how it was cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.inference.sampling import Sampling
from maxtext.inference.scheduler import Request
from maxtext.inference.serving import make_scheduler
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.cache import CacheSize, extended, kept
from maxtext.layers.inputs import LayerInputs
from maxtext.models.transformer import initial_weights
from tests.inference.test_scheduler import LENGTH, compiled, drawn_weights

pytestmark = pytest.mark.usefixtures("quick_programs")

LARGEST = {"int8": 127, "int4": 7}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_what_is_read_is_what_was_written_to_half_a_step(dtype, by_head, window):
    """A step is the largest magnitude of a token, or of a head of it, over the largest integer."""
    size = CacheSize(2, 8, jnp.float32, quantized=jnp.dtype(dtype), scale_by_head=by_head)
    cache = kept(AttentionMask(window=window), size, key=(3, 4))
    random = np.random.default_rng(0)
    tokens = (random.normal(size=(2, 8, 3, 4)) * np.exp(random.normal(size=(2, 8, 3, 1)))).astype(
        np.float32
    )
    table = jnp.array([[0], [1]])
    # All but the last at once, as a prompt is; the last by itself.
    first = LayerInputs(
        jnp.broadcast_to(jnp.arange(7), (2, 7)), cache=cache, fresh=True, table=table
    )
    at_once, cache = extended(first, {"key": jnp.asarray(tokens[:, :7])})
    last = LayerInputs(jnp.full((2, 1), 7), cache=cache, table=table, aligned=True)
    seen, _ = extended(last, {"key": jnp.asarray(tokens[:, 7:])})
    steps = np.abs(tokens).max(axis=-1 if by_head else (-1, -2), keepdims=True) / LARGEST[dtype]
    for row in range(2):
        for place, position in enumerate(np.asarray(seen["position"])[row]):
            off = np.abs(np.asarray(seen["key"])[row, place] - tokens[row, position])
            assert (off <= steps[row, position] * 0.5001 + 1e-7).all()
            if position < 7:
                np.testing.assert_array_equal(
                    seen["key"][row, place], at_once["key"][row, position]
                )
    assert np.abs(np.asarray(at_once["key"]) - tokens[:, :7]).max() > 0


@pytest.mark.parametrize(
    ("dtype", "by_head", "limit"),
    [
        ("int8", True, "window"),
        ("int8", False, "chunk"),
        pytest.param("int4", False, "window", marks=pytest.mark.slow),
    ],
)
def test_windows_of_integers_in_random_pieces(dtype, by_head, limit):
    """Whatever the pieces, a query sees its window, each token quantized once; and attention over
    that is as near to attention over floats as the step sizes allow.

    With logits q·k, keys that are off by half a step move a logit by at most e = |q|₁ step / 2 and
    a softmax weight by a factor of at most exp(2e); values are off by half a step.
    """
    random = np.random.default_rng(1)
    length, rows, heads, dim = 24, 2, 3, 4
    mask = AttentionMask(window=5) if limit == "window" else AttentionMask(chunk=5)
    size = CacheSize(rows, length, jnp.float32, quantized=jnp.dtype(dtype), scale_by_head=by_head)
    cache = kept(mask, size, key=(heads, dim), value=(heads, dim))
    for _ in range(2):  # in the same slots, one after the other
        k, v, q = (
            random.normal(size=(rows, length, heads, dim)).astype(np.float32) for _ in range(3)
        )
        axes = -1 if by_head else (-1, -2)
        k_steps, v_steps = (
            np.abs(x).max(axis=axes, keepdims=True) / LARGEST[dtype] for x in (k, v)
        )
        k_int, v_int = (np.round(x / s) * s for x, s in ((k, k_steps), (v, v_steps)))
        lengths, start = random.integers(8, length + 1, rows), 0
        while start < length:
            count = int(random.choice([1, 1, 7]))
            positions = np.broadcast_to(np.arange(start, start + count), (rows, count))
            shown = np.where(positions < lengths[:, None], positions, -1)
            at_once = np.minimum(positions[0], length - 1)
            inputs = LayerInputs(jnp.asarray(shown), cache=cache, fresh=start == 0)
            new = {"key": jnp.asarray(k[:, at_once]), "value": jnp.asarray(v[:, at_once])}
            seen, cache = extended(inputs, new)
            seen = {name: np.asarray(x) for name, x in seen.items()}
            for row, column in np.argwhere(shown >= 0):
                position = shown[row, column]
                first = position - position % 5 if limit == "chunk" else max(0, position - 4)
                param_infos = np.flatnonzero(
                    (seen["position"][row] >= first) & (seen["position"][row] <= position)
                )
                at = seen["position"][row][param_infos]
                assert sorted(at) == list(range(first, position + 1))
                keys, values = seen["key"][row, param_infos], seen["value"][row, param_infos]
                np.testing.assert_allclose(keys, k_int[row, at], atol=1e-6)
                np.testing.assert_allclose(values, v_int[row, at], atol=1e-6)
                query = q[row, position]
                moved = 0.5 * np.abs(query).sum(-1) * k_steps[row, at].max()
                bound = (
                    np.abs(v[row, at]).max() * np.expm1(2 * moved) + 0.5 * v_steps[row, at].max()
                )
                off = attended(query, keys, values) - attended(query, k[row, at], v[row, at])
                assert (np.abs(off).max(-1) <= bound + 1e-6).all()
            start += count


def attended(q, k, v):
    """q [H, D], k and v [T, H, D] -> [H, D]."""
    weights = np.exp(np.einsum("hd,thd->ht", q, k))
    return np.einsum("ht,thd->hd", weights / weights.sum(-1, keepdims=True), v)


def scheduler_of(kind, slots, *words):
    return make_scheduler(compiled(kind, *words), drawn_weights(kind), slots, LENGTH)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("kind", ["latent", "sinks, windows and experts"])
def test_a_sequence_may_be_cut_anywhere(kind):
    """The same tokens whole and in pieces, with its pages in any order and known beginnings."""
    words = ["quantize_kvcache=true", "kv_quant_axis=dkv"]
    requests = [
        Request(tuple(range(3, 30)), 12),
        Request(tuple(range(3, 20)), 12, Sampling(1.5), 4),
    ]
    alone = scheduler_of(kind, 1, *words)
    expected = [alone.run([request])[0] for request in requests]
    pieces = ["use_chunked_prefill=true", "prefill_chunk_size=6", "enable_prefix_caching=true",
              "pagedattn_tokens_per_page=4"]  # fmt: skip
    scheduler = scheduler_of(kind, 2, *words, *pieces)
    for _ in range(2):
        assert scheduler.run(requests) == expected
    assert scheduler.pages.hits > 0


def test_bytes_are_as_computed():
    """A token of the small model has 2 layers x (key and value) x 2 heads x 8 numbers, and scales
    of 4 bytes.
    """
    numbers = 2 * 2 * 2 * 8
    for words, each in (
        ([], numbers * 4),
        (["quantize_kvcache=true"], numbers + 2 * 2 * 4),
        (["quantize_kvcache=true", "kv_quant_axis=dkv"], numbers + 2 * 2 * 2 * 4),
    ):
        engine = scheduler_of("causal", 3, *words).engine
        assert (
            sum(array.nbytes for array in jax.tree.leaves(engine.state.caches)) == 3 * LENGTH * each
        )
        assert engine.page_bytes == LENGTH * each


@pytest.mark.slow
def test_scores_are_near_those_of_a_full_cache():
    """Log-probabilities of the same tokens; finer integers and finer scales are nearer."""
    weights = jax.jit(lambda: initial_weights(compiled("causal").config))()

    def written(*words):
        """Tokens, and their log-probabilities."""
        scheduler = make_scheduler(compiled("causal", *words), weights, 1, LENGTH)
        scheduler.add(0, Request((5, 6, 7, 8, 9, 10, 11, 12), 24, log_probs=True))
        news = [each for _ in range(99) if scheduler.busy for each in scheduler.step()]
        return [token for each in news for token in each.tokens], [
            value for each in news for value in each.log_probs
        ]

    tokens, full = written()
    off = {}
    for dtype in ("int8", "int4"):
        theirs, found = written(
            "quantize_kvcache=true", f"kv_quant_dtype={dtype}", "kv_quant_axis=dkv"
        )
        same = [one == other for one, other in zip(tokens, theirs, strict=True)]
        count = same.index(False) if False in same else len(same)
        off[dtype] = np.abs(np.subtract(found, full)[: max(count, 1)]).max()
    assert 0 < off["int8"] < 0.05
    assert off["int8"] < off["int4"]
