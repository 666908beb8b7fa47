"""Norms against torch.nn.RMSNorm, torch.nn.LayerNorm and Gemma's 1 + w, forward and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from maxtext.common import hash_rng
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import NormSpec

SIZE, EPSILON = 24, 1e-2  # large, so that it matters


def template(spec, dtype="float32"):
    return Template.of(
        lambda: Norm(Initializer(hash_rng.key_from_seed(0), "float32"), spec, SIZE, dtype)
    )


def values(seed=0):
    draw = np.random.default_rng(seed).normal
    return (draw(size=(3, 5, SIZE)) * 0.3 + 0.5).astype(np.float32), draw(size=(3, 5, SIZE)).astype(
        np.float32
    )


def weights(*names):
    draw = np.random.default_rng(1).normal
    return {name: draw(size=SIZE).astype(np.float32) for name in names}


def torch_norm(kind):
    if kind == "rms":
        return torch.nn.RMSNorm(SIZE, eps=EPSILON), {"scale": "weight"}
    if kind == "layer":
        return torch.nn.LayerNorm(SIZE, eps=EPSILON), {"scale": "weight", "bias": "bias"}
    if kind == "offset":
        return GemmaRMSNorm(SIZE, eps=EPSILON), {"scale": "weight"}
    return torch.nn.RMSNorm(SIZE, eps=EPSILON, elementwise_affine=False), {}


SPECS = {
    "rms": NormSpec(epsilon=EPSILON),
    "layer": NormSpec("layer", EPSILON),
    "offset": NormSpec(epsilon=EPSILON, offset=True),
    "unscaled": NormSpec(epsilon=EPSILON, scaled=False),
}


@pytest.mark.parametrize("kind", SPECS)
def test_torch(kind):
    reference, names = torch_norm(kind)
    given = weights(*names)
    with torch.no_grad():
        for native_name, name in names.items():
            getattr(reference, name).copy_(torch.tensor(given[native_name]))
    x, back = values()
    abstract = template(SPECS[kind])
    assert set(abstract.weights) == set(names)
    output, pull = jax.vjp(lambda weights, x: abstract.bind(weights)(x), given, jnp.asarray(x))
    gradients, x_gradient = pull(jnp.asarray(back))
    leaf = torch.tensor(x, requires_grad=True)
    expected = reference(leaf)
    expected.backward(torch.tensor(back))
    np.testing.assert_allclose(output, expected.detach(), atol=1e-5)
    np.testing.assert_allclose(x_gradient, leaf.grad, atol=2e-5)
    for native_name, name in names.items():
        np.testing.assert_allclose(gradients[native_name], getattr(reference, name).grad, atol=2e-5)


def test_scale_for_each_head():
    """As Command-R+ norms its queries, [..., heads, dim]."""
    spec, heads = NormSpec("layer", EPSILON, bias=False), 5
    scale = np.random.default_rng(1).normal(size=(heads, SIZE)).astype(np.float32)
    reference = CohereLayerNorm((heads, SIZE), eps=EPSILON)
    with torch.no_grad():
        reference.weight.copy_(torch.tensor(scale))
    abstract = Template.of(
        lambda: Norm(
            Initializer(hash_rng.key_from_seed(0), "float32"), spec, SIZE, "float32", heads=heads
        )
    )
    x, dy = values()
    output, pull = jax.vjp(lambda scale, x: abstract.bind({"scale": scale})(x), scale, x)
    dscale, dx = pull(jnp.asarray(dy))
    leaf = torch.tensor(x, requires_grad=True)
    expected = reference(leaf)
    expected.backward(torch.tensor(dy))
    np.testing.assert_allclose(output, expected.detach(), atol=1e-5)
    np.testing.assert_allclose(dx, leaf.grad, atol=2e-5)
    np.testing.assert_allclose(dscale, reference.weight.grad, atol=2e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_bfloat16_is_normed_in_float32(kind):
    """Only input and output are rounded: a mean of squares in bfloat16 would be off by a per
    cent.
    """
    x, _ = values()
    x = jnp.asarray(x * 100 + 300, jnp.bfloat16)
    given = weights("scale", "bias") if kind == "layer" else weights("scale")
    output = template(SPECS[kind], "bfloat16").bind(given)(x)
    assert output.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float64)
    exact = exact - exact.mean(-1, keepdims=True) if kind == "layer" else exact
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + EPSILON) * given[
        "scale"
    ] + given.get("bias", 0.0)
    np.testing.assert_allclose(np.asarray(output, np.float64), exact, rtol=2**-8, atol=1e-5)


def test_initial_scale_does_nothing():
    """1, or 0 where it is added to 1; biases 0."""
    initializer = Initializer(hash_rng.key_from_seed(0), "float32")
    for kind, expected in (("rms", 1.0), ("layer", 1.0), ("offset", 0.0)):
        norm = Norm(initializer, SPECS[kind], SIZE, "float32")
        np.testing.assert_array_equal(norm.scale[...], np.full(SIZE, expected))
        assert norm.bias is None or not np.any(norm.bias[...])


def test_what_is_kept_for_the_gradient():
    """The input as it came, and one number a row."""
    abstract = template(SPECS["rms"], "bfloat16")
    x = jnp.asarray(values()[0], jnp.bfloat16)
    _, pull = jax.vjp(lambda x: abstract.bind(weights("scale"))(x), x)
    kept = [(leaf.dtype.name, leaf.size) for leaf in jax.tree.leaves(pull)]
    assert ("bfloat16", x.size) in kept
    assert ("float32", x.size // SIZE) in kept
    assert max(size for dtype, size in kept if dtype == "float32") == SIZE
