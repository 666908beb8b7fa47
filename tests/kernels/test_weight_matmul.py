"""Matmuls of many rows with fp8 and int8 weights, against numpy in float64 of the dequantized
operands, and which rows are quantized.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.kernels.weight_matmul import (
    WEIGHT_ONLY_ROWS,
    transposed_matmul,
    weight_matmul,
)
from maxtext.kernels.weight_only import QuantizedWeight, quantize_weight

ROWS, DEPTH, COLUMNS = WEIGHT_ONLY_ROWS + 3, 48, 20
FORMATS = pytest.mark.parametrize("name", ["fp8", "int8"])


def draw(*shape, seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * np.exp(random.normal(size=(*shape[:-1], 1)))
    return jnp.asarray(x, jnp.bfloat16)


def round_trip(x, name):
    """Each row of x as it is quantized, in float64."""
    x = np.asarray(x, np.float64)
    amax = np.abs(x).max(axis=-1, keepdims=True)
    if name == "int8":
        return np.round(x / (amax / 127)) * (amax / 127)
    scale = 2.0 ** np.ceil(np.log2(amax / 448))
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


@FORMATS
def test_weights_are_within_half_a_step(name):
    """Of int8, amax / 254; of fp8, 1/16 of a value, or half of the least code above zero."""
    x = np.asarray(draw(DEPTH, COLUMNS), np.float64)
    weight = quantize_weight(jnp.asarray(x, jnp.float32), (0,), name)
    assert weight.format == name
    assert weight.scale.shape == (1, COLUMNS)
    error = np.abs(np.asarray(weight.astype(jnp.float32), np.float64) - x)
    scale = np.asarray(weight.scale, np.float64)
    if name == "int8":
        assert (error <= 0.5001 * scale).all()
    else:
        np.testing.assert_array_equal(np.log2(scale) % 1, 0)
        assert (np.abs(x).max(axis=0) <= 448 * scale[0]).all()
        assert (np.abs(x).max(axis=0) > 224 * scale[0]).all()
        assert (error <= np.maximum(np.abs(x) / 16, scale * 2**-10)).all()
    np.testing.assert_allclose(weight.astype(jnp.float32), round_trip(x.T, name).T, rtol=1e-5)


@FORMATS
@pytest.mark.parametrize("rows", [WEIGHT_ONLY_ROWS, ROWS])
@pytest.mark.parametrize("transposed", [False, True])
def test_many_rows_are_quantized(name, rows, transposed):
    x, w = draw(rows, DEPTH), draw(DEPTH, COLUMNS, seed=1)
    weight = quantize_weight(w, (0,), name)
    if transposed:
        weight_T = QuantizedWeight(weight.qvalue.T, weight.scale.T)
        y = transposed_matmul(x, weight_T, None, True)
    else:
        [y] = jax.jit(lambda x, w: weight_matmul(x, [w], 1, "bfloat16", None, True))(x, weight)
    x_seen = round_trip(x, name) if rows > WEIGHT_ONLY_ROWS else np.asarray(x, np.float64)
    expected = x_seen @ np.asarray(weight.astype(jnp.float32), np.float64)
    assert y.dtype == jnp.bfloat16
    tolerance = 2**-8 * np.abs(expected).max(axis=1, keepdims=True)
    assert (np.abs(np.asarray(y, np.float64) - expected) <= tolerance).all()
    if rows > WEIGHT_ONLY_ROWS:  # so that the comparison can fail
        exact = np.asarray(x, np.float64) @ np.asarray(weight.astype(jnp.float32), np.float64)
        assert np.abs(exact - expected).max() > (0.002 if name == "int8" else 0.02)


@FORMATS
def test_several_dimensions(name):
    """Inputs and outputs of two dimensions each, in float32."""
    x = draw(3, ROWS, 4, 8).astype(jnp.float32)
    w = draw(4, 8, 5, 6, seed=1)
    weight = quantize_weight(w, (0, 1), name)
    [y] = weight_matmul(x, [weight], 2, "float32", None, True)
    seen = round_trip(x.reshape(3, ROWS, -1), name).reshape(x.shape)
    dequantized = np.asarray(weight.astype(jnp.float32), np.float64)
    expected = np.einsum("brij,ijkl->brkl", seen, dequantized)
    np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


@FORMATS
def test_rows_of_zeros_and_nonfinite_rows(name):
    """Zeros give zeros, and a row that is not finite leaves the others as they are."""
    x = draw(ROWS, DEPTH).at[1].set(0).at[2, 3].set(jnp.nan).at[4, 5].set(jnp.inf)
    weight = quantize_weight(draw(DEPTH, COLUMNS, seed=1), (0,), name)
    [y] = weight_matmul(x, [weight], 1, "bfloat16", None, True)
    y = np.asarray(y, np.float32)
    assert not y[1].any()
    assert not np.isfinite(y[[2, 4]]).any()
    assert np.isfinite(np.delete(y, [2, 4], axis=0)).all()


def test_packed_transposed_int4_has_the_bytes_of_gptq():
    """Two neighbouring inputs in a byte, the first in the lower half, with an offset of 8."""
    from maxtext.layers.weight_layout import transpose_quantized

    weight = quantize_weight(draw(256, 8), (0,), "int4")
    packed = transpose_quantized([weight], 1)
    codes = np.asarray(weight.qvalue).astype(np.int64).T + 8
    np.testing.assert_array_equal(packed.qvalue, codes[:, 0::2] | codes[:, 1::2] << 4)
    assert packed.shape == (8, 256)
    np.testing.assert_array_equal(
        packed.astype(jnp.float32), np.asarray(weight.astype(jnp.float32)).T
    )
    x = draw(3, 256, seed=1)
    y = transposed_matmul(x, packed, None, True)
    expected = np.asarray(x, np.float64) @ np.asarray(weight.astype(jnp.float32), np.float64)
    np.testing.assert_allclose(
        np.asarray(y, np.float64), expected, atol=0.02 * np.abs(expected).max()
    )
