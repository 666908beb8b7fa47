"""Matmuls of few rows with chosen experts against numpy in float64; interpreted unless there is a
GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode import experts
from maxtext.kernels.decode.experts import ExpertMatrix, expert_matmul, fp8_rows
from maxtext.kernels.decode.tiles import Tiles
from maxtext.kernels.weight_only import MXFP4, QuantizedWeight, quantize_weight

GPU = jax.default_backend() == "gpu"


def draw(*shape, seed=0, dtype=jnp.bfloat16):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def float64(x):
    return np.asarray(x, np.float64)


def choose_experts(rows, choices, count):
    random = np.random.default_rng(1)
    return np.stack([random.permutation(count)[:choices] for _ in range(rows)])


def expected_product(x, expert_ids, matrix):
    """[A, N], zeros where there is no expert."""
    weight, per_row = matrix.weight, expert_ids.size // len(x)
    if isinstance(weight, QuantizedWeight):
        weight = weight.astype(jnp.float32)
    weight = float64(weight)
    products = np.zeros((expert_ids.size, weight.shape[-1]))
    for index, expert in enumerate(expert_ids.reshape(-1)):
        if expert < len(weight):
            product = float64(x[index // per_row]) @ weight[expert]
            scale = 1 if matrix.scale is None else float64(matrix.scale[expert])
            bias = 0 if matrix.bias is None else float64(matrix.bias[expert])
            products[index] = product * scale + bias
    return products


@pytest.mark.parametrize(
    ("rows", "choices", "count", "depth", "columns"),
    [
        (1, 4, 8, 64, 96),
        (5, 4, 32, 128, 64),
        (20, 2, 4, 64, 160),  # more assignments than experts, and more than a tile has rows
        (40, 3, 3, 96, 64),
    ],
    ids=["one row", "programs by assignment", "programs by expert", "every expert"],
)
def test_gated_product(rows, choices, count, depth, columns):
    x = draw(rows, depth)
    expert_ids = choose_experts(rows, choices, count)
    if rows > 1:
        expert_ids[1] = count  # a row without experts
    gate, up = (
        ExpertMatrix(
            draw(count, depth, columns, seed=seed) / 8, bias=draw(count, columns, seed=seed + 9)
        )
        for seed in (2, 3)
    )
    actual = expert_matmul(
        x,
        jnp.asarray(expert_ids.reshape(-1)),
        [gate, up],
        lambda products: jax.nn.silu(products[0]) * products[1],
        interpret=not GPU,
    )
    gated, linear = (expected_product(x, expert_ids, matrix) for matrix in (gate, up))
    expected = gated / (1 + np.exp(-gated)) * linear
    has_expert = expert_ids.reshape(-1) < count
    np.testing.assert_allclose(
        float64(actual)[has_expert],
        expected[has_expert],
        rtol=2**-7,
        atol=2**-8 * np.abs(expected).max(),
    )


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_weights_of_one_byte_with_scales(dtype):
    """Each assignment has an input row of its own, as the hidden states of experts have."""
    expert_ids = choose_experts(6, 2, 4).reshape(-1)
    x = draw(len(expert_ids), 64)
    weight = jnp.round(20 * draw(4, 64, 64, seed=5, dtype=jnp.float32)).astype(dtype)
    matrix = ExpertMatrix(weight, scale=jnp.abs(draw(4, 64, seed=6, dtype=jnp.float32)) / 100)
    actual = expert_matmul(
        x, jnp.asarray(expert_ids), [matrix], lambda products: products[0], interpret=not GPU
    )
    expected = expected_product(x, expert_ids, matrix)
    np.testing.assert_allclose(
        float64(actual), expected, rtol=2**-7, atol=2**-8 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("rows", "choices", "count", "depth", "columns"),
    [
        (1, 4, 8, 256, 64),  # one step of eight groups
        (5, 2, 4, 96, 32),  # fewer groups than a step has
        (20, 2, 4, 288, 96),  # a whole step and one group more
    ],
)
def test_mxfp4(rows, choices, count, depth, columns):
    x = draw(rows, depth)
    expert_ids = choose_experts(rows, choices, count)
    matrices = [
        ExpertMatrix(
            quantize_weight(draw(count, depth, columns, seed=seed) / 8, (1,), MXFP4),
            bias=draw(count, columns, seed=seed + 9),
        )
        for seed in (2, 3)
    ]
    actual = expert_matmul(
        x,
        jnp.asarray(expert_ids.reshape(-1)),
        matrices,
        lambda products: products[0] - 2 * products[1],
        interpret=not GPU,
    )
    first, second = (expected_product(x, expert_ids, matrix) for matrix in matrices)
    expected = first - 2 * second
    np.testing.assert_allclose(
        float64(actual), expected, rtol=2**-7, atol=2**-8 * np.abs(expected).max()
    )


@pytest.mark.parametrize("packed", ["", MXFP4])
@pytest.mark.parametrize("rows", [1, 12])
def test_spans_of_inputs_are_added(packed, rows):
    """Spans of one step, the last of which is empty."""
    expert_ids = choose_experts(rows, 2, 6)
    x = draw(rows, 5 * 64)
    weight = draw(6, 5 * 64, 64, dtype=jnp.float32)
    if packed:
        weight = quantize_weight(weight, (1,), packed)
        scale = None
    else:
        weight = weight.astype(jnp.float8_e4m3fn)
        scale = jnp.abs(draw(6, 64, seed=6, dtype=jnp.float32))
    matrices = [ExpertMatrix(weight, scale, draw(6, 64, seed=seed)) for seed in (7, 8)]
    actual = expert_matmul(
        x,
        jnp.asarray(expert_ids.reshape(-1)),
        matrices,
        lambda products: products[0] * products[1],
        Tiles(columns=32, depth=64, warps=4),
        spans=4,
        interpret=not GPU,
    )
    first, second = (expected_product(x, expert_ids, matrix) for matrix in matrices)
    expected = first * second
    np.testing.assert_allclose(
        float64(actual), expected, rtol=2**-7, atol=2**-8 * np.abs(expected).max()
    )


def test_rows_in_fp8_have_the_precision_of_bfloat16():
    x = draw(7, 96) * 2.0 ** draw(7, 1, seed=1)
    x = x.at[0].set(0).at[1, 0].set(2.0**100)
    parts, scale = jax.jit(fp8_rows)(x)  # compilers elide casts that they take for nothing
    high, low = float64(parts)
    actual = (high + low / 16) * float64(scale)[:, None]
    expected = float64(x)
    amax = np.abs(expected).max(axis=1, keepdims=True)
    is_large = np.abs(expected) > 2.0**-14 * amax
    np.testing.assert_array_equal(actual[is_large], expected[is_large])
    assert np.all(np.abs(actual - expected) <= 2.0**-17 * amax)


@pytest.mark.skipif(not GPU, reason="the instructions are a GPU's; others emulate them")
def test_every_code_of_mxfp4_has_its_value():
    """One input of x at a time is 1, so that each product is a weight."""
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(1, 16, 16)
    weight = QuantizedWeight(
        jnp.tile(codes, (1, 2, 1)), jnp.full((1, 32, 1), 125, jnp.uint8), MXFP4
    )
    ones = jnp.eye(32, dtype=jnp.bfloat16)
    actual = expert_matmul(ones, jnp.zeros(32, jnp.int32), [ExpertMatrix(weight)], lambda p: p[0])
    np.testing.assert_array_equal(float64(actual), float64(weight.astype(jnp.float32)[0]))


@pytest.mark.parametrize(
    ("assignments", "shape", "dtype", "weight_dtype", "supported"),
    [
        (8, (128, 2048, 768), "bfloat16", "bfloat16", True),
        (8, (32, 2880, 2880), "bfloat16", "int8", True),
        (4096, (128, 2048, 768), "bfloat16", "bfloat16", False),
        (8, (128, 2048, 750), "bfloat16", "bfloat16", False),
        (8, (128, 2048, 768), "float32", "float32", False),
        (8, (256, 7168, 2048), "bfloat16", "bfloat16", False),  # indices have 31 bits
        (8, (32, 2880, 2880), "bfloat16", "float8_e4m3fn", True),
    ],
)
def test_supports(assignments, shape, dtype, weight_dtype, supported):
    assert experts.supports(assignments, shape, dtype, weight_dtype) == supported
