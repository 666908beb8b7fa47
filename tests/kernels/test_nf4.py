"""nf4 weights: QLoRA's levels, tiles along the inputs, and the gradient of the input."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import norm

from maxtext.kernels.weight_matmul import weight_matmul
from maxtext.kernels.weight_only import NF4_LEVELS, quantize_weight


def test_levels_are_quantiles_of_a_normal_distribution():
    """Dettmers et al. 2023, section 3: 8 positive and 7 negative quantiles and zero, from the
    offset 0.9677083, divided by the largest."""
    offset = 0.9677083
    positive = norm.ppf(np.linspace(offset, 0.5, 9)[:-1])
    negative = -norm.ppf(np.linspace(offset, 0.5, 8)[:-1])
    levels = np.sort([*positive, 0.0, *negative]) / positive.max()
    np.testing.assert_allclose(NF4_LEVELS, levels, atol=1e-6)


def test_weights_are_the_nearest_level_of_their_tile():
    random = np.random.default_rng(0)
    weight = random.standard_normal((128, 3)).astype("float32")
    quantized = quantize_weight(jnp.asarray(weight), (0,), "nf4", 64)
    assert quantized.dtype == jnp.uint4
    assert quantized.scale.shape == (2, 3)
    tiles = weight.reshape(2, 64, 3)
    absmax = np.abs(tiles).max(axis=1, keepdims=True)
    levels = np.asarray(NF4_LEVELS, "float32")
    nearest = np.abs(tiles[..., None] / absmax[..., None] - levels).argmin(-1)
    expected = (levels[nearest] * absmax).reshape(128, 3)
    np.testing.assert_allclose(quantized.astype("float32"), expected, rtol=1e-6)


def test_gradient_of_the_input_is_that_of_the_dequantized_weight():
    random = np.random.default_rng(0)
    weight, x = random.standard_normal((2, 64, 3, 4)).astype("float32"), random.random((5, 2, 64))
    x = x.astype("float32")
    for dtype in ("int8", "int4", "nf4"):
        quantized = quantize_weight(jnp.asarray(weight), (0, 1), dtype, 32)

        def total(x, quantized=quantized):
            return jnp.square(weight_matmul(x, [quantized], 2, "float32")[0]).sum()

        dense = np.asarray(quantized.astype("float32"), "float64")
        y = np.einsum("bij,ijkl->bkl", x, dense)
        expected = np.einsum("bkl,ijkl->bij", 2 * y, dense)
        np.testing.assert_allclose(jax.grad(total)(x), expected, rtol=1e-4, atol=1e-3)


def test_packed_values_are_two_in_a_byte():
    weight = np.random.default_rng(0).standard_normal((64, 6)).astype("float32")
    for dtype in ("int4", "nf4"):
        plain = quantize_weight(jnp.asarray(weight), (0,), dtype, 32)
        packed = quantize_weight(jnp.asarray(weight), (0,), dtype, 32, packed=True)
        assert packed.qvalue.dtype == jnp.uint8
        assert packed.qvalue.size == weight.size // 2
        assert packed.shape == weight.shape
        np.testing.assert_array_equal(packed.astype("float32"), plain.astype("float32"))
        odd = quantize_weight(jnp.asarray(weight[:, :5]), (0,), dtype, 32, packed=True)
        assert odd.qvalue.shape == (64, 3)
        assert odd.shape == (64, 5)
        np.testing.assert_array_equal(odd.astype("float32"), plain.astype("float32")[:, :5])
