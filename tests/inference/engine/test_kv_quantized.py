"""Quantized KV caches: their error, their size, and that tokens do not depend on how a sequence was
split into chunks.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.inference.engine.engine import InferenceEngine
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.cache import CacheConfig, empty_kv_cache
from maxtext.layers.inputs import LayerInputs
from maxtext.models.transformer import initial_weights
from tests.support.random_requests import LENGTH, compiled, new_request, random_weights

LARGEST = {"int8": 127, "int4": 7}
FP8 = jnp.float8_e4m3fn


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rounding_error_is_at_most_half_a_step(dtype, by_head, window):
    """A step is the largest magnitude of a token, or of a head of it, over the largest integer."""
    cache_config = CacheConfig(2, 8, jnp.float32, quantized=jnp.dtype(dtype), scale_by_head=by_head)
    cache = empty_kv_cache(AttentionMask(window=window), cache_config, {"key": (3, 4)})
    random = np.random.default_rng(0)
    tokens = (random.normal(size=(2, 8, 3, 4)) * np.exp(random.normal(size=(2, 8, 3, 1)))).astype(
        np.float32
    )
    table = jnp.array([[0], [1]])
    # All but the last at once, as a prompt is; the last by itself.
    first = LayerInputs(
        jnp.broadcast_to(jnp.arange(7), (2, 7)), cache=cache, is_first_chunk=True, block_table=table
    )
    at_once, cache = cache.update({"key": jnp.asarray(tokens[:, :7])}, first)
    last = LayerInputs(jnp.full((2, 1), 7), cache=cache, block_table=table, contiguous=True)
    seen, _ = cache.update({"key": jnp.asarray(tokens[:, 7:])}, last)
    steps = np.abs(tokens).max(axis=-1 if by_head else (-1, -2), keepdims=True) / LARGEST[dtype]
    for row in range(2):
        for column, position in enumerate(np.asarray(seen.positions)[row]):
            error = np.abs(np.asarray(seen["key"])[row, column] - tokens[row, position])
            assert (error <= steps[row, position] * 0.5001 + 1e-7).all()
            if position < 7:
                np.testing.assert_array_equal(
                    seen["key"][row, column], at_once["key"][row, position]
                )
    assert np.abs(np.asarray(at_once["key"]) - tokens[:, :7]).max() > 0


@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("by_head", [True, False])
def test_fp8_has_a_relative_error_of_a_sixteenth(by_head, magnitude):
    """Three bits after the leading one, whatever the magnitude of the token is; values below
    2^-15 of its largest have half of the least code above zero."""
    cache_config = CacheConfig(2, 8, jnp.float32, quantized=FP8, scale_by_head=by_head)
    cache = empty_kv_cache(AttentionMask(), cache_config, {"key": (3, 4)})
    random = np.random.default_rng(0)
    tokens = (magnitude * random.normal(size=(2, 8, 3, 4)) ** 3).astype(np.float32)
    tokens[0, 0] = 0
    inputs = LayerInputs(
        jnp.broadcast_to(jnp.arange(8), (2, 8)),
        cache=cache,
        is_first_chunk=True,
        block_table=jnp.array([[0], [1]]),
    )
    view, cache = cache.update({"key": jnp.asarray(tokens)}, inputs)
    assert cache.blocks["key"].dtype == FP8
    assert cache.blocks["key_scale"].shape == ((2, 8, 3) if by_head else (2, 8))
    error = np.abs(np.asarray(view["key"]) - tokens)
    amax = np.abs(tokens).max(axis=-1 if by_head else (-1, -2), keepdims=True)
    assert (error <= np.maximum(np.abs(tokens) / 16, amax / 224 * 2**-10)).all()
    assert (error > 0).any()


@pytest.mark.parametrize(
    ("dtype", "by_head", "limit"),
    [
        ("int8", True, "window"),
        ("int8", False, "chunk"),
        pytest.param("int4", False, "window", marks=pytest.mark.slow),
    ],
)
def test_quantized_windows_in_random_chunks(dtype, by_head, limit):
    """Whatever the chunks, a query sees its window, with every token quantized once, and attention
    over that is as close to attention over floats as the step sizes allow.

    With logits q·k, an error of half a step in keys changes a logit by at most e = |q|₁ step / 2
    and a softmax weight by a factor of at most exp(2e); values have an error of half a step.
    """
    random = np.random.default_rng(1)
    length, rows, heads, dim = 24, 2, 3, 4
    mask = AttentionMask(window=5) if limit == "window" else AttentionMask(chunk=5)
    cache_config = CacheConfig(
        rows, length, jnp.float32, quantized=jnp.dtype(dtype), scale_by_head=by_head
    )
    shapes = {"key": (heads, dim), "value": (heads, dim)}
    cache = empty_kv_cache(mask, cache_config, shapes)
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
            inputs = LayerInputs(jnp.asarray(shown), cache=cache, is_first_chunk=start == 0)
            new = {"key": jnp.asarray(k[:, at_once]), "value": jnp.asarray(v[:, at_once])}
            view, cache = cache.update(new, inputs)
            seen = {name: np.asarray(x) for name, x in view.arrays.items()}
            view_positions = shown if view.positions is None else np.asarray(view.positions)
            for row, column in np.argwhere(shown >= 0):
                position = shown[row, column]
                first = position - position % 5 if limit == "chunk" else max(0, position - 4)
                columns = np.flatnonzero(
                    (view_positions[row] >= first) & (view_positions[row] <= position)
                )
                at = view_positions[row][columns]
                assert sorted(at) == list(range(first, position + 1))
                keys, values = seen["key"][row, columns], seen["value"][row, columns]
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


def engine_of(kind, slots, *overrides):
    return InferenceEngine(compiled(kind, *overrides), random_weights(kind), slots, LENGTH)


@pytest.mark.slow
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("kind", ["latent", "sinks, windows and experts"])
def test_tokens_do_not_depend_on_chunks_and_blocks(kind):
    """The same tokens in one chunk and in several, with blocks in any order and cached prefixes."""
    overrides = ["quantize_kvcache=true", "kv_quant_axis=dkv"]
    requests = [
        new_request(range(3, 30), 12),
        new_request(range(3, 20), 12, 1.5, seed=4),
    ]
    single = engine_of(kind, 1, *overrides)
    expected = [single.generate([request])[0] for request in requests]
    chunked = [
        "use_chunked_prefill=true",
        "prefill_chunk_size=6",
        "enable_prefix_caching=true",
        "pagedattn_tokens_per_page=4",
    ]
    engine = engine_of(kind, 2, *overrides, *chunked)
    for _ in range(2):
        assert engine.generate(requests) == expected
    assert engine.prefix_cache.hits > 0


def test_cache_bytes():
    """A token of the small model has 2 layers x (key and value) x 2 heads x 8 values, and scales
    of 4 bytes.
    """
    num_values = 2 * 2 * 2 * 8
    for overrides, token_bytes in (
        ([], num_values * 4),
        (["quantize_kvcache=true"], num_values + 2 * 2 * 4),
        (["quantize_kvcache=true", "kv_quant_axis=dkv"], num_values + 2 * 2 * 2 * 4),
        (["quantize_kvcache=true", "kv_quant_dtype=fp8"], num_values + 2 * 2 * 4),
    ):
        executor = engine_of("causal", 3, *overrides).executor
        caches = jax.tree.leaves(executor.state.caches)
        assert sum(array.nbytes for array in caches) == 3 * LENGTH * token_bytes
        assert executor.block_bytes == LENGTH * token_bytes


@pytest.mark.slow
def test_log_probabilities_are_close_to_those_of_a_float_cache():
    """Of the same tokens; more bits and finer scales are closer."""
    weights = jax.jit(lambda: initial_weights(compiled("causal").config))()

    def generate(*overrides):
        """Tokens, and their log-probabilities."""
        engine = InferenceEngine(compiled("causal", *overrides), weights, 1, LENGTH)
        engine.add_request(0, new_request((5, 6, 7, 8, 9, 10, 11, 12), 24, logprobs=0))
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        tokens = [token for output in outputs for token in output.sampled_tokens]
        return tokens, [each.logprob for output in outputs for each in output.logprobs]

    tokens, log_probs = generate()
    errors = {}
    for dtype in ("int8", "fp8", "int4"):
        quantized_tokens, quantized_log_probs = generate(
            "quantize_kvcache=true", f"kv_quant_dtype={dtype}", "kv_quant_axis=dkv"
        )
        same = [a == b for a, b in zip(tokens, quantized_tokens, strict=True)]
        count = same.index(False) if False in same else len(same)
        difference = np.subtract(quantized_log_probs, log_probs)[: max(count, 1)]
        errors[dtype] = np.abs(difference).max()
    assert 0 < errors["int8"] < 0.05
    assert errors["int8"] < errors["int4"]
    assert 0 < errors["fp8"] < errors["int4"]
