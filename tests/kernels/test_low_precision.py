"""Products in eight bits against numpy, with formats rounded by ml_dtypes."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxtext.kernels import low_precision
from maxtext.kernels.low_precision import power_of_two, products

OUTER, INPUTS, OUTPUTS = (2, 5), (3, 8), (4, 6)
VALUES, GRADIENTS = (ml_dtypes.float8_e4m3fn, 448.0), (ml_dtypes.float8_e5m2, 57344.0)


def problem(seed=0):
    random = np.random.default_rng(seed)
    shapes = ((*OUTER, *INPUTS), (*INPUTS, *OUTPUTS), (*OUTER, *OUTPUTS))
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def product(x, kernel, *others):
    return products(x, (kernel,), *others)[0]


def near(x, form):
    """What is left of x, in float64."""
    dtype, largest = form
    scale = 2.0 ** np.ceil(np.log2(np.float64(np.abs(x).max()) / largest))
    return (x / scale).astype(np.float32).astype(dtype).astype(np.float64) * scale


def whole(x, axes):
    """Rounded to integers of eight bits along axes."""
    scale = np.abs(x).max(axis=axes, keepdims=True).astype(np.float64) / 127
    return np.round(x / scale) * scale


def run(recipe, x, kernel, gradient, dtype=jnp.float32, platform=None):
    x, kernel = jnp.asarray(x), jnp.asarray(kernel)
    with jax.default_matmul_precision("highest"):  # of what is not rounded
        y, back = jax.vjp(lambda x, kernel: product(x, kernel, 2, recipe, dtype, platform), x, kernel)
        return (y, *back(jnp.asarray(gradient, dtype)))


def test_fp8():
    x, kernel, gradient = problem()
    rounded_x, rounded_kernel, rounded_gradient = near(x, VALUES), near(kernel, VALUES), near(gradient, GRADIENTS)
    right = (
        np.einsum("abij,ijkl->abkl", rounded_x, rounded_kernel),
        np.einsum("abkl,ijkl->abij", rounded_gradient, rounded_kernel),
        np.einsum("abij,abkl->ijkl", rounded_x, rounded_gradient),
    )
    for found, expected in zip(run("fp8", x, kernel, gradient), right, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_int8():
    x, kernel, gradient = problem()
    right = (
        np.einsum("abij,ijkl->abkl", whole(x, (2, 3)), whole(kernel, (0, 1))),
        np.einsum("abkl,ijkl->abij", whole(gradient, (2, 3)), whole(kernel, (2, 3))),
        np.einsum("abij,abkl->ijkl", x.astype(float), gradient.astype(float)),  # not rounded
    )
    for found, expected in zip(run("int8", x, kernel, gradient), right, strict=True):
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
    _, back = jax.vjp(lambda x, kernel: product(x, kernel, 2, "fp8", jnp.float32), jnp.asarray(x), jnp.asarray(kernel))
    kept = [leaf for leaf in jax.tree.leaves(back) if getattr(leaf, "size", 0) > 1]
    assert kept
    assert {leaf.dtype for leaf in kept} == {jnp.dtype("float8_e4m3fn")}


def test_sums_may_be_larger_than_float16_has():
    y = product(jnp.ones((4, 512), jnp.float16), jnp.ones((512, 8), jnp.float16), 1, "fp8", "float16")
    np.testing.assert_array_equal(y, np.full((4, 8), 512, np.float16))


@pytest.mark.parametrize("value", [0.0, 1.0, 1.0001, 3.0, 4.0, 1e-30, 1e38, np.inf])
def test_the_next_power_of_two(value):
    found = float(power_of_two(jnp.float32(value)))
    assert found == (value if value in (0, np.inf) else 2.0 ** np.ceil(np.log2(np.float64(np.float32(value)))))


@pytest.fixture
def turning(monkeypatch):
    """As on a GPU, interpreted."""
    monkeypatch.setattr(low_precision, "both_ways", partial(low_precision.both_ways, interpret=True))
    return "gpu"


def test_what_is_turned_gives_the_same(turning):
    """To the last digit: the same numbers are multiplied, and sums of them are exact here."""
    random = np.random.default_rng(0)
    shapes = (2, 64, 2, 128), (2, 128, 4, 32), (2, 128, 384), (2, 64, 4, 32), (2, 64, 384)
    x, *kernels, one, other = (random.integers(-8, 9, shape).astype(np.float32) for shape in shapes)

    def both(platform):
        y, back = jax.vjp(lambda *arrays: products(*arrays, 2, "fp8", jnp.float32, platform), x, tuple(kernels))
        return jax.tree.leaves((y, back((one, other))))

    for found, expected in zip(both(turning), both(None), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_cannot_be_turned_is_not(turning):
    found, expected = (run("fp8", *problem(), platform=platform) for platform in (turning, None))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_turning_can_be_lowered_for_gpus():
    x, kernel, gradient = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((256, 128), (128, 384), (256, 384)))

    def program(x, kernel, gradient):
        y, back = jax.vjp(lambda x, kernel: product(x, kernel, 1, "fp8", jnp.bfloat16, "gpu"), x, kernel)
        return y, back(gradient)

    text = jax.jit(program).trace(x, kernel, gradient).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 3
    assert text.count("stablehlo.transpose") == 0


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_turning_on_a_gpu():
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(256, 384)), jnp.bfloat16)
    for dtype in low_precision.FP8:
        numbers, turned = low_precision.both_ways(x, dtype)
        expected = low_precision.rounded(x, dtype)
        np.testing.assert_array_equal(np.asarray(numbers.numbers, np.float32), np.asarray(expected.numbers, np.float32))
        np.testing.assert_array_equal(
            np.asarray(turned.numbers, np.float32), np.asarray(expected.numbers, np.float32).T
        )
