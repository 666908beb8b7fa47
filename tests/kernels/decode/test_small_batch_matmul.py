"""bfloat16 matmuls with few rows and a quantized weight against numpy in float64, of the
dequantized weight; interpreted unless there is a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode import small_batch_matmul as decode_matmul
from maxtext.kernels.weight_matmul import weight_matmul
from maxtext.kernels.weight_only import (
    NF4,
    QuantizedWeight,
    pack,
    quantize_weight,
)

GPU = jax.default_backend() == "gpu"
FORMATS = ("fp8", "int8", "int4")


def random_weight(random, name, columns, depth):
    """A transposed weight of random codes, and its values in float64."""
    scale = random.uniform(0.5, 2, (columns, depth // 128 if name == "int4" else 1))
    scale = jnp.asarray(scale, jnp.float32)
    if name == "int4":
        codes = random.integers(-8, 8, (columns, depth))
        weight = QuantizedWeight(pack(jnp.asarray(codes + 8, jnp.int8)), scale, "int4")
    elif name == "int8":
        codes = random.integers(-128, 128, (columns, depth))
        weight = QuantizedWeight(jnp.asarray(codes, jnp.int8), scale)
    else:
        values = np.clip(random.normal(size=(columns, depth)) * 100, -448, 448)
        qvalue = jnp.asarray(values, jnp.float8_e4m3fn)
        codes = np.asarray(qvalue).astype(np.float64)
        weight = QuantizedWeight(qvalue, scale)
    repeated = np.repeat(np.asarray(scale, np.float64), depth // scale.shape[1], axis=1)
    return weight, codes * repeated


@pytest.mark.parametrize(
    ("rows", "depth", "columns"),
    [
        (1, 1024, [64, 16]),
        (1, 512, [16]),  # the smallest tiles
        (1, 8192, [16]),  # long
        (3, 384, [128, 64]),
        (33, 128, [64]),
    ],
)
@pytest.mark.parametrize("name", FORMATS)
def test_matches_float64(rows, depth, columns, name):
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, depth)), jnp.bfloat16)
    pairs = [random_weight(random, name, count, depth) for count in columns]
    weights_T = [weight for weight, _ in pairs]
    assert all(decode_matmul.supports(rows, weight_T, x.dtype) for weight_T in weights_T)
    outputs = decode_matmul.small_batch_matmul(x, weights_T, interpret=not GPU)
    for (_, values), y in zip(pairs, outputs, strict=True):
        expected = np.asarray(x, np.float64) @ values.T
        # One row is rounded to bfloat16.
        tolerance = 2**-8 if rows == 1 else 1e-5
        np.testing.assert_allclose(
            np.asarray(y, np.float64), expected, atol=tolerance * np.abs(expected).max()
        )


@pytest.mark.parametrize("exponent", [-100, -60, 0, 60, 100])
@pytest.mark.parametrize("name", FORMATS)
def test_one_row_of_any_magnitude(exponent, name):
    """Neighbours of different magnitude, zeros, small and large values."""
    random = np.random.default_rng(1)
    x = random.normal(size=512) * 2.0 ** (exponent + random.integers(-6, 7, 512))
    x[8:16] = 0
    x = jnp.asarray(x, jnp.bfloat16)[None]
    weight_T, values = random_weight(random, name, 16, 512)
    [y] = decode_matmul.small_batch_matmul(x, [weight_T], interpret=not GPU)
    expected = np.asarray(x, np.float64) @ values.T
    np.testing.assert_allclose(
        np.asarray(y, np.float64), expected, atol=2**-8 * np.abs(expected).max()
    )


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", FORMATS)
def test_nonfinite_inputs_give_nonfinite_outputs(value, name):
    x = jnp.ones((1, 512), jnp.bfloat16).at[0, 5].set(value)
    weight_T, _ = random_weight(np.random.default_rng(0), name, 16, 512)
    [y] = decode_matmul.small_batch_matmul(x, [weight_T], interpret=not GPU)
    assert not np.isfinite(np.asarray(y, np.float32)).any()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", FORMATS)
def test_kernels_lower_for_gpus(rows, name):
    x = jax.ShapeDtypeStruct((rows, 4096), "bfloat16")
    weight_T, _ = random_weight(np.random.default_rng(0), name, 64, 4096)
    run = jax.jit(lambda x, *weights_T: decode_matmul.small_batch_matmul(x, weights_T))
    text = run.trace(x, weight_T, weight_T).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call") == 2


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "name", "supported"),
    [
        (1, 4096, 128256, "int8", True),
        (1, 4096, 4096, "int4", True),
        (64, 4096, 4096, "int8", True),
        (65, 4096, 4096, "int8", False),
        (1, 4096, 501, "int8", False),
        (1, 128, 512, "int8", False),
        (2, 4096, 500, "fp8", False),
        (2, 4096, 64, NF4, False),
    ],
)
def test_supported_shapes(rows, depth, columns, name, supported):
    packed = name in ("int4", NF4)
    dtype = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}.get(name, jnp.uint8)
    weight_T = QuantizedWeight(
        jax.ShapeDtypeStruct((columns, depth // 2 if packed else depth), dtype),
        jax.ShapeDtypeStruct((columns, depth // 128 if packed else 1), jnp.float32),
        name if packed else "",
    )
    assert decode_matmul.supports(rows, weight_T, jnp.bfloat16) == supported
    assert not decode_matmul.supports(rows, weight_T, jnp.float32)


def test_fp8_needs_instructions_that_convert_it():
    weight_T, _ = random_weight(np.random.default_rng(0), "fp8", 64, 512)
    for rows in (1, 2):
        assert not decode_matmul.supports(rows, weight_T, jnp.bfloat16, "8.0")
        assert decode_matmul.supports(rows, weight_T, jnp.bfloat16, "8.9")


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.slow
def test_weight_matmul_uses_the_kernel_on_a_gpu(monkeypatch, rows):
    """With weights of several input and output dimensions."""
    calls = []

    def run(x, weights_T, real=decode_matmul.small_batch_matmul):
        calls.append(len(weights_T))
        return real(x, weights_T, interpret=not GPU)

    monkeypatch.setattr(decode_matmul, "small_batch_matmul", run)
    monkeypatch.setattr("maxtext.kernels.weight_matmul.target_capability", lambda: "9.0")
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(rows, 1, 4, 128)), jnp.bfloat16)
    weights = [
        jnp.asarray(random.normal(size=(4, 128, *outputs)), jnp.bfloat16)
        for outputs in ((2, 64), (64,))
    ]
    quantized = [quantize_weight(weight, (0, 1), "int8") for weight in weights]
    by_kernel, by_xla = (
        weight_matmul(x, quantized, 2, jnp.bfloat16, platform) for platform in ("gpu", "cpu")
    )
    assert calls == [2]
    assert [y.shape for y in by_kernel] == [(rows, 1, 2, 64), (rows, 1, 64)]
    for y, expected in zip(by_kernel, by_xla, strict=True):
        np.testing.assert_allclose(
            y.astype(float), expected.astype(float), atol=0.01 * np.abs(expected).max()
        )
    weight_matmul(x, weights, 2, jnp.bfloat16, "gpu")  # floating-point weights
    assert calls == [2]
