"""bfloat16 x int8 matmuls with few rows against numpy in float64; interpreted unless there is a
GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode import small_batch_matmul as decode_matmul
from maxtext.kernels.weight_only import quantize_weight, weight_only_matmul

GPU = jax.default_backend() == "gpu"


def random_int8(random, *shape):
    return jnp.asarray(random.integers(-128, 128, shape), jnp.int8)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (1, 256, [512]),
        (1, 1024, [64, 16, 4]),  # one program
        (1, 768, [8]),  # tiles of 128 inputs
        (1, 8192, [4]),  # long: two warps
        (1, 8448, [4]),  # long, but not for two warps
        (3, 384, [128, 64]),
        (33, 128, [64]),
    ],
)
def test_matches_float64(rows, depth, columns):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, depth)), jnp.bfloat16)
    weights_T = [random_int8(random, count, depth) for count in columns]
    assert all(decode_matmul.supports(rows, depth, count, x.dtype) for count in columns)
    outputs = decode_matmul.small_batch_matmul(x, weights_T, interpret=not GPU)
    for weight_T, y in zip(weights_T, outputs, strict=True):
        expected = np.asarray(x, np.float64) @ np.asarray(weight_T, np.float64).T
        np.testing.assert_allclose(y, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("exponent", [-100, -60, 0, 60, 110])
def test_one_row_of_any_magnitude(exponent):
    """Neighbours of different magnitude, zeros, small and large values."""
    random = np.random.default_rng(1)
    x = random.normal(size=256) * 2.0 ** (exponent + random.integers(-6, 7, 256))
    x[8:16] = 0
    x = jnp.asarray(x, jnp.bfloat16)[None]
    weight_T = random_int8(random, 8, 256)
    [y] = decode_matmul.small_batch_matmul(x, [weight_T], interpret=not GPU)
    expected = np.asarray(x, np.float64) @ np.asarray(weight_T, np.float64).T
    np.testing.assert_allclose(y, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nonfinite_inputs_give_nonfinite_outputs(value):
    x = jnp.ones((1, 256), jnp.bfloat16).at[0, 5].set(value)
    weight_T = jnp.ones((4, 256), jnp.int8)
    [y] = decode_matmul.small_batch_matmul(x, [weight_T], interpret=not GPU)
    assert not np.isfinite(y).any()


@pytest.mark.parametrize("rows", [1, 8])
def test_kernels_lower_for_gpus(rows):
    x = jax.ShapeDtypeStruct((rows, 4096), "bfloat16")
    weight_T = jax.ShapeDtypeStruct((1024, 4096), "int8")
    run = jax.jit(lambda x, *weights_T: decode_matmul.small_batch_matmul(x, weights_T))
    text = run.trace(x, weight_T, weight_T).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == (1 if rows == 1 else 2)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "dtype", "supported"),
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
def test_supported_shapes(rows, depth, columns, dtype, supported):
    assert decode_matmul.supports(rows, depth, columns, dtype) == supported


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.slow
def test_weight_only_matmul_uses_the_kernel_on_a_gpu(monkeypatch, rows):
    """With weights of several input and output dimensions."""
    calls = []

    def run(x, weights_T, real=decode_matmul.small_batch_matmul):
        calls.append(len(weights_T))
        return real(x, weights_T, interpret=not GPU)

    monkeypatch.setattr(decode_matmul, "small_batch_matmul", run)
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, 1, 4, 64)), jnp.bfloat16)
    weights = [
        jnp.asarray(random.normal(size=(4, 64, *outputs)), jnp.bfloat16)
        for outputs in ((2, 64), (64,))
    ]
    quantized = [quantize_weight(weight, (0, 1), jnp.int8) for weight in weights]
    by_kernel, by_xla = (
        weight_only_matmul(x, quantized, 2, jnp.bfloat16, platform) for platform in ("gpu", "cpu")
    )
    assert calls == [2]
    assert [y.shape for y in by_kernel] == [(rows, 1, 2, 64), (rows, 1, 64)]
    for y, expected in zip(by_kernel, by_xla, strict=True):
        np.testing.assert_allclose(
            y.astype(float), expected.astype(float), atol=0.01 * np.abs(expected).max()
        )
    weight_only_matmul(x, weights, 2, jnp.bfloat16, "gpu")  # floating-point weights
    assert calls == [2]
