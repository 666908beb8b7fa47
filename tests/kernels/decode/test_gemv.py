"""Fused matrix-vector products of a decode step against numpy in float64; interpreted unless there
is a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode import gemv

GPU = jax.default_backend() == "gpu"
ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def float64(x):
    return np.asarray(x, np.float64)


def rms_norm(x, scale, epsilon, offset):
    x = float64(x)
    return x / np.sqrt(np.mean(x**2) + epsilon) * (float64(scale) + offset)


def assert_close(actual, expected):
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        float64(actual), expected, rtol=2**-7, atol=2**-8 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("depth", "columns", "offset"),
    [(512, 512, 0.0), (1536, 64, 1.0), (2560, 16, 0.0), (4096, 16, 0.0), (16384, 16, 0.0)],
    ids=["one step", "unrolled", "loop", "long", "long loop"],
)
def test_norm_gate_up(depth, columns, offset):
    x, scale, weights_T = (
        3 * draw(depth),
        draw(depth, seed=1),
        draw(2 * columns, depth, seed=2) / 16,
    )
    assert gemv.supports(depth, columns, x.dtype)
    actual = gemv.norm_gate_up(
        gemv.NormedInput(x, scale, 1e-5, offset), weights_T, jax.nn.silu, interpret=not GPU
    )
    gate, up = np.split(float64(weights_T) @ rms_norm(x, scale, 1e-5, offset), 2)
    assert_close(actual, gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize(
    ("heads", "head_dim", "depth"), [((4, 2), 64, 512), ((2, 2), 16, 4096), ((1, 1), 256, 512)]
)
def test_norm_qkv_rope(heads, head_dim, depth):
    q_heads, kv_heads = heads
    x, scale = draw(depth), jnp.ones(depth, jnp.bfloat16)
    weights_T = draw((q_heads + 2 * kv_heads) * head_dim, depth, seed=3)
    angles = np.random.default_rng(4).uniform(0, 6, head_dim // 2).astype(np.float32)
    actual = gemv.norm_qkv_rope(
        gemv.NormedInput(x, scale, 1e-6),
        weights_T,
        jnp.cos(angles),
        jnp.sin(angles),
        heads,
        interpret=not GPU,
    )
    expected = (float64(weights_T) @ rms_norm(x, scale, 1e-6, 0)).reshape(-1, head_dim)
    complex_heads = expected[..., : head_dim // 2] + 1j * expected[..., head_dim // 2 :]
    complex_heads = complex_heads * np.exp(1j * angles)
    rotated = np.concatenate([complex_heads.real, complex_heads.imag], -1)
    outputs = rotated[:q_heads], rotated[q_heads:-kv_heads], expected[-kv_heads:]
    for array, output in zip(actual, outputs, strict=True):
        assert_close(array, output)


@pytest.mark.parametrize("has_bias", [False, True])
def test_norm_gemv(has_bias):
    x, scale = 2 * draw(1024), draw(1024, seed=1)
    weight_T, bias = draw(48, 1024, seed=2) / 16, draw(48, seed=3) if has_bias else None
    actual = gemv.norm_gemv(
        gemv.NormedInput(x, scale, 1e-5, 1.0), weight_T, bias, interpret=not GPU
    )
    expected = float64(weight_T) @ rms_norm(x, scale, 1e-5, 1.0)
    assert_close(actual, expected + (float64(bias) if has_bias else 0))


@pytest.mark.parametrize(("depth", "columns"), [(1536, 512), (14336, 16)], ids=["unrolled", "loop"])
@pytest.mark.slow
def test_gemv_and_gemv_add(depth, columns):
    x, weight_T, residual = draw(depth), draw(columns, depth, seed=5), 40 * draw(columns, seed=6)
    assert_close(gemv.gemv(x, weight_T, interpret=not GPU), float64(weight_T) @ float64(x))
    assert_close(
        gemv.gemv_add(x, weight_T, residual, interpret=not GPU),
        float64(residual) + float64(weight_T) @ float64(x),
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_lower_for_gpus(activation):
    def run(x, weights_T, angles):
        normed = gemv.NormedInput(x, x, 1e-5)
        hidden = gemv.norm_gate_up(normed, weights_T, ACTIVATIONS[activation])
        q, _, _ = gemv.norm_qkv_rope(normed, weights_T, angles, angles, (4, 2))
        return gemv.gemv_add(hidden, weights_T, jnp.concatenate([x, hidden])), q

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((512,), (1024, 512), (64,))]
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton") >= 3
