"""RMS norms against the formula, differentiated by JAX; Triton kernels are interpreted unless there
is a GPU.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.rms_norm import (
    add_rms_norm_rows,
    rms_norm,
    rms_norm_rows,
    rms_norm_rows_backward,
)

EPSILON = 1e-5
INTERPRET = jax.default_backend() != "gpu"
backward_rows = partial(rms_norm_rows_backward, interpret=INTERPRET)


def problem(rows, columns, dtype=jnp.float32):
    """x, scale, and the gradients of the norm and of the residual."""
    random = np.random.default_rng(0)
    x, dn, dresidual = (
        jnp.asarray(random.normal(size=(rows, columns)) * 3, dtype) for _ in range(3)
    )
    return x, jnp.asarray(random.normal(size=columns), jnp.float32), dn, dresidual


def reference(x, scale):
    x = x.astype(jnp.float32)
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + EPSILON) * scale


def assert_close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("columns", [128, 384, 2048])
def test_rms_norm_and_its_gradients(columns):
    x, scale, dn, _ = problem(256, columns)
    y, vjp = jax.vjp(lambda x, scale: rms_norm(x, scale, EPSILON, jnp.float32), x, scale)
    expected, expected_vjp = jax.vjp(reference, x, scale)
    for actual, right in zip((y, *vjp(dn)), (expected, *expected_vjp(dn)), strict=True):
        assert_close(actual, right)


@pytest.mark.parametrize("columns", [128, 384, 2048])
def test_triton_norm_and_its_gradients(columns):
    """dresidual is added to dx."""
    x, scale, dn, dresidual = problem(256, columns)
    y, inverse_rms = rms_norm_rows(x, scale, EPSILON, jnp.float32, interpret=INTERPRET)
    dx, dscale, amax = backward_rows(x, dn, dresidual, inverse_rms, scale)
    (_, expected), vjp = jax.vjp(lambda x, scale: (x, reference(x, scale)), x, scale)
    expected_dx, expected_dscale = vjp((dresidual, dn))
    for actual, right in ((y, expected), (dx, expected_dx), (dscale, expected_dscale)):
        assert_close(actual, right)
    np.testing.assert_allclose(amax, np.abs(dx).max(axis=1), rtol=1e-6)


def test_add_rms_norm_rows():
    x, scale, y, _ = problem(128, 384)
    factor = jnp.asarray(2.0 ** np.random.default_rng(1).integers(-4, 5, 128), jnp.float32)
    total, normed, _ = add_rms_norm_rows(
        x, y, factor, scale, EPSILON, jnp.float32, interpret=INTERPRET
    )
    assert_close(total, x + y * factor[:, None])
    assert_close(normed, reference(x + y * factor[:, None], scale))


def test_triton_backward_equals_xla_in_bfloat16():
    """But for the last digit: XLA rounds dx of the norm before it adds dresidual."""
    x, scale, dn, dresidual = problem(128, 256, jnp.bfloat16)
    _, inverse_rms = rms_norm_rows(x, scale, EPSILON, jnp.bfloat16, interpret=INTERPRET)
    dx, dscale, _ = backward_rows(x, dn, dresidual, inverse_rms, scale)
    _, vjp = jax.vjp(lambda x, scale: (x, rms_norm(x, scale, EPSILON, jnp.bfloat16)), x, scale)
    expected_dx, expected_dscale = vjp((dresidual, dn))
    assert dx.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        dx.astype(np.float32), expected_dx.astype(np.float32), rtol=2**-7, atol=0.05
    )
    np.testing.assert_allclose(dscale, expected_dscale, rtol=1e-4, atol=1e-4)


def test_row_factor():
    x, scale, dn, dresidual = problem(128, 256)
    inverse_rms = jnp.asarray(1 / np.sqrt(np.mean(np.square(x), axis=1) + EPSILON))
    factor = jnp.asarray(2.0 ** np.random.default_rng(1).integers(-4, 5, 128), jnp.float32)
    scaled = backward_rows(x, dn, dresidual, inverse_rms, scale, factor)
    expected = backward_rows(x, dn * factor[:, None], dresidual, inverse_rms, scale)
    for actual, right in zip(scaled, expected, strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5)


def test_kernels_lower_for_gpus():
    x, scale = (
        jax.ShapeDtypeStruct((256, 1408), "bfloat16"),
        jax.ShapeDtypeStruct((1408,), "float32"),
    )

    def program(x, scale):
        y, inverse_rms = rms_norm_rows(x, scale, EPSILON, jnp.bfloat16)
        return rms_norm_rows_backward(x, y, x, inverse_rms, scale)

    text = jax.jit(program).trace(x, scale).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 2
