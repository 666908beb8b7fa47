"""QK-clip: what the logits of a latent attention are after it, computed by the layer that reports
them.

Shapes: B batch, S sequence, E embedding, H heads, L layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common import hash_rng
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import MlaSpec, NormSpec, RopeSpec
from maxtext.optimizers import clip_mla

BATCH, LENGTH, SIZE, HEADS, NOPE, ROPE, VALUE = 2, 9, 16, 4, 6, 4, 5


def template(query_rank):
    spec = MlaSpec(
        HEADS,
        8,
        NOPE,
        ROPE,
        VALUE,
        0.4,
        RopeSpec(interleave=True),
        NormSpec(),
        AttentionMask(),
        query_rank=query_rank,
        report_max_logits=True,
    )
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), SIZE, "float32")
    )


def random_weights(query_rank, seed=0):
    normal = np.random.default_rng(seed).normal
    return jax.tree.map(
        lambda leaf: jnp.asarray(normal(size=leaf.shape), jnp.float32), template(query_rank).weights
    )


def logits_of(query_rank, weights):
    x = np.random.default_rng(7).normal(size=(BATCH, LENGTH, SIZE)).astype(np.float32)
    places = LayerInputs(jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH)))
    model = template(query_rank)
    return jax.jit(lambda tree: model.bind(tree)(x, places)[1]["max_logits"])(weights)


@pytest.mark.parametrize("query_rank", [0, 10])
def test_largest_logits_equal_the_threshold(query_rank):
    weights = random_weights(query_rank)
    before = np.asarray(logits_of(query_rank, weights))
    threshold = float(np.sort(before)[1:3].mean())  # two heads above, two below
    clipped = clip_mla(weights, jnp.asarray(before), threshold, NOPE)
    after = np.asarray(logits_of(query_rank, clipped))
    above = before > threshold
    assert above.sum() == 2
    np.testing.assert_allclose(after[above], threshold, rtol=1e-5)
    np.testing.assert_array_equal(after[~above], before[~above])
    # Queries and keys by √s each; queries alone by s where keys are shared; nothing else.
    query = "query_b" if query_rank else "query"
    scale = np.minimum(1, threshold / before)[:, None]
    ratio = {
        name: np.asarray(clipped[name]["weight"] / weights[name]["weight"])
        for name in (query, "kv_b")
    }
    for name, part, expected in (
        (query, slice(None, NOPE), np.sqrt(scale)),
        (query, slice(NOPE, None), scale),
        ("kv_b", slice(None, NOPE), np.sqrt(scale)),
        ("kv_b", slice(NOPE, None), np.ones_like(scale)),
    ):
        actual = ratio[name][..., part]
        np.testing.assert_allclose(actual, np.broadcast_to(expected, actual.shape), rtol=1e-5)
    for name in set(weights) - {query, "kv_b"}:
        jax.tree.map(np.testing.assert_array_equal, clipped[name], weights[name])


@pytest.mark.parametrize("axis", [0, 1, 3])
def test_stacked_layers_are_clipped_independently(axis):
    layers = [random_weights(10, seed) for seed in (0, 1, 2)]
    largest = jnp.asarray(
        [[5.0, 50.0, 200.0, -3.0], [1.0, 2.0, 3.0, 4.0], [400.0, 100.0, 101.0, -jnp.inf]]
    )
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves, axis=min(axis, leaves[0].ndim)), *layers
    )
    clipped = clip_mla(stacked, largest, 100.0, NOPE, layers_axis=axis)
    separate = [clip_mla(tree, row, 100.0, NOPE) for tree, row in zip(layers, largest, strict=True)]
    expected = jax.tree.map(
        lambda *leaves: jnp.stack(leaves, axis=min(axis, leaves[0].ndim)), *separate
    )
    jax.tree.map(np.testing.assert_array_equal, clipped, expected)
    # Below the threshold nothing changes, also if the largest logit is negative or -inf.
    jax.tree.map(np.testing.assert_array_equal, separate[1], layers[1])
    for before, after in zip(layers, separate, strict=True):
        for name in ("query_b", "kv_b"):
            np.testing.assert_array_equal(before[name]["weight"][:, 3], after[name]["weight"][:, 3])


def test_keeps_the_dtype_of_weights():
    weights = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_weights(10))
    clipped = clip_mla(weights, jnp.full(HEADS, 200.0), 100.0, NOPE)
    assert {leaf.dtype for leaf in jax.tree.leaves(clipped)} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("logit", [np.inf, -np.inf, np.nan])
def test_nonfinite_logits_do_not_scale_their_head(logit):
    """By their ratio the weights would become 0 or NaN."""
    weights = {"query_b": {"weight": jnp.ones((2, 3, 3))}, "kv_b": {"weight": jnp.ones((2, 3, 4))}}
    after = clip_mla(weights, jnp.array([logit, 5.0, 400.0]), 100.0, 2)
    for name in weights:
        np.testing.assert_array_equal(after[name]["weight"][:, :2], weights[name]["weight"][:, :2])
    np.testing.assert_allclose(after["query_b"]["weight"][:, 2], [[0.5, 0.5, 0.25]] * 2)
