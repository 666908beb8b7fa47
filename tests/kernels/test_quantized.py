"""Quantized arrays: how far numbers move, which of them share a scale, and products against
numpy.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.quantized import Quantized, dequantize, groups_of, product, quantize, quantized

LARGEST = {"int8": 127, "int4": 7}
KINDS = pytest.mark.parametrize("dtype", ["int8", "int4"])


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@KINDS
@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_a_number_moves_by_half_a_scale_at_most(dtype, axes):
    x = draw(5, 7, 11) * np.exp(3 * draw(5, 1, 11, seed=1))  # groups of very different sizes
    values, scale = jax.jit(lambda x: quantize(x, axes, dtype))(x)
    assert values.dtype == jnp.dtype(dtype)
    assert scale.dtype == jnp.float32
    largest = np.max(np.abs(x), axis=axes, keepdims=True)
    np.testing.assert_allclose(scale, largest / LARGEST[dtype], rtol=1e-6)
    integers = np.asarray(values).astype(np.int64)
    np.testing.assert_array_equal(np.max(np.abs(integers), axis=axes), LARGEST[dtype])
    moved = np.abs(integers * np.asarray(scale, np.float64) - x)
    assert np.all(moved <= np.asarray(scale, np.float64) * (0.5 + 1e-4))
    np.testing.assert_allclose(
        jax.jit(lambda *parts: dequantize(*parts, jnp.float32))(values, scale),
        integers * np.asarray(scale),
        rtol=1e-6,
    )


@KINDS
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38])
def test_what_is_nothing_stays_nothing(dtype, tiny):
    x = np.stack([np.full(8, tiny, np.float32), draw(8)])
    values, scale = quantize(jnp.asarray(x), (1,), dtype)
    assert float(scale[0, 0]) == 1.0
    assert not np.any(np.asarray(values[0], np.int32))
    assert np.all(np.isfinite(dequantize(values, scale, jnp.float32)))


GROUPS = [  # shape, contracted, groups in int4
    ((64, 5), (0,), (1, 5)),  # fewer than 128
    ((256, 5), (0,), (2, 5)),
    ((2880, 5), (0,), (24, 5)),  # 120 is the largest divisor up to 128
    ((4, 128, 5), (0, 1), (4, 1, 5)),
    ((4, 64, 5), (0, 1), (2, 1, 5)),  # two heads together
    ((6, 32, 5), (0, 1), (2, 1, 5)),  # three
    ((4, 96, 5), (0, 1), (4, 1, 5)),
    ((4, 512, 5), (0, 1), (4, 4, 5)),
    ((3, 256, 5), (1,), (3, 2, 5)),  # experts
    ((256, 3, 5), (0,), (2, 3, 5)),  # a stack of layers
    ((509, 5), (0,), (1, 5)),  # a prime
    ((2 * 509, 5), (0,), (1, 5)),  # scales for pairs would be larger than the values
]


@pytest.mark.parametrize(("shape", "contracted", "expected"), GROUPS, ids=str)
def test_groups(shape, contracted, expected):
    assert tuple(groups_of(shape, contracted, 128)) == expected
    alone = tuple(1 if axis in contracted else size for axis, size in enumerate(shape))
    assert tuple(groups_of(shape, contracted, None)) == alone
    kernel = quantized(jnp.asarray(draw(*shape)), contracted, "int4")
    assert kernel.scale.shape == expected
    assert kernel.shape == kernel.values.shape == shape


def test_a_group_has_the_scale_of_its_largest():
    x = draw(6, 256, 5)
    kernel = quantized(jnp.asarray(x), (0, 1), "int4")
    by_group = x.reshape(6, 2, 128, 5)
    np.testing.assert_allclose(kernel.scale, np.abs(by_group).max(axis=2) / 7, rtol=1e-6)
    scale = np.repeat(np.asarray(kernel.scale), 128, axis=1)
    np.testing.assert_allclose(
        kernel.astype(jnp.float32), np.asarray(kernel.values).astype(np.float32) * scale, rtol=1e-6
    )


# inputs, outputs of the kernel, the product as an einsum
SHAPES = [
    ((48,), (4,), "bse,em->bsm"),
    ((256,), (2, 5), "bse,ehd->bshd"),
    ((4, 64), (6,), "bshd,hde->bse"),
    ((6,), (2, 3, 5), "bse,ekqd->bskqd"),
]


@KINDS
@pytest.mark.parametrize(
    ("inputs", "outputs", "equation"), SHAPES, ids=[shape[2] for shape in SHAPES]
)
def test_product_with_the_numbers_that_integers_stand_for(dtype, inputs, outputs, equation):
    x, rank = draw(2, 3, *inputs, seed=1), len(inputs)
    kernel = quantized(jnp.asarray(draw(*inputs, *outputs)), range(rank), dtype)
    meant = np.asarray(kernel.astype(jnp.float32), np.float64)
    run = jax.jit(lambda x, kernel: product(x, kernel, rank, jnp.float32))
    expected = np.einsum(equation, x, meant)
    np.testing.assert_allclose(run(x, kernel), expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(
        run(x, jnp.asarray(meant, jnp.float32)), expected, atol=1e-5 * np.abs(expected).max()
    )


def test_int8_is_scaled_after_the_product():
    """Nothing of the size of the kernel is computed but its conversion."""
    kernel = quantized(jnp.asarray(draw(256, 8)), (0,), "int8")
    program = jax.make_jaxpr(lambda x: product(x, kernel, 1, jnp.bfloat16))(
        jnp.ones((3, 256), jnp.bfloat16)
    )
    of_kernel = [
        eqn.primitive.name for eqn in program.eqns if eqn.outvars[0].aval.shape == (256, 8)
    ]
    assert of_kernel == ["convert_element_type"]


def test_sums_of_integers_fit_into_small_floats():
    kernel = quantized(
        jnp.ones((2048, 2)), (0,), "int8"
    )  # 127 each: their sum is above what float16 has
    y = product(jnp.ones((1, 2048), jnp.float16), kernel, 1, jnp.float16)
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y, 2048)


def test_a_quantized_kernel_is_a_tree_and_is_used_as_a_whole():
    kernel = quantized(jnp.asarray(draw(8, 4)), (0,), "int8")
    assert kernel[...] is kernel
    assert kernel.ndim == 2
    assert kernel.dtype == jnp.int8
    with pytest.raises(TypeError, match="as a whole"):
        kernel[0]
    parts = jax.tree.leaves(kernel)
    assert [part.shape for part in parts] == [(8, 4), (1, 4)]
    assert isinstance(jax.tree.map(lambda part: part, kernel), Quantized)
