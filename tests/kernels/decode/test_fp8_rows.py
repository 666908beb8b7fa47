"""The kernels that quantize rows for decode steps, interpreted unless there is a GPU, against
float64 and the quantizer of the plain path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode.fp8_rows import (
    gate_quantize_rows,
    norm_quantize_rows,
    quantize_rows,
)
from maxtext.kernels.fp8.quantize import E4M3, quantize

GPU = jax.default_backend() == "gpu"
ROWS = 5
COLUMNS = [256, 1000, 3 * 2048]  # a power of two, many tiles, two tiles


def draw(*shape, seed=0):
    """Rows of different magnitudes, the first of zeros."""
    random = np.random.default_rng(seed)
    x = random.normal(size=shape) * 10.0 ** random.integers(-4, 4, (shape[0], 1))
    return jnp.asarray(x, jnp.bfloat16).at[0].set(0)


def check(actual, expected):
    """Scales and codes of `expected` in float64, rounded to bfloat16 first. A value between two
    bfloat16 numbers may be rounded to either, which changes few codes."""
    expected = quantize(jnp.asarray(expected, jnp.float32).astype(jnp.bfloat16), E4M3, (1,))
    np.testing.assert_array_equal(actual.scale, expected.scale)
    codes, expected_codes = (np.asarray(x.qvalue, np.float32) for x in (actual, expected))
    assert np.mean(codes != expected_codes) < 0.002
    np.testing.assert_allclose(codes, expected_codes, rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize("columns", COLUMNS)
def test_plain_rows_equal_xla_bit_for_bit(columns):
    x = draw(ROWS, columns)
    actual, expected = quantize_rows(x, interpret=not GPU), quantize(x, E4M3, (1,))
    np.testing.assert_array_equal(actual.scale, expected.scale)
    np.testing.assert_array_equal(actual.qvalue.view(jnp.uint8), expected.qvalue.view(jnp.uint8))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_not_finite_stay_so(value):
    x = draw(ROWS, 256).at[2, 7].set(value)
    qvalue, scale = quantize_rows(x, interpret=not GPU)
    product = qvalue.astype(jnp.float32) * scale[:, None]
    np.testing.assert_array_equal(
        np.isfinite(np.asarray(product)).all(axis=1), np.arange(ROWS) != 2
    )


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("columns", COLUMNS)
def test_norm(columns, offset):
    x, norm_scale = draw(ROWS, columns), draw(2, columns, seed=1)[1]
    x64, scale64 = np.asarray(x, np.float64), np.asarray(norm_scale, np.float64) + offset
    normed = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + 1e-5) * scale64
    check(norm_quantize_rows(x, norm_scale, 1e-5, offset, interpret=not GPU), normed)


@pytest.mark.parametrize("columns", COLUMNS)
def test_gate(columns):
    random = np.random.default_rng(2)
    y = jnp.asarray(random.normal(size=(ROWS, 2 * columns)) * 30, jnp.bfloat16)
    row_scale = jnp.asarray(2.0 ** random.integers(-6, -3, ROWS), jnp.float32)
    column_scale = jnp.asarray(2.0 ** random.integers(-3, 3, 2 * columns), jnp.float32)
    products = np.asarray(y, np.float64) * np.asarray(row_scale)[:, None] * column_scale
    gate, up = np.split(products, 2, axis=1)
    actual = gate_quantize_rows(y, row_scale, column_scale, jax.nn.silu, interpret=not GPU)
    check(actual, gate / (1 + np.exp(-gate)) * up)
