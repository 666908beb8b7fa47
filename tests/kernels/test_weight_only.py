"""Weight-only quantization: rounding errors, which values share a scale, and matmuls against
numpy.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.hf.quantized import MicroscalingFloat4
from maxtext.kernels.weight_matmul import xla_matmul
from maxtext.kernels.weight_only import (
    MXFP4,
    QuantizedWeight,
    dequantize,
    groups_per_dim,
    quantize,
    quantize_weight,
)

MAX_QVALUE = {"int8": 127, "int4": 7}
DTYPES = pytest.mark.parametrize("dtype", ["int8", "int4"])


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@DTYPES
@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_rounding_error_is_at_most_half_a_scale(dtype, axes):
    x = draw(5, 7, 11) * np.exp(3 * draw(5, 1, 11, seed=1))  # groups of very different magnitudes
    qvalue, scale = jax.jit(lambda x: quantize(x, axes, dtype))(x)
    assert qvalue.dtype == jnp.dtype(dtype)
    assert scale.dtype == jnp.float32
    amax = np.max(np.abs(x), axis=axes, keepdims=True)
    np.testing.assert_allclose(scale, amax / MAX_QVALUE[dtype], rtol=1e-6)
    integers = np.asarray(qvalue).astype(np.int64)
    np.testing.assert_array_equal(np.max(np.abs(integers), axis=axes), MAX_QVALUE[dtype])
    error = np.abs(integers * np.asarray(scale, np.float64) - x)
    assert np.all(error <= np.asarray(scale, np.float64) * (0.5 + 1e-4))
    np.testing.assert_allclose(
        jax.jit(lambda *parts: dequantize(*parts, jnp.float32))(qvalue, scale),
        integers * np.asarray(scale),
        rtol=1e-6,
    )


@DTYPES
@pytest.mark.parametrize("tiny", [0.0, 1e-45, 1e-38])
def test_zeros_and_subnormals_quantize_to_zero(dtype, tiny):
    x = np.stack([np.full(8, tiny, np.float32), draw(8)])
    qvalue, scale = quantize(jnp.asarray(x), (1,), dtype)
    assert float(scale[0, 0]) == 1.0
    assert not np.any(np.asarray(qvalue[0], np.int32))
    assert np.all(np.isfinite(dequantize(qvalue, scale, jnp.float32)))


GROUPS = [  # shape, contracted, groups in int4
    ((64, 5), (0,), (1, 5)),  # fewer than 128
    ((256, 5), (0,), (2, 5)),
    ((2880, 5), (0,), (24, 5)),  # 120 is the largest divisor up to 128
    ((4, 128, 5), (0, 1), (4, 1, 5)),
    ((4, 64, 5), (0, 1), (2, 1, 5)),  # two heads share a scale
    ((6, 32, 5), (0, 1), (2, 1, 5)),  # three
    ((4, 96, 5), (0, 1), (4, 1, 5)),
    ((4, 512, 5), (0, 1), (4, 4, 5)),
    ((3, 256, 5), (1,), (3, 2, 5)),  # experts
    ((256, 3, 5), (0,), (2, 3, 5)),  # a stack of layers
    ((509, 5), (0,), (1, 5)),  # a prime
    ((2 * 509, 5), (0,), (1, 5)),  # scales of pairs would be larger than the weight
]


@pytest.mark.parametrize(("shape", "contracted", "expected"), GROUPS, ids=str)
def test_number_of_groups(shape, contracted, expected):
    assert tuple(groups_per_dim(shape, contracted, 128)) == expected
    ungrouped = tuple(1 if axis in contracted else dim for axis, dim in enumerate(shape))
    assert tuple(groups_per_dim(shape, contracted, None)) == ungrouped
    weight = quantize_weight(jnp.asarray(draw(*shape)), contracted, "int4")
    assert weight.scale.shape == expected
    assert weight.shape == weight.qvalue.shape == shape


def test_scale_of_a_group_is_its_amax_over_seven():
    x = draw(6, 256, 5)
    weight = quantize_weight(jnp.asarray(x), (0, 1), "int4")
    by_group = x.reshape(6, 2, 128, 5)
    np.testing.assert_allclose(weight.scale, np.abs(by_group).max(axis=2) / 7, rtol=1e-6)
    scale = np.repeat(np.asarray(weight.scale), 128, axis=1)
    np.testing.assert_allclose(
        weight.astype(jnp.float32), np.asarray(weight.qvalue).astype(np.float32) * scale, rtol=1e-6
    )


# inputs, outputs of the weight, the matmul as an einsum
SHAPES = [
    ((48,), (4,), "bse,em->bsm"),
    ((256,), (2, 5), "bse,ehd->bshd"),
    ((4, 64), (6,), "bshd,hde->bse"),
    ((6,), (2, 3, 5), "bse,ekqd->bskqd"),
]


@DTYPES
@pytest.mark.parametrize(
    ("inputs", "outputs", "equation"), SHAPES, ids=[shape[2] for shape in SHAPES]
)
def test_matmul_matches_the_dequantized_weight(dtype, inputs, outputs, equation):
    x, input_dims = draw(2, 3, *inputs, seed=1), len(inputs)
    weight = quantize_weight(jnp.asarray(draw(*inputs, *outputs)), range(input_dims), dtype)
    dequantized = np.asarray(weight.astype(jnp.float32), np.float64)
    run = jax.jit(lambda x, weight: xla_matmul(x, weight, input_dims, jnp.float32))
    expected = np.einsum(equation, x, dequantized)
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(run(x, weight), expected, atol=tolerance)
    np.testing.assert_allclose(
        run(x, jnp.asarray(dequantized, jnp.float32)), expected, atol=tolerance
    )


def test_int8_scales_the_outputs():
    """Nothing of the size of the weight is computed but its conversion."""
    weight = quantize_weight(jnp.asarray(draw(256, 8)), (0,), "int8")
    program = jax.make_jaxpr(lambda x: xla_matmul(x, weight, 1, jnp.bfloat16))(
        jnp.ones((3, 256), jnp.bfloat16)
    )
    primitives = [
        eqn.primitive.name for eqn in program.eqns if eqn.outvars[0].aval.shape == (256, 8)
    ]
    assert primitives == ["convert_element_type"]


def test_sums_of_integers_do_not_overflow_float16():
    weight = quantize_weight(jnp.ones((2048, 2)), (0,), "int8")  # 127 each
    y = xla_matmul(jnp.ones((1, 2048), jnp.float16), weight, 1, jnp.float16)
    assert y.dtype == jnp.float16
    np.testing.assert_array_equal(y, 2048)


def test_quantized_weight_is_a_pytree_and_cannot_be_sliced():
    weight = quantize_weight(jnp.asarray(draw(8, 4)), (0,), "int8")
    assert weight[...] is weight
    assert weight.ndim == 2
    assert weight.dtype == jnp.int8
    with pytest.raises(TypeError, match="cannot be sliced"):
        weight[0]
    leaves = jax.tree.leaves(weight)
    assert [leaf.shape for leaf in leaves] == [(8, 4), (1, 4)]
    assert isinstance(jax.tree.map(lambda leaf: leaf, weight), QuantizedWeight)


def test_mxfp4_has_the_bytes_of_published_folders():
    """Random bytes, read as the format of gpt-oss' folders; weights that were in mxfp4 keep their
    values when they are quantized again."""
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (3, 10, 4, 16)).astype(np.uint8)
    scales = random.integers(100, 130, (3, 10, 4)).astype(np.uint8)
    expected = MicroscalingFloat4().dequantize(codes, scales).astype(np.float32)
    weight = QuantizedWeight(jnp.asarray(codes.reshape(3, 10, 64)), jnp.asarray(scales), MXFP4)
    assert weight.shape == expected.shape == (3, 128, 10)
    np.testing.assert_array_equal(weight.astype(jnp.float32), expected)
    again = quantize_weight(jnp.asarray(expected), (1,), MXFP4)
    np.testing.assert_array_equal(again.astype(jnp.float32), expected)


def test_mxfp4_rounds_to_the_nearest_value():
    """ml_dtypes rounds to e2m1; the scale of a group is the least power of two with which its
    largest magnitude rounds to 6 at most."""
    x = draw(2, 64, 5) * np.exp(2 * draw(2, 1, 5, seed=1))
    weight = quantize_weight(jnp.asarray(x), (1,), MXFP4)
    groups = np.moveaxis(x.reshape(2, 2, 32, 5), 3, 1)  # [X, N, G, 32]
    amax = np.abs(groups).max(axis=-1)
    exponents = np.ceil(np.log2(amax / 7))
    np.testing.assert_array_equal(weight.scale, exponents + 127)
    scaled = groups / 2.0 ** exponents[..., None]
    rounded = np.clip(scaled, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    expected = np.moveaxis(rounded * 2.0 ** exponents[..., None], 1, 3).reshape(2, 64, 5)
    np.testing.assert_array_equal(weight.astype(jnp.float32), expected)
