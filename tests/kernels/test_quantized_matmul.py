"""Products in eight bits against numpy, with formats rounded by ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.kernels.fp8.quantize import ceil_power_of_two
from maxtext.kernels.quantized_matmul import quantized_matmul

OUTER, INPUTS, OUTPUTS = (2, 5), (3, 8), (4, 6)
VALUES, GRADIENTS = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)


def problem(seed=0):
    random = np.random.default_rng(seed)
    shapes = ((*OUTER, *INPUTS), (*INPUTS, *OUTPUTS), (*OUTER, *OUTPUTS))
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def product(x, kernel, *others):
    return quantized_matmul(x, (kernel,), *others)[0]


def near(x, form, outer=0):
    """What is left of x, in float64, with a scale for each place in the first dimensions, and the
    scales.
    """
    dtype, largest = form
    most = np.abs(x).max(axis=tuple(range(outer, x.ndim)), keepdims=True).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(most / largest))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale, scale


def whole(x, axes):
    """Rounded to integers of eight bits along axes."""
    scale = np.abs(x).max(axis=axes, keepdims=True).astype(np.float64) / 127
    return np.round(x / scale) * scale


def run(recipe, x, kernel, gradient, dtype=jnp.float32, platform=None):
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    with jax.default_matmul_precision("highest"):  # of what is not rounded
        y, back = jax.vjp(
            lambda x, kernel: product(x, kernel, 2, recipe, dtype, platform), x, kernel
        )
        return (y, *back(jnp.asarray(gradient, dtype)))


def test_fp8():
    """Tokens differ in size by four orders of magnitude, which one scale for all would not bear."""
    x, kernel, gradient = problem()
    x *= 10.0 ** np.linspace(-4, 0, 10, dtype=np.float32).reshape(2, 5, 1, 1)
    (rounded_x, scales), (rounded_kernel, _) = near(x, VALUES, 2), near(kernel, VALUES)
    rounded_gradient, gradient_scales = near(gradient, GRADIENTS, 2)
    # Where tokens are added up, their scales are part of the gradient, and so it is rounded again.
    relative = scales * gradient_scales / (scales * gradient_scales).max()
    again = (
        (rounded_gradient / gradient_scales * relative)
        .astype(np.float32)
        .astype(GRADIENTS[0])
        .astype(np.float64)
    )
    again = again / relative * gradient_scales
    right = (
        np.einsum("abij,ijkl->abkl", rounded_x, rounded_kernel),
        np.einsum("abkl,ijkl->abij", rounded_gradient, rounded_kernel),
        np.einsum("abij,abkl->ijkl", rounded_x, again),
    )
    for found, expected in zip(run("fp8", x, kernel, gradient), right, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
        close = np.abs(found - expected).max(axis=(2, 3)) <= 1e-5 * np.abs(expected).max(
            axis=(2, 3)
        )
        assert close.all()  # each token, however small


def test_tokens_without_a_gradient_do_not_count():
    """Their scale must not be the largest: it would leave nothing of the others where tokens are
    added up.
    """
    x, kernel, gradient = problem()
    gradient *= 1e-9
    some = np.zeros((*OUTER, 1, 1), np.float32)
    some[0, :3] = 1
    _, _, all_of_kernel = run("fp8", x[:1, :3], kernel, gradient[:1, :3])
    _, of_x, of_kernel = run("fp8", x, kernel, gradient * some)
    np.testing.assert_allclose(
        of_kernel, all_of_kernel, rtol=1e-5, atol=1e-6 * np.abs(all_of_kernel).max()
    )
    assert not np.any(of_x[1])
    assert np.abs(of_kernel).max() > 1e-9


@pytest.mark.parametrize("platform", [None, "gpu"])
def test_int8(platform):
    x, kernel, gradient = problem()
    right = (
        np.einsum("abij,ijkl->abkl", whole(x, (2, 3)), whole(kernel, (0, 1))),
        np.einsum("abkl,ijkl->abij", whole(gradient, (2, 3)), whole(kernel, (2, 3))),
        np.einsum("abij,abkl->ijkl", x.astype(float), gradient.astype(float)),  # not rounded
    )
    for found, expected in zip(
        run("int8", x, kernel, gradient, platform=platform), right, strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("recipe", "closeness"), [("fp8", 0.08), ("int8", 0.02)])
def test_they_are_close_to_exact_products(recipe, closeness):
    """Within what three or seven bits of a fraction leave, on average over a sum."""
    x, kernel, gradient = problem(1)
    exact = (
        np.einsum("abij,ijkl->abkl", x, kernel),
        np.einsum("abkl,ijkl->abij", gradient, kernel),
        np.einsum("abij,abkl->ijkl", x, gradient),
    )
    for found, expected in zip(run(recipe, x, kernel, gradient), exact, strict=True):
        assert np.std(found - expected) < closeness * np.std(expected)


@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_dtypes_are_kept_and_zeros_are_zeros(recipe):
    x, kernel, gradient = problem()
    y, of_x, of_kernel = run(recipe, jnp.asarray(x, jnp.bfloat16), kernel, gradient, jnp.bfloat16)
    assert (y.dtype, of_x.dtype, of_kernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert all(not np.any(each) for each in run(recipe, 0 * x, kernel, 0 * gradient))


@pytest.mark.parametrize("recipe", ["fp8", "int8"])
def test_numbers_that_are_none_stay_none(recipe):
    """The guard of training must see them."""
    x, kernel, gradient = problem()
    x[0, 0, 0, 0] = np.nan
    assert not np.isfinite(run(recipe, x, kernel, gradient)[0][0, 0]).any()


def test_only_eight_bits_are_kept():
    """For the backward pass of fp8."""
    x, kernel, _ = problem()
    _, back = jax.vjp(
        lambda x, kernel: product(x, kernel, 2, "fp8", jnp.float32),
        jnp.asarray(x),
        jnp.asarray(kernel),
    )
    kept = [
        leaf for leaf in jax.tree.leaves(back) if getattr(leaf, "size", 0) > 10
    ]  # as many scales as tokens
    assert kept
    assert {leaf.dtype for leaf in kept} == {jnp.dtype("float8_e4m3fn")}


def test_sums_may_be_larger_than_float16_has():
    y = product(
        jnp.ones((4, 512), jnp.float16), jnp.ones((512, 8), jnp.float16), 1, "fp8", "float16"
    )
    np.testing.assert_array_equal(y, np.full((4, 8), 512, np.float16))


@pytest.mark.parametrize("value", [0.0, 1.0, 1.0001, 3.0, 4.0, 1e-30, 1e38, np.inf])
def test_the_next_power_of_two(value):
    found = float(ceil_power_of_two(jnp.float32(value)))
    assert found == (
        value if value in (0, np.inf) else 2.0 ** np.ceil(np.log2(np.float64(np.float32(value))))
    )
