"""fp8 and int8 training matmuls against numpy, rounded by ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.kernels.fp8.quantize import ceil_power_of_two
from tests.support.quantized_matmul import OUTER, matmul, problem, run

E4M3, E5M2 = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)


def fake_quantize_fp8(x, form, row_dims=0):
    """x rounded to fp8, in float64, with one scale for each index into the first `row_dims`
    dimensions; and the scales.
    """
    dtype, largest = form
    amax = np.abs(x).max(axis=tuple(range(row_dims, x.ndim)), keepdims=True).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(amax / largest))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale, scale


def fake_quantize_int8(x, axes):
    """x rounded to int8, in float64, with one scale along `axes`."""
    scale = np.abs(x).max(axis=axes, keepdims=True).astype(np.float64) / 127
    return np.round(x / scale) * scale


def test_fp8_matches_rounded_operands():
    """Tokens differ by four orders of magnitude, which one scale for all would not represent."""
    x, weight, dy = problem()
    x *= 10.0 ** np.linspace(-4, 0, 10, dtype=np.float32).reshape(2, 5, 1, 1)
    (rounded_x, scales), (rounded_weight, _) = (
        fake_quantize_fp8(x, E4M3, 2),
        fake_quantize_fp8(weight, E4M3),
    )
    rounded_dy, dy_scales = fake_quantize_fp8(dy, E5M2, 2)
    # dw sums over tokens: their scales are part of dy, which is rounded again.
    relative = scales * dy_scales / (scales * dy_scales).max()
    requantized = (
        (rounded_dy / dy_scales * relative).astype(np.float32).astype(E5M2[0]).astype(np.float64)
    )
    requantized = requantized / relative * dy_scales
    expected_all = (
        np.einsum("abij,ijkl->abkl", rounded_x, rounded_weight),
        np.einsum("abkl,ijkl->abij", rounded_dy, rounded_weight),
        np.einsum("abij,abkl->ijkl", rounded_x, requantized),
    )
    for actual, expected in zip(run("fp8", x, weight, dy), expected_all, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())
        close = np.abs(actual - expected).max(axis=(2, 3)) <= 1e-5 * np.abs(expected).max(
            axis=(2, 3)
        )
        assert close.all()  # for each token, however small


@pytest.mark.slow
def test_tokens_with_zero_gradient_do_not_affect_scales():
    """Their scale must not be the largest: the gradients of other tokens would underflow in dw."""
    x, weight, dy = problem()
    dy *= 1e-9
    nonzero = np.zeros((*OUTER, 1, 1), np.float32)
    nonzero[0, :3] = 1
    _, _, expected_dw = run("fp8", x[:1, :3], weight, dy[:1, :3])
    _, dx, dw = run("fp8", x, weight, dy * nonzero)
    np.testing.assert_allclose(dw, expected_dw, rtol=1e-5, atol=1e-6 * np.abs(expected_dw).max())
    assert not np.any(dx[1])
    assert np.abs(dw).max() > 1e-9


@pytest.mark.parametrize("platform", [None, "gpu"])
def test_int8_matches_rounded_operands(platform):
    x, weight, dy = problem()
    expected_all = (
        np.einsum(
            "abij,ijkl->abkl", fake_quantize_int8(x, (2, 3)), fake_quantize_int8(weight, (0, 1))
        ),
        np.einsum(
            "abkl,ijkl->abij", fake_quantize_int8(dy, (2, 3)), fake_quantize_int8(weight, (2, 3))
        ),
        np.einsum("abij,abkl->ijkl", x.astype(float), dy.astype(float)),  # not rounded
    )
    for actual, expected in zip(
        run("int8", x, weight, dy, platform=platform), expected_all, strict=True
    ):
        np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("precision", "tolerance"), [("fp8", 0.08), ("int8", 0.02)])
def test_errors_are_those_of_the_precision(precision, tolerance):
    """Three or seven bits of significand, on average over a sum."""
    x, weight, dy = problem(1)
    exact = (
        np.einsum("abij,ijkl->abkl", x, weight),
        np.einsum("abkl,ijkl->abij", dy, weight),
        np.einsum("abij,abkl->ijkl", x, dy),
    )
    for actual, expected in zip(run(precision, x, weight, dy), exact, strict=True):
        assert np.std(actual - expected) < tolerance * np.std(expected)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_dtypes_are_preserved_and_zeros_stay_zero(precision):
    x, weight, dy = problem()
    y, dx, dw = run(precision, jnp.asarray(x, jnp.bfloat16), weight, dy, jnp.bfloat16)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert all(not np.any(array) for array in run(precision, 0 * x, weight, 0 * dy))


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_nan_propagates(precision):
    """Training must detect it."""
    x, weight, dy = problem()
    x[0, 0, 0, 0] = np.nan
    assert not np.isfinite(run(precision, x, weight, dy)[0][0, 0]).any()


def test_residuals_are_fp8():
    x, weight, _ = problem()
    _, vjp = jax.vjp(
        lambda x, weight: matmul(x, weight, 2, "fp8", jnp.float32),
        jnp.asarray(x),
        jnp.asarray(weight),
    )
    leaves = jax.tree.leaves(vjp)
    residuals = [leaf for leaf in leaves if getattr(leaf, "size", 0) > 10]  # without 10 scales
    assert residuals
    assert {leaf.dtype for leaf in residuals} == {jnp.dtype("float8_e4m3fn")}


def test_unscaled_sums_do_not_overflow_float16():
    y = matmul(
        jnp.ones((4, 512), jnp.float16), jnp.ones((512, 8), jnp.float16), 1, "fp8", "float16"
    )
    np.testing.assert_array_equal(y, np.full((4, 8), 512, np.float16))


@pytest.mark.parametrize("value", [0.0, 1.0, 1.0001, 3.0, 4.0, 1e-30, 1e38, np.inf])
def test_ceil_power_of_two(value):
    actual = float(ceil_power_of_two(jnp.float32(value)))
    assert actual == (
        value if value in (0, np.inf) else 2.0 ** np.ceil(np.log2(np.float64(np.float32(value))))
    )
