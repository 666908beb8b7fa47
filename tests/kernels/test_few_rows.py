"""Products of few rows against numpy's in float64; interpreted, unless there is a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels import few_rows
from maxtext.kernels.quantized import product, quantized

GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize(
    ("rows", "depth", "width", "dtype"),
    [
        (1, 256, 512, "int8"),
        (1, 256, 384, "int8"),  # tiles of 128 columns
        (1, 128, 768, "bfloat16"),
        (1, 4096, 1024, "bfloat16"),
        (3, 384, 256, "int8"),
        (33, 128, 128, "int8"),
    ],
)
def test_products(rows, depth, width, dtype):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, depth)), jnp.bfloat16)
    kernel = jnp.asarray(random.integers(-128, 128, (depth, width)), dtype)
    assert few_rows.supports(rows, depth, width, x.dtype, kernel.dtype)
    found = few_rows.product(x, kernel, interpret=not GPU)
    right = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(found, right, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 8])
def test_they_can_be_lowered_for_gpus(rows, dtype):
    x, kernel = jax.ShapeDtypeStruct((rows, 4096), "bfloat16"), jax.ShapeDtypeStruct((4096, 1024), dtype)
    text = jax.jit(few_rows.product).trace(x, kernel).lower(lowering_platforms=("cuda",)).as_text()
    assert "product_of_few_rows" in text


@pytest.mark.parametrize(
    ("rows", "depth", "width", "x", "kernel", "right"),
    [
        (1, 4096, 128256, "bfloat16", "bfloat16", True),
        (2, 4096, 4096, "bfloat16", "bfloat16", False),  # the compiler's own is as good
        (64, 4096, 4096, "bfloat16", "int8", True),
        (65, 4096, 4096, "bfloat16", "int8", False),
        (1, 4096, 4096, "float32", "float32", False),
        (1, 4096, 4096, "bfloat16", "float16", False),
        (1, 4096, 500, "bfloat16", "bfloat16", False),
        (1, 100, 512, "bfloat16", "int8", False),
    ],
)
def test_what_they_are_for(rows, depth, width, x, kernel, right):
    assert few_rows.supports(rows, depth, width, x, kernel) == right


def test_layers_come_to_them_on_a_gpu(monkeypatch):
    """Kernels of several dimensions, in integers with scales and in floats, as an ordinary product has them."""
    monkeypatch.setattr(few_rows, "product", lambda x, kernel, real=few_rows.product: real(x, kernel, not GPU))
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(1, 1, 4, 64)), jnp.bfloat16)
    kernel = jnp.asarray(random.normal(size=(4, 64, 2, 256)), jnp.bfloat16)
    for each in (kernel, quantized(kernel, (0, 1), jnp.int8)):
        near, usual = (product(x, each, 2, jnp.bfloat16, platform) for platform in ("gpu", "cpu"))
        assert near.shape == (1, 1, 2, 256)
        np.testing.assert_allclose(near.astype(float), usual.astype(float), atol=0.02 * np.abs(usual).max())
