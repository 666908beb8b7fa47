"""The kernel that splits a packed projection into heads against numpy in float64; interpreted
unless there is a GPU.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode.qkv import HeadNorm, QkvNorms, Rope, split_qkv

GPU = jax.default_backend() == "gpu"
BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 32


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def float64(x):
    return np.asarray(x, np.float64)


def rms_norm(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * scale


def rotate(x, angles, interleave):
    """The complex number of each pair times exp(i angle)."""
    x, pairs = x.copy(), angles.shape[1]
    first, second = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if interleave
        else (slice(0, pairs), slice(pairs, 2 * pairs))
    )
    numbers = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles)[:, None]
    x[..., first], x[..., second] = numbers.real, numbers.imag
    return x


@pytest.mark.parametrize(
    ("interleave", "pairs", "after_rope", "shared_kv"),
    list(itertools.product((False, True), (HEAD_DIM // 2, 4), (False, True), (False, True))),
)
def test_norms_and_rope(interleave, pairs, after_rope, shared_kv):
    num_heads = HEADS + (1 if shared_kv else 2) * KV_HEADS
    x = draw(BATCH, num_heads * HEAD_DIM)
    angles = np.random.default_rng(1).uniform(0, 6, (BATCH, pairs)).astype(np.float32)
    query_scale, key_scale = draw(HEAD_DIM, seed=2), draw(KV_HEADS, HEAD_DIM, seed=3)
    actual = split_qkv(
        x,
        (HEADS, KV_HEADS),
        Rope(jnp.cos(angles), jnp.sin(angles), interleave),
        QkvNorms(
            HeadNorm(1e-6, query_scale, 1.0),
            HeadNorm(1e-6, key_scale),
            HeadNorm(1e-5),
            after_rope,
        ),
        shared_kv,
        interpret=not GPU,
    )
    heads = float64(x).reshape(BATCH, num_heads, HEAD_DIM)
    q, k = heads[:, :HEADS], heads[:, HEADS : HEADS + KV_HEADS]
    v = rms_norm(k if shared_kv else heads[:, HEADS + KV_HEADS :], 1, 1e-5)
    scales = float64(query_scale) + 1, float64(key_scale)
    rotated = []
    for part, scale in zip((q, k), scales, strict=True):
        if after_rope:
            rotated.append(rms_norm(rotate(part, angles, interleave), scale, 1e-6))
        else:
            rotated.append(rotate(rms_norm(part, scale, 1e-6), angles, interleave))
    for array, expected in zip(actual, (*rotated, v), strict=True):
        np.testing.assert_allclose(float64(array), expected, atol=0.04, rtol=0.01)


def test_without_norms_and_rope_heads_are_copied():
    x = draw(BATCH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q, k, v = split_qkv(x, (HEADS, KV_HEADS), None, interpret=not GPU)
    joined = jnp.concatenate([q, k, v], axis=1).reshape(BATCH, -1)
    np.testing.assert_array_equal(joined, x)


def test_lowers_for_gpus():
    def run(x, angles, scale):
        norm = HeadNorm(1e-6, scale)
        return split_qkv(x, (8, 1), Rope(angles, angles), QkvNorms(norm, norm))

    arguments = [jax.ShapeDtypeStruct(s, "float32") for s in ((4, 2560), (4, 128), (256,))]
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "split_qkv" in text
