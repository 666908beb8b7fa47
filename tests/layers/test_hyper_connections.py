"""Hyper-connections against DeepSeek-V4's module in transformers, and against the paper's formulas
in numpy.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from maxtext.common import hash_rng
from maxtext.layers.hyper_connections import collapse, expand, sinkhorn
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import HyperConnectionSpec, NormSpec

BATCH, LENGTH, EMBED_DIM, EPSILON = 2, 3, 6, 1e-2  # the norm's epsilon is large, so that it matters


def spec(streams=4, iterations=20, **norm):
    return HyperConnectionSpec(streams, iterations, NormSpec(epsilon=EPSILON, **norm))


def template(spec, dtype="float32"):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, dtype)
    )


def initial(spec):
    return spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, "float32")


def weights(streams, scaled=False):
    draw = np.random.default_rng(0).normal
    outputs = streams * (streams + 2)
    shapes = {"weight": (streams, EMBED_DIM, outputs), "bias": (outputs,), "alpha": (3,)}
    if scaled:
        shapes["scale"] = (streams, EMBED_DIM)
    return {name: draw(size=shape).astype(np.float32) for name, shape in shapes.items()}


def values(streams, seed=1):
    draw = np.random.default_rng(seed).normal
    return (
        draw(size=(BATCH, LENGTH, streams, EMBED_DIM)).astype(np.float32),
        draw(size=(BATCH, LENGTH, EMBED_DIM)).astype(np.float32),
    )


def sublayer(x):
    return np.tanh(x) * 2 + 1


@jax.jit
def apply(module, streams):
    x, state = module.read(streams)
    return module.write(streams, state, jnp.tanh(x) * 2 + 1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def numpy_sinkhorn(logits, iterations):
    """One matrix, entry by entry: a softmax, then columns and rows alternately."""
    k = len(logits)
    matrix = np.exp(logits - logits.max(axis=1, keepdims=True))
    for i in range(k):
        matrix[i] = matrix[i] / sum(matrix[i]) + 1e-6
    for step in range(iterations):
        if step:
            for i in range(k):
                matrix[i, :] /= sum(matrix[i, :])
        for j in range(k):
            matrix[:, j] /= sum(matrix[:, j])
    return matrix


def numpy_connection(weights, streams, k, iterations, offset=0.0):
    """The paper's equations, token by token, in float64."""
    out = np.zeros(streams.shape)
    weights = {name: value.astype(np.float64) for name, value in weights.items()}
    kernel = weights["weight"].reshape(k * EMBED_DIM, -1)
    for index in np.ndindex(BATCH, LENGTH):
        token = streams[index].astype(np.float64)
        flat = token.reshape(k * EMBED_DIM)
        normed = flat / np.sqrt(np.mean(flat**2) + EPSILON)
        if "scale" in weights:
            normed = normed * (weights["scale"].reshape(-1) + offset)
        logits = normed @ kernel
        bias, alpha = weights["bias"], weights["alpha"]
        pre = sigmoid(alpha[0] * logits[:k] + bias[:k]) + 1e-6
        post = 2 * sigmoid(alpha[1] * logits[k : 2 * k] + bias[k : 2 * k])
        mix = numpy_sinkhorn((alpha[2] * logits[2 * k :] + bias[2 * k :]).reshape(k, k), iterations)
        y = sublayer(sum(pre[i] * token[i] for i in range(k)))
        for j in range(k):
            out[index][j] = sum(mix[i, j] * token[i] for i in range(k)) + post[j] * y
    return out


@pytest.mark.parametrize(("streams", "iterations"), [(4, 20), (2, 1), (3, 2)])
def test_output_and_gradients_match_transformers(streams, iterations):
    config = SimpleNamespace(
        hc_mult=streams,
        hc_sinkhorn_iters=iterations,
        hc_eps=1e-6,
        rms_norm_eps=EPSILON,
        hidden_size=EMBED_DIM,
    )
    module = DeepseekV4HyperConnection(config)
    given = weights(streams)
    with torch.no_grad():
        module.fn.copy_(torch.tensor(given["weight"].reshape(streams * EMBED_DIM, -1).T))
        module.base.copy_(torch.tensor(given["bias"]))
        module.scale.copy_(torch.tensor(given["alpha"]))
    x, _ = values(streams)
    dy, _ = values(streams, seed=2)
    leaf = torch.tensor(x, requires_grad=True)
    post, mix, read = module(leaf)
    y = torch.tanh(read) * 2 + 1
    expected = post.unsqueeze(-1) * y.unsqueeze(-2) + mix.transpose(-1, -2) @ leaf
    expected.backward(torch.tensor(dy))

    abstract = template(spec(streams, iterations, scaled=False))
    output, vjp = jax.vjp(lambda given, x: apply(abstract.bind(given), x), given, jnp.asarray(x))
    dweights, dx = vjp(jnp.asarray(dy))
    np.testing.assert_allclose(output, expected.detach(), atol=1e-5)
    np.testing.assert_allclose(dx, leaf.grad, atol=3e-5)
    np.testing.assert_allclose(
        dweights["weight"].reshape(streams * EMBED_DIM, -1).T, module.fn.grad, atol=3e-5
    )
    np.testing.assert_allclose(dweights["bias"], module.base.grad, atol=3e-5)
    np.testing.assert_allclose(dweights["alpha"], module.scale.grad, atol=1e-4)


@pytest.mark.parametrize(("scaled", "offset"), [(False, False), (True, False), (True, True)])
def test_output_matches_the_paper(scaled, offset):
    given = weights(4, scaled)
    x, _ = values(4)
    module = template(spec(4, 3, scaled=scaled, offset=offset)).bind(given)
    np.testing.assert_allclose(
        apply(module, jnp.asarray(x)), numpy_connection(given, x, 4, 3, offset), atol=2e-5
    )


def test_shapes_and_axes():
    abstract = template(spec(3))
    assert jax.tree.map(lambda leaf: leaf.shape, abstract.weights) == {
        "weight": (3, EMBED_DIM, 15),
        "alpha": (3,),
        "bias": (15,),
        "scale": (3, EMBED_DIM),
    }
    assert abstract.axes == {
        "weight": ("mhc", "embed", None),
        "alpha": (None,),
        "bias": (None,),
        "scale": ("mhc", "norm"),
    }
    assert "scale" not in template(spec(3, scaled=False)).weights


def test_sinkhorn_is_doubly_stochastic():
    logits = np.random.default_rng(0).normal(size=(50, 4, 4)).astype(np.float32)
    matrix = np.asarray(sinkhorn(jnp.asarray(logits), 20))
    assert matrix.min() > 0
    np.testing.assert_allclose(matrix.sum(-2), 1, atol=5e-6)  # normalised last
    np.testing.assert_allclose(matrix.sum(-1), 1, atol=1e-4)
    rough = np.asarray(sinkhorn(jnp.asarray(logits), 2))
    assert np.abs(rough.sum(-1) - 1).max() > 10 * np.abs(matrix.sum(-1) - 1).max()
    for actual, logit in zip(matrix[:5], logits[:5], strict=True):
        np.testing.assert_allclose(actual, numpy_sinkhorn(logit.astype(np.float64), 20), atol=2e-5)


@pytest.mark.parametrize("streams", [2, 4])
def test_initialisation_is_the_ordinary_residual(streams):
    """Without token-dependent terms, every stream is x + F(x) in each layer; with them, almost."""
    _, x = values(streams)
    module = initial(spec(streams))
    for alpha, tolerance in ((0.0, 3e-5), (0.01, 0.05)):
        module.alpha[...] = jnp.full(3, alpha)
        residual, expanded = x.astype(np.float64), expand(jnp.asarray(x), streams)
        for _ in range(3):
            residual, expanded = residual + sublayer(residual), apply(module, expanded)
        np.testing.assert_allclose(
            expanded, np.repeat(residual[:, :, None], streams, axis=2), rtol=tolerance
        )
        np.testing.assert_allclose(collapse(expanded), residual * streams, rtol=tolerance)
    np.testing.assert_array_equal(
        np.asarray(initial(spec(streams)).alpha[...]), np.full(3, np.float32(0.01))
    )
    assert np.ptp(np.asarray(expanded), axis=2).max() > 1e-4  # and yet the streams diverge


@pytest.mark.slow
def test_initialisation_preserves_different_streams():
    """Each stream keeps 99% of itself, and the sublayer reads their mean."""
    module = initial(spec(4))
    module.alpha[...] = jnp.zeros(3)
    x, _ = values(4)
    read, state = module.read(jnp.asarray(x))
    np.testing.assert_allclose(read, x.mean(2), atol=1e-5)
    mixed = module.write(jnp.asarray(x), state, jnp.zeros_like(read))
    np.testing.assert_allclose(
        mixed, 0.99 * x + 0.01 * (x.sum(2, keepdims=True) - x) / 3, atol=3e-5
    )


def test_bfloat16_streams_are_mapped_in_float32():
    given = weights(4)
    x, _ = values(4)
    x = jnp.asarray(x, jnp.bfloat16)
    module = template(spec(4, scaled=False), "bfloat16").bind(given)
    read, state = module.read(x)
    assert read.dtype == jnp.bfloat16
    assert state.post.dtype == state.mix.dtype == jnp.float32
    output = module.write(x, state, read)
    assert output.dtype == jnp.bfloat16
    plain = template(spec(4, scaled=False)).bind(given)
    exact, exact_state = plain.read(x.astype(jnp.float32))
    np.testing.assert_array_equal(state.mix, exact_state.mix)
    np.testing.assert_allclose(np.asarray(read, np.float32), exact, rtol=2**-8)


def test_expand_and_collapse():
    _, x = values(1)
    expanded = expand(jnp.asarray(x), 3)
    assert expanded.shape == (BATCH, LENGTH, 3, EMBED_DIM)
    for stream in range(3):
        np.testing.assert_array_equal(expanded[:, :, stream], x)
    streams, _ = values(3)
    expected = streams[:, :, 0] + streams[:, :, 1] + streams[:, :, 2]
    np.testing.assert_allclose(collapse(jnp.asarray(streams)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("streams", "iterations", "norm"),
    [(1, 20, NormSpec()), (4, 0, NormSpec()), (4, 20, NormSpec("layer"))],
)
def test_invalid_specs_raise(streams, iterations, norm):
    with pytest.raises(ValueError, match="at least|rms"):
        HyperConnectionSpec(streams, iterations, norm)
