"""Attention to selected keys, its largest logits and mean weights against float64 numpy; maps over
blocks of queries.

Shapes: B batch, S query length, T key length, H query heads, K key/value heads, D head dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.attention import (
    AttentionInputs,
    AttentionMask,
    attend,
    map_queries,
    max_logits,
    mean_weights,
)
from maxtext.kernels.attention.topk import topk_mask

SCALE = 0.3
SEGMENTS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [3] * 2 + [1] * 6 + [2] * 4], np.int32)


def problem(length=12, q_heads=4, k_heads=2, batch=2, seed=0):
    draw = np.random.default_rng(seed).normal
    sizes = ((q_heads, 8), (k_heads, 8), (k_heads, 6))
    return [draw(size=(batch, length, heads, size)) for heads, size in sizes]


def selection(heads, length=12, batch=2, seed=1):
    """Half of the keys; some queries see none."""
    chosen = np.random.default_rng(seed).random((batch, heads, length, length)) < 0.5
    chosen[0, :, 3] = False  # padding at all
    chosen[1, -1, 7, :8] = False  # only the future, in the last head
    return chosen


def visible(length, window=None, segments=None, selected=None):
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    mask = (j <= i)[None, None]
    if window:
        mask = mask & (j > i - window)
    if segments is not None:
        mask = (
            mask
            & ((segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] != 0))[
                :, None
            ]
        )
    return mask if selected is None else mask & selected


def reference(q, k, mask, soft_cap=None):
    """(logits, weights) [B, H, S, T]; weights are 0 for fully masked queries."""
    mask = np.broadcast_to(mask, (len(q), q.shape[2], q.shape[1], k.shape[1]))
    logits = SCALE * np.einsum("bshd,bthd->bhst", q, np.repeat(k, q.shape[2] // k.shape[2], axis=2))
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    exponentials = np.exp(logits) * mask
    total = exponentials.sum(-1, keepdims=True)
    return np.where(mask, logits, -np.inf), exponentials / np.where(total == 0, 1, total)


@pytest.mark.parametrize(
    ("k_heads", "by_head", "window", "segments"),
    [
        (4, False, None, None),
        (4, True, None, SEGMENTS),
        (2, False, None, SEGMENTS),
        (2, True, 3, SEGMENTS),
        (1, True, None, None),
    ],
    ids=[
        "shared",
        "by head, packed",
        "grouped shared packed",
        "grouped by head, packed window",
        "one key head",
    ],
)
def test_selected_keys(k_heads, by_head, window, segments):
    q, k, v = problem(k_heads=k_heads)
    selected = selection(4 if by_head else 1)
    mask = visible(12, window, segments, selected)
    expected = np.einsum(
        "bhst,bthv->bshv", reference(q, k, mask)[1], np.repeat(v, 4 // k_heads, axis=2)
    )
    assert not expected[0, 3].any()
    assert expected[0, 4].all()

    def attend_selected(q, k, v):
        return attend(
            q,
            k,
            v,
            backend="dot_product",
            mask=AttentionMask(window=window),
            scale=SCALE,
            q_segments=None if segments is None else jnp.asarray(segments),
            selected=jnp.asarray(selected),
        )

    @jax.jit
    def run(*arrays):
        output, vjp = jax.vjp(attend_selected, *arrays)
        return output, vjp(jnp.ones_like(output))

    output, gradients = run(*(jnp.asarray(array, jnp.float32) for array in (q, k, v)))
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert all(np.isfinite(gradient).all() for gradient in gradients)
    fully_masked = ~np.broadcast_to(mask, (2, 4, 12, 12)).any(-1).swapaxes(1, 2)  # [B, S, H]
    assert fully_masked[0, 3].all()
    assert not np.asarray(gradients[0])[fully_masked].any()
    assert not np.asarray(output)[fully_masked].any()


def test_selection_alone_masks_keys():
    """Not causal, no segments: a query sees exactly the selected keys."""
    q, k, v = (jnp.asarray(array, jnp.float32) for array in problem())
    selected = np.eye(12, dtype=bool)[None, None].repeat(2, 0)
    output = attend(
        q,
        k,
        v,
        backend="autoselected",
        mask=AttentionMask(causal=False),
        scale=SCALE,
        selected=jnp.asarray(selected),
    )
    np.testing.assert_allclose(output, jnp.repeat(v, 2, axis=2), atol=1e-6)  # each sees itself


@pytest.mark.parametrize(
    ("length", "by_head", "packed"),
    # 300 queries are two blocks of 128 and a rest of 44.
    [(12, True, True), (300, None, False), (300, False, True), (300, True, False)],
)
def test_max_logits_and_mean_weights_match_numpy(length, by_head, packed):
    q, k, v = problem(length)
    segments = np.repeat(SEGMENTS, length // 12, axis=1) if packed else None
    selected = None if by_head is None else selection(4 if by_head else 1, length)
    logits, weights = reference(q, k, visible(length, 5, segments, selected), soft_cap=2.0)
    options = dict(
        q_segments=None if segments is None else jnp.asarray(segments),
        selected=None if selected is None else jnp.asarray(selected),
        soft_cap=2.0,
    )

    @jax.jit
    def run(*arrays):
        inputs = AttentionInputs(*arrays, AttentionMask(window=5), SCALE, **options)
        return max_logits(inputs), mean_weights(inputs)

    actual_logits, actual_weights = run(*(jnp.asarray(array, jnp.float32) for array in (q, k, v)))
    np.testing.assert_allclose(actual_logits, logits.max((0, 2, 3)), rtol=1e-5)
    np.testing.assert_allclose(actual_weights, weights.mean(1), atol=1e-6)


def test_statistics_use_positions_and_have_no_gradient():
    q, k, v = (jnp.asarray(array, jnp.float32) for array in problem())
    reversed_positions = jnp.broadcast_to(jnp.arange(11, -1, -1), (2, 12))

    def largest(q, k):
        return max_logits(
            AttentionInputs(
                q,
                k,
                v,
                AttentionMask(),
                SCALE,
                q_positions=reversed_positions,
                k_positions=reversed_positions,
            )
        )

    logits, _ = reference(np.asarray(q), np.asarray(k), np.triu(np.ones((12, 12), bool)))
    np.testing.assert_allclose(largest(q, k), logits.max((0, 2, 3)), rtol=1e-5)
    assert not any(
        array.any() for array in jax.grad(lambda q, k: largest(q, k).sum(), argnums=(0, 1))(q, k)
    )


def test_max_logit_of_fully_masked_rows_is_minus_infinity():
    q, k, v = (jnp.asarray(array, jnp.float32) for array in problem())
    padding = AttentionInputs(
        q, k, v, AttentionMask(), SCALE, q_segments=jnp.zeros((2, 12), jnp.int32)
    )
    assert (np.asarray(max_logits(padding)) == -np.inf).all()
    assert not mean_weights(padding).any()


def test_topk_mask_has_exactly_k_keys_and_the_first_of_equals():
    scores = jnp.array(
        [
            [3.0, 1.0, 3.0, 3.0, 0.0],
            [-jnp.inf, 2.0, -jnp.inf, -jnp.inf, 5.0],
            [1.0, 1.0, 1.0, 1.0, 1.0],
        ]
    )
    expected = {
        1: ["10000", "00001", "10000"],
        2: ["10100", "01001", "11000"],
        3: ["10110", "11001", "11100"],
    }
    for count, rows in expected.items():
        assert [
            "".join(map(str, row)) for row in topk_mask(scores, count).astype(int).tolist()
        ] == rows
    assert topk_mask(scores, 5).all()


@pytest.mark.parametrize("length", [3, 4, 8, 11])
def test_map_queries_concatenates_blocks_in_order(length):
    queries = jnp.arange(2 * length, dtype=jnp.float32).reshape(2, length)
    factor = jnp.float32(3)
    sizes = []

    def function(arrays):
        sizes.append(arrays[0].shape[1])
        return (arrays[0] * factor)[..., None] + arrays[1]

    offsets = jnp.ones((2, length, 5))
    result = map_queries(function, (queries, offsets), block=4)
    np.testing.assert_array_equal(
        result, np.broadcast_to(3 * queries[..., None] + 1, (2, length, 5))
    )
    assert set(sizes) == {3: {3}, 4: {4}, 8: {4}, 11: {4, 3}}[length]
