"""Grouped products in fp8: against a loop over groups in float64 whose inputs are rounded by
ml_dtypes.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.common.gpu import gpu_capability
from maxtext.kernels import grouped_fp8, grouped_hopper
from tests.kernels.test_grouped import SIZES, draw, loop
from tests.kernels.test_grouped_hopper import ROWS, arguments
from tests.kernels.test_grouped_hopper import SIZES as MANY

LARGEST = 448.0  # of e4m3


@pytest.fixture(autouse=True)
def _no_shorter_numbers_on_gpus():
    with jax.default_matmul_precision("highest"):
        yield


def rounded(x, axes=None):
    """By the least power of two that brings the largest within the format, and back, in float64."""
    x = np.asarray(x, np.float64)
    largest = np.abs(x).max(axis=axes, keepdims=True)
    scale = 2.0 ** np.ceil(np.log2(np.where(largest > 0, largest, LARGEST) / LARGEST))
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def roughly(rows, kernels, sizes, cotangent):
    """The product and both gradients; the one of the kernels is not rounded."""
    kernels_used = rounded(kernels)
    product, _, _ = loop(rounded(rows, 1), kernels_used, sizes, cotangent)
    _, of_rows, _ = loop(rows, kernels_used, sizes, rounded(cotangent, 1))
    _, _, of_kernels = loop(rows, kernels, sizes, cotangent)
    return product, of_rows, of_kernels


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES.values(), ids=list(SIZES))
def test_product_and_gradients(sizes):
    rows, kernels, cotangent = draw((12, 5), (4, 5, 7), (12, 7))
    rows[3] *= 1000  # rows do not share a scale
    product, pull = jax.vjp(
        lambda r, k: grouped_fp8.product(r, k, jnp.array(sizes, jnp.int32)), rows, kernels
    )
    for ours, theirs in zip(
        (product, *pull(cotangent)), roughly(rows, kernels, sizes, cotangent), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_nothing_comes_from_behind_the_last_group():
    sizes = (2, 3, 0, 4)
    rows, kernels, cotangent = draw((12, 5), (4, 5, 7), (12, 7))
    rows[9:], cotangent[9:] = np.inf, np.nan
    product, pull = jax.vjp(
        lambda r, k: grouped_fp8.product(r, k, jnp.array(sizes, jnp.int32)), rows, kernels
    )
    found = [product, *pull(cotangent)]
    rows[9:], cotangent[9:] = 0, 0
    right = roughly(rows, kernels, sizes, cotangent)
    for ours, theirs, known in zip(found, right, (12, 9, 4), strict=True):
        np.testing.assert_allclose(ours[:known], theirs[:known], rtol=1e-5, atol=1e-5)


def test_float16_does_not_overflow():
    rows, kernels = (array.astype(np.float16) for array in draw((8, 64), (1, 64, 8)))
    y = grouped_fp8.product(rows, kernels, jnp.array([8], jnp.int32))
    assert y.dtype == jnp.float16
    np.testing.assert_allclose(
        np.asarray(y, np.float64), rounded(rows, 1) @ rounded(kernels)[0], rtol=2e-3, atol=2e-3
    )


def test_kernels_for_hopper_can_be_made():
    rows, kernels, _ = arguments(inputs=256, outputs=384, dtype="float8_e4m3fn")
    turned = jax.ShapeDtypeStruct((4, 384, 256), kernels.dtype)
    sizes = jax.ShapeDtypeStruct((4,), "int32")

    def run(rows, turned, sizes):
        return grouped_hopper.product(rows, turned, sizes, transposed=True, dtype=jnp.bfloat16)

    lowered = jax.jit(run).trace(rows, turned, sizes).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("stablehlo.custom_call @mosaic_gpu") == 1
    assert jax.eval_shape(run, rows, turned, sizes).dtype == jnp.bfloat16


@pytest.mark.skipif(gpu_capability() != "9.0", reason="needs a Hopper GPU")
@pytest.mark.parametrize("sizes", MANY.values(), ids=list(MANY))
def test_on_a_hopper_gpu(sizes):
    random = np.random.default_rng(0)
    shapes = (ROWS, 256), (len(sizes), 256, 384), (ROWS, 384)
    rows, kernels, cotangents = (
        jnp.asarray(random.normal(size=shape), jnp.bfloat16) for shape in shapes
    )
    known = sum(sizes)
    rows, cotangents = (array.at[known:].set(jnp.nan) for array in (rows, cotangents))
    run = jax.jit(
        lambda *arrays: jax.vjp(
            lambda r, k: grouped_fp8.product(r, k, jnp.array(sizes), "gpu"), *arrays
        )
    )
    product, pull = run(rows, kernels)
    found = [product, *pull(cotangents)]
    rows, cotangents = (array.at[known:].set(0) for array in (rows, cotangents))
    right = roughly(
        *(np.asarray(array, np.float64) for array in (rows, kernels)),
        sizes,
        np.asarray(cotangents, float),
    )
    for ours, theirs, end in zip(found, right, (known, known, len(sizes)), strict=True):
        np.testing.assert_allclose(
            np.asarray(ours[:end], np.float64),
            theirs[:end],
            rtol=0.01,
            atol=0.01 * np.max(abs(theirs), initial=1),
        )
