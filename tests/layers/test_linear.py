"""Linear against numpy, the order of gradients, and what dropout does to numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common import hash_rng
from maxtext.layers.linear import build_linear, order_weight_grads, project
from maxtext.layers.parameters import Initializer, Template, dropout

# inputs, outputs of the kernel, the product as an einsum
SHAPES = [
    ((6,), (4,), "bse,em->bsm"),
    ((6,), (2, 5), "bse,ehd->bshd"),
    ((2, 5), (6,), "bshd,hde->bse"),
    ((6,), (2, 3, 5), "bse,ekqd->bskqd"),
]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "product"), SHAPES, ids=[shape[2] for shape in SHAPES]
)
def test_numpy(inputs, outputs, product, bias):
    draw = np.random.default_rng(0).normal
    axes = (None,) * len(inputs + outputs)
    template = Template.of(
        lambda: build_linear(
            Initializer(hash_rng.key_from_seed(0), "float32"),
            "linear",
            in_shape=inputs,
            out_shape=outputs,
            axes=axes,
            dtype="float32",
            bias=bias,
        )
    )
    weights = {"weight": draw(size=inputs + outputs)} | (
        {"bias": draw(size=outputs)} if bias else {}
    )
    assert jax.tree.map(np.shape, weights) == jax.tree.map(
        lambda leaf: leaf.shape, template.weights
    )
    x = draw(size=(2, 3, *inputs))
    expected = np.einsum(product, x, weights["weight"]) + (weights["bias"] if bias else 0)
    actual = template.bind(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), weights))(
        jnp.asarray(x, jnp.float32)
    )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_weights_keep_their_dtype_and_the_product_has_the_computation_s():
    template = Template.of(
        lambda: build_linear(
            Initializer(hash_rng.key_from_seed(0), "float32"),
            "linear",
            in_shape=(6,),
            out_shape=(4,),
            axes=(None, None),
            dtype="bfloat16",
            bias=True,
        )
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(template.weights)} == {jnp.dtype("float32")}
    weights = {
        "weight": jnp.full((6, 4), 1 + 2**-12),
        "bias": jnp.full((4,), 2**-12),
    }  # 1 when rounded to bfloat16
    y = template.bind(weights)(jnp.ones((1, 6), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float32), np.full((1, 4), 6.0))


def ordered(x, weights):
    x, weights = order_weight_grads(x, weights)
    return jnp.sin(x @ weights["weight"]).sum() * weights["count"]


def barriers(function, *arguments):
    """What each barrier of the function's program holds, as shapes."""
    program = jax.make_jaxpr(function)(*arguments)
    return [
        [var.aval.shape for var in eqn.invars]
        for eqn in program.eqns
        if "barrier" in eqn.primitive.name
    ]


def test_gradients_of_weights_come_before_that_of_the_input():
    draw = np.random.default_rng(0).normal
    x, kernel = jnp.asarray(draw(size=(3, 6))), jnp.asarray(draw(size=(6, 4)))

    def run(x, kernel):
        return ordered(x, {"weight": kernel, "count": jnp.asarray(2)})

    gradients = jax.grad(run, argnums=(0, 1))
    slope = 2 * jnp.cos(x @ kernel)
    for actual, reference in zip(
        gradients(x, kernel), (slope @ kernel.T, x.T @ slope), strict=True
    ):
        np.testing.assert_allclose(actual, reference, rtol=1e-5)
    assert barriers(gradients, x, kernel) == [
        [(3, 6), (6, 4)]
    ]  # both, and not the count, which has no gradient
    assert barriers(run, x, kernel) == []
    assert barriers(jax.grad(run), x, kernel) == []  # frozen weights: nothing to wait for


def test_gradients_of_weights_wait_in_the_dtype_of_the_product():
    template = Template.of(
        lambda: build_linear(
            Initializer(hash_rng.key_from_seed(0), "float32"),
            "linear",
            in_shape=(6,),
            out_shape=(4,),
            axes=(None, None),
            dtype="bfloat16",
        )
    )
    x, weights = jnp.ones((3, 6), jnp.bfloat16), {"weight": jnp.ones((6, 4), jnp.float32)}

    def run(x, weights):
        return (
            project(x, template.bind(weights), weight_grads_first=True)[0].astype(jnp.float32).sum()
        )

    gradients = jax.grad(run, argnums=(0, 1))
    program = jax.make_jaxpr(gradients)(x, weights)
    held = [
        [var.aval.dtype for var in eqn.invars]
        for eqn in program.eqns
        if "barrier" in eqn.primitive.name
    ]
    assert held == [[jnp.bfloat16, jnp.bfloat16]]
    assert gradients(x, weights)[1]["weight"].dtype == jnp.float32


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_dropout_keeps_the_mean(rate):
    x = jnp.full((400, 500), 2.0)
    y = np.asarray(dropout(x, rate, jax.random.key(0)))
    assert set(np.unique(y)) == {np.float32(0), np.float32(2 / (1 - rate))}
    dropped, n = (y == 0).mean(), y.size
    assert abs(dropped - rate) < 5 * np.sqrt(rate * (1 - rate) / n)
    assert abs(y.mean() - 2) < 5 * 2 * np.sqrt(rate / (1 - rate) / n)
    for axis in (0, 1):  # no row and no column is special: each count is binomial
        counts, size = (y == 0).sum(axis=axis), y.shape[axis]
        assert np.abs(counts - rate * size).max() < 6 * np.sqrt(rate * (1 - rate) * size)


def test_dropout_is_a_function_of_its_key():
    x = jnp.ones((64, 64))
    same = [np.asarray(dropout(x, 0.5, jax.random.key(7))) for _ in range(2)]
    np.testing.assert_array_equal(*same)
    other = np.asarray(dropout(x, 0.5, jax.random.key(8)))
    assert (
        abs((same[0] == other).mean() - 0.5) < 5 * 0.5 / 64
    )  # two independent masks agree on half


def test_no_dropout_without_key_or_rate():
    x = jnp.arange(12.0).reshape(3, 4)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_dropout_keeps_the_dtype():
    assert dropout(jnp.ones((8, 8), jnp.bfloat16), 0.3, jax.random.key(0)).dtype == jnp.bfloat16
