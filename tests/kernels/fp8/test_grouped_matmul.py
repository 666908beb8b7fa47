"""Grouped matmul in fp8, against a loop over groups in float64 whose inputs are rounded by
ml_dtypes.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.common.hardware import gpu_capability
from maxtext.kernels import grouped_matmul_hopper
from maxtext.kernels.fp8.grouped_matmul import grouped_matmul_fp8
from tests.support.grouped_matmul import SIZES, draw, reference
from tests.support.hopper_arrays import ROWS, abstract_arrays
from tests.support.hopper_arrays import SIZES as HOPPER_SIZES

E4M3_MAX = 448.0


@pytest.fixture(autouse=True)
def _full_matmul_precision():
    with jax.default_matmul_precision("highest"):
        yield


def fake_quantize(x, axes=None):
    """x rounded to e4m3 with the least power-of-two scale that avoids overflow, in float64."""
    x = np.asarray(x, np.float64)
    amax = np.abs(x).max(axis=axes, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.where(amax > 0, amax, E4M3_MAX) / E4M3_MAX))
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def fp8_reference(x, weights, group_sizes, dy):
    """y, dx and dw; dw is not rounded."""
    rounded_weights = fake_quantize(weights)
    y, _, _ = reference(fake_quantize(x, 1), rounded_weights, group_sizes, dy)
    _, dx, _ = reference(x, rounded_weights, group_sizes, fake_quantize(dy, 1))
    _, _, dw = reference(x, weights, group_sizes, dy)
    return y, dx, dw


def output_and_gradients(x, weights, group_sizes, dy):
    y, vjp = jax.vjp(
        lambda x, w: grouped_matmul_fp8(x, w, jnp.array(group_sizes, jnp.int32)), x, weights
    )
    return y, *vjp(dy)


@pytest.mark.slow
@pytest.mark.parametrize("group_sizes", SIZES.values(), ids=list(SIZES))
def test_output_and_gradients_match_rounded_inputs(group_sizes):
    x, weights, dy = draw((12, 5), (4, 5, 7), (12, 7))
    x[3] *= 1000  # rows do not share a scale
    actual = output_and_gradients(x, weights, group_sizes, dy)
    for array, expected in zip(actual, fp8_reference(x, weights, group_sizes, dy), strict=True):
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-5)


def test_rows_after_the_last_group_have_no_effect():
    group_sizes = (2, 3, 0, 4)
    x, weights, dy = draw((12, 5), (4, 5, 7), (12, 7))
    x[9:], dy[9:] = np.inf, np.nan
    actual = output_and_gradients(x, weights, group_sizes, dy)
    x[9:], dy[9:] = 0, 0
    expected = fp8_reference(x, weights, group_sizes, dy)
    for array, right, end in zip(actual, expected, (12, 9, 4), strict=True):
        np.testing.assert_allclose(array[:end], right[:end], rtol=1e-5, atol=1e-5)


def test_float16_does_not_overflow():
    x, weights = (array.astype(np.float16) for array in draw((8, 64), (1, 64, 8)))
    y = grouped_matmul_fp8(x, weights, jnp.array([8], jnp.int32))
    assert y.dtype == jnp.float16
    expected = fake_quantize(x, 1) @ fake_quantize(weights)[0]
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2e-3, atol=2e-3)


def test_hopper_kernel_lowers_for_gpus():
    x, weights, _ = abstract_arrays(inputs=256, outputs=384, dtype="float8_e4m3fn")
    weights_T = jax.ShapeDtypeStruct((4, 384, 256), weights.dtype)
    group_sizes = jax.ShapeDtypeStruct((4,), "int32")

    def run(x, weights_T, group_sizes):
        return grouped_matmul_hopper.grouped_matmul(
            x, weights_T, group_sizes, transposed=True, dtype=jnp.bfloat16
        )

    lowered = jax.jit(run).trace(x, weights_T, group_sizes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 1
    assert jax.eval_shape(run, x, weights_T, group_sizes).dtype == jnp.bfloat16


@pytest.mark.skipif(gpu_capability() != "9.0", reason="needs a Hopper GPU")
@pytest.mark.parametrize("group_sizes", HOPPER_SIZES.values(), ids=list(HOPPER_SIZES))
def test_hopper_output_and_gradients_match_rounded_inputs(group_sizes):
    random = np.random.default_rng(0)
    shapes = (ROWS, 256), (len(group_sizes), 256, 384), (ROWS, 384)
    x, weights, dy = (jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes)
    end = sum(group_sizes)
    x, dy = (array.at[end:].set(jnp.nan) for array in (x, dy))
    run = jax.jit(
        lambda *arrays: jax.vjp(
            lambda x, w: grouped_matmul_fp8(x, w, jnp.array(group_sizes), "gpu"), *arrays
        )
    )
    y, vjp = run(x, weights)
    actual = [y, *vjp(dy)]
    x, weights, dy = (np.asarray(array, np.float64) for array in (x, weights, dy))
    x[end:], dy[end:] = 0, 0
    expected = fp8_reference(x, weights, group_sizes, dy)
    for array, right, last in zip(actual, expected, (end, end, len(group_sizes)), strict=True):
        np.testing.assert_allclose(
            np.asarray(array[:last], np.float64),
            right[:last],
            rtol=0.01,
            atol=0.01 * np.max(abs(right), initial=1),
        )
