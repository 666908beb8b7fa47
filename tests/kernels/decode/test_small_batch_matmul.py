"""Products of few rows with integers against numpy's in float64; interpreted, unless there is a
GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode import small_batch_matmul as decode_matmul
from maxtext.kernels.quantized import products, quantized

GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize(
    ("rows", "depth", "widths"),
    [
        (1, 256, [512]),
        (1, 1024, [64, 16, 4]),  # by one program
        (1, 768, [8]),  # tiles of 128 lines
        (1, 8192, [4]),  # long: two warps
        (1, 8448, [4]),  # long, but not for two warps
        (3, 384, [128, 64]),
        (33, 128, [64]),
    ],
)
def test_products(rows, depth, widths):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, depth)), jnp.bfloat16)
    kernels = [
        jnp.asarray(random.integers(-128, 128, (width, depth)), jnp.int8) for width in widths
    ]
    assert all(decode_matmul.supports(rows, depth, width, x.dtype) for width in widths)
    for kernel, found in zip(
        kernels, decode_matmul.small_batch_matmul(x, kernels, interpret=not GPU), strict=True
    ):
        right = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
        np.testing.assert_allclose(found, right, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("exponent", [-100, -60, 0, 60, 110])
def test_one_row_of_any_magnitude(exponent):
    """Neighbours that differ much, zeros, small and large numbers."""
    random = np.random.default_rng(1)
    x = random.normal(size=256) * 2.0 ** (exponent + random.integers(-6, 7, 256))
    x[8:16] = 0
    x = jnp.asarray(x, jnp.bfloat16)[None]
    kernel = jnp.asarray(random.integers(-128, 128, (8, 256)), jnp.int8)
    [found] = decode_matmul.small_batch_matmul(x, [kernel], interpret=not GPU)
    right = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    np.testing.assert_allclose(found, right, atol=1e-4 * np.abs(right).max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so(value):
    x = jnp.ones((1, 256), jnp.bfloat16).at[0, 5].set(value)
    [found] = decode_matmul.small_batch_matmul(x, [jnp.ones((4, 256), jnp.int8)], interpret=not GPU)
    assert not np.isfinite(found).any()


@pytest.mark.parametrize("rows", [1, 8])
def test_they_can_be_lowered_for_gpus(rows):
    x, kernel = (
        jax.ShapeDtypeStruct((rows, 4096), "bfloat16"),
        jax.ShapeDtypeStruct((1024, 4096), "int8"),
    )
    run = jax.jit(lambda x, one, other: decode_matmul.small_batch_matmul(x, [one, other]))
    text = run.trace(x, kernel, kernel).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == (1 if rows == 1 else 2)


@pytest.mark.parametrize(
    ("rows", "depth", "width", "dtype", "right"),
    [
        (1, 4096, 128256, "bfloat16", True),
        (64, 4096, 4096, "bfloat16", True),
        (65, 4096, 4096, "bfloat16", False),
        (1, 4096, 4096, "float32", False),
        (1, 4096, 501, "bfloat16", False),
        (1, 128, 512, "bfloat16", False),
        (2, 4096, 500, "bfloat16", False),
    ],
)
def test_what_they_are_for(rows, depth, width, dtype, right):
    assert decode_matmul.supports(rows, depth, width, dtype) == right


@pytest.mark.parametrize("rows", [1, 2])
def test_layers_come_to_them_on_a_gpu(monkeypatch, rows):
    """Kernels of several dimensions, as an ordinary product has them."""
    calls = []

    def run(x, kernels, real=decode_matmul.small_batch_matmul):
        calls.append(len(kernels))
        return real(x, kernels, interpret=not GPU)

    monkeypatch.setattr(decode_matmul, "small_batch_matmul", run)
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, 1, 4, 64)), jnp.bfloat16)
    kernels = [
        jnp.asarray(random.normal(size=(4, 64, *size)), jnp.bfloat16) for size in ((2, 64), (64,))
    ]
    integers = [quantized(kernel, (0, 1), jnp.int8) for kernel in kernels]
    near, usual = (products(x, integers, 2, jnp.bfloat16, platform) for platform in ("gpu", "cpu"))
    assert calls == [2]
    assert [y.shape for y in near] == [(rows, 1, 2, 64), (rows, 1, 64)]
    for one, other in zip(near, usual, strict=True):
        np.testing.assert_allclose(
            one.astype(float), other.astype(float), atol=0.01 * np.abs(other).max()
        )
    products(x, kernels, 2, jnp.bfloat16, "gpu")  # floats
    assert calls == [2]
