"""fp8 and int8 matmuls and their gradients at odd shapes, against float64, within error bounds that
follow from the formats.

A format with m mantissa bits rounds x with scale s to x', |x' - x| <= max(2^-(m + 1) |x|, s step /
2), where `step` is its smallest number; integers have |x' - x| <= s / 2. The error of a matmul of
rounded factors is then at most sum(e_x |w| + |x| e_w + e_x e_w), plus that of a float32 sum.

Shapes: T tokens, K inputs, M outputs, X experts.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.fp8.grouped_matmul import grouped_matmul_fp8
from maxtext.kernels.quantized_matmul import quantized_matmul

E4M3, E5M2 = (3, 2.0**-9, 448.0), (2, 2.0**-16, 57344.0)  # mantissa bits, smallest number, largest
SUM_ERROR = 2.0**-20  # of a float32 sum, relative to the sum of magnitudes
PLATFORM = "gpu" if jax.default_backend() == "gpu" else None
# (outer dimensions, inputs, outputs of each weight): not multiples of a tile, one row, one column,
# an odd vocabulary
SHAPES = [
    ((1,), 1, (1,)),
    ((1, 1), 129, (7, 1)),
    ((3, 5), 31, (257,)),
    ((1, 127), 97, (1, 130, 3)),
    ((2, 1, 3), 33, (5_003,)),
    ((7,), 255, (255, 1)),
    ((16,), 33, (5_008,)),
]


@pytest.fixture(autouse=True)
def _full_matmul_precision():
    with jax.default_matmul_precision("highest"):
        yield


def power_of_two_scale(x, axes, largest):
    """The least scale that brings magnitudes below `largest`; 0 for zeros, which are exact with any
    scale.
    """
    amax = np.abs(x).max(axis=axes, keepdims=True)
    return np.where(amax > 0, 2.0 ** np.ceil(np.log2(np.where(amax > 0, amax, 1) / largest)), 0)


def fp8_error(x, scale, form):
    bits, step, _ = form
    return np.maximum(2.0 ** -(bits + 1) * np.abs(x), scale * step / 2)


def int8_error(x, axes):
    return np.broadcast_to(np.abs(x).max(axis=axes, keepdims=True) / 254, x.shape)


def matmul_bound(x, x_error, w, w_error):
    """[T, M]: of x [T, K] times w [K, M]."""
    x, w = np.abs(x), np.abs(w)
    return x_error @ w + x @ w_error + x_error @ w_error + SUM_ERROR * (x @ w)


def draw(outer, inputs, outputs, seed):
    """Tokens of magnitudes from 1e-3 to 1, some of them zero, and gradients from 1e-9 to 1e-6."""
    random = np.random.default_rng(seed)
    tokens = int(np.prod(outer))
    x = random.normal(size=(tokens, inputs)) * 10.0 ** random.uniform(-3, 0, (tokens, 1))
    x[random.random(tokens) < 0.1] = 0
    weights = [random.normal(size=(inputs, columns)) * inputs**-0.5 for columns in outputs]
    dys = [
        random.normal(size=(tokens, columns)) * 10.0 ** random.uniform(-9, -6, (tokens, 1))
        for columns in outputs
    ]
    for dy in dys:
        dy[random.random(tokens) < 0.1] = 0
    return [
        np.float64(np.float32(x)),
        *([np.float64(np.float32(x)) for x in arrays] for arrays in (weights, dys)),
    ]


def run_matmuls(precision, outer, x, weights, dys):
    """ys, dx and dws in float64."""

    @functools.partial(jax.jit, static_argnums=3)
    def run(x, weights, dys, outer):
        x = x.reshape(*outer, -1)
        ys, vjp = jax.vjp(
            lambda x, w: quantized_matmul(x, w, 1, precision, jnp.float32, PLATFORM),
            x,
            tuple(weights),
        )
        dx, dws = vjp(tuple(dy.reshape(*outer, -1) for dy in dys))
        return [y.reshape(-1, y.shape[-1]) for y in ys], dx.reshape(-1, dx.shape[-1]), dws

    arrays = (
        jnp.asarray(x, jnp.float32),
        *([jnp.asarray(x, jnp.float32) for x in arrays] for arrays in (weights, dys)),
    )
    return jax.tree.map(lambda array: np.asarray(array, np.float64), run(*arrays, outer))


def assert_within(actual, expected, bound):
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    excess = np.abs(actual - expected) - bound
    assert (excess <= 0).all(), (
        f"{(excess > 0).sum()} of {excess.size} values exceed the bound by up to {excess.max():.3g}"
    )


@pytest.mark.parametrize(("outer", "inputs", "outputs"), SHAPES)
def test_fp8_gradients_are_within_the_error_bound(outer, inputs, outputs):
    x, weights, dys = draw(outer, inputs, outputs, seed=inputs)
    ys, dx, dws = run_matmuls("fp8", outer, x, weights, dys)
    x_scale = power_of_two_scale(x, 1, E4M3[2])
    w_scale = max(power_of_two_scale(w, None, E4M3[2]).item() for w in weights)
    dy_scale = np.max([power_of_two_scale(dy, 1, E5M2[2]) for dy in dys], axis=0)
    largest_scale = np.max(x_scale * dy_scale)
    x_error, w_errors = fp8_error(x, x_scale, E4M3), [fp8_error(w, w_scale, E4M3) for w in weights]
    dy_errors = [fp8_error(dy, dy_scale, E5M2) for dy in dys]
    dx_expected, dx_bound = 0.0, 0.0
    for w, w_error, dy, dy_error, y, dw in zip(
        weights, w_errors, dys, dy_errors, ys, dws, strict=True
    ):
        assert_within(y, x @ w, matmul_bound(x, x_error, w, w_error))
        dx_expected += dy @ w.T
        dx_bound += matmul_bound(dy, dy_error, w.T, w_error.T)
        # dw sums over tokens: dy is rounded again, with the scale of the largest token.
        requantize_scale = np.divide(
            largest_scale, x_scale, out=np.zeros_like(x_scale), where=x_scale > 0
        )
        requantize_error = fp8_error(np.abs(dy) + dy_error, requantize_scale, E5M2)
        assert_within(dw, x.T @ dy, matmul_bound(x.T, x_error.T, dy, dy_error + requantize_error))
    assert_within(dx, dx_expected, dx_bound)


@pytest.mark.parametrize(("outer", "inputs", "outputs"), SHAPES)
def test_int8_gradients_are_within_the_error_bound(outer, inputs, outputs):
    x, weights, dys = draw(outer, inputs, outputs, seed=inputs)
    ys, dx, dws = run_matmuls("int8", outer, x, weights, dys)
    dx_expected, dx_bound = 0.0, 0.0
    for w, dy, y, dw in zip(weights, dys, ys, dws, strict=True):
        assert_within(y, x @ w, matmul_bound(x, int8_error(x, 1), w, int8_error(w, 0)))
        dx_expected += dy @ w.T
        dx_bound += matmul_bound(dy, int8_error(dy, 1), w.T, int8_error(w, 1).T)
        assert_within(dw, x.T @ dy, SUM_ERROR * np.abs(x).T @ np.abs(dy))
    assert_within(dx, dx_expected, dx_bound)


# Tokens of each expert: none, all for one, odd numbers, one token; and rows of no expert.
GROUPS = [
    (1, (0, 1, 0)),
    (7, (0, 0, 7, 0)),
    (13, (5, 0, 3, 1)),
    (9, (0, 0, 0)),
    (131, (0, 127, 1, 0, 2)),
]


@pytest.mark.parametrize(("tokens", "sizes"), GROUPS)
def test_grouped_fp8_gradients_are_within_the_error_bound(tokens, sizes):
    random, inputs, outputs = np.random.default_rng(tokens), 37, 65
    used, experts = sum(sizes), len(sizes)
    x = np.float64(
        np.float32(
            random.normal(size=(tokens, inputs)) * 10.0 ** random.uniform(-3, 0, (tokens, 1))
        )
    )
    w = np.float64(np.float32(random.normal(size=(experts, inputs, outputs))))
    dy = np.float64(np.float32(random.normal(size=(tokens, outputs)) * 1e-6))
    x[used:], dy[used:] = np.nan, np.inf  # rows of no expert have no effect

    @jax.jit
    def run(x, w, dy):
        y, vjp = jax.vjp(
            lambda x, w: grouped_matmul_fp8(x, w, jnp.array(sizes, jnp.int32), PLATFORM), x, w
        )
        return y, *vjp(dy)

    y, dx, dw = (
        np.asarray(array, np.float64)
        for array in run(*(jnp.asarray(a, jnp.float32) for a in (x, w, dy)))
    )
    assert np.isfinite(dw).all()
    w_error, end = fp8_error(w, power_of_two_scale(w, None, E4M3[2]), E4M3), 0
    for expert, size in enumerate(sizes):
        rows, end = slice(end, end + size), end + size
        if not size:
            np.testing.assert_array_equal(dw[expert], 0)
            continue
        own_x, own_dy = x[rows], dy[rows]
        x_error = fp8_error(own_x, power_of_two_scale(own_x, 1, E4M3[2]), E4M3)
        dy_error = fp8_error(own_dy, power_of_two_scale(own_dy, 1, E4M3[2]), E4M3)
        assert_within(
            y[rows], own_x @ w[expert], matmul_bound(own_x, x_error, w[expert], w_error[expert])
        )
        expected = own_dy @ w[expert].T
        assert_within(
            dx[rows], expected, matmul_bound(own_dy, dy_error, w[expert].T, w_error[expert].T)
        )
        assert_within(dw[expert], own_x.T @ own_dy, SUM_ERROR * np.abs(own_x).T @ np.abs(own_dy))
