"""Products of one row with what is around them, against numpy's in float64; interpreted, unless
there is a GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode import gemv
from maxtext.layers import one_token
from maxtext.layers.mlp import ACTIVATIONS

GPU = jax.default_backend() == "gpu"


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def wide(x):
    return np.asarray(x, np.float64)


def normed(row, scale, epsilon, offset):
    row = wide(row)
    return row / np.sqrt(np.mean(row**2) + epsilon) * (wide(scale) + offset)


def close(found, right):
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(wide(found), right, rtol=2**-7, atol=2**-8 * np.abs(right).max())


@pytest.mark.parametrize(
    ("depth", "width", "offset"),
    [(512, 512, 0.0), (1536, 64, 1.0), (2560, 16, 0.0), (4096, 16, 0.0), (16384, 16, 0.0)],
    ids=["one step", "at once", "a loop", "long", "long, a loop"],
)
def test_gated(depth, width, offset):
    row, scale, kernels = (
        3 * numbers(depth),
        numbers(depth, seed=1),
        numbers(2 * width, depth, seed=2) / 16,
    )
    assert gemv.supports(depth, width, row.dtype)
    found = gemv.norm_gate_up(
        gemv.NormedInput(row, scale, 1e-5, offset), kernels, jax.nn.silu, interpret=not GPU
    )
    gate, up = np.split(wide(kernels) @ normed(row, scale, 1e-5, offset), 2)
    close(found, gate / (1 + np.exp(-gate)) * up)


@pytest.mark.parametrize(
    ("heads", "size", "depth"), [((4, 2), 64, 512), ((2, 2), 16, 4096), ((1, 1), 256, 512)]
)
def test_rotated(heads, size, depth):
    queries, groups = heads
    row, scale = numbers(depth), jnp.ones(depth, jnp.bfloat16)
    kernels = numbers((queries + 2 * groups) * size, depth, seed=3)
    angles = np.random.default_rng(4).uniform(0, 6, size // 2).astype(np.float32)
    found = gemv.norm_qkv_rope(
        gemv.NormedInput(row, scale, 1e-6),
        kernels,
        jnp.cos(angles),
        jnp.sin(angles),
        heads,
        interpret=not GPU,
    )
    right = (wide(kernels) @ normed(row, scale, 1e-6, 0)).reshape(-1, size)
    turning = (right[..., : size // 2] + 1j * right[..., size // 2 :]) * np.exp(1j * angles)
    turned = np.concatenate([turning.real, turning.imag], -1)
    for each, expected in zip(
        found, (turned[:queries], turned[queries:-groups], right[-groups:]), strict=True
    ):
        close(each, expected)


@pytest.mark.parametrize(("depth", "width"), [(1536, 512), (14336, 16)], ids=["at once", "a loop"])
def test_alone_and_added(depth, width):
    row, kernel, stream = numbers(depth), numbers(width, depth, seed=5), 40 * numbers(width, seed=6)
    close(gemv.gemv(row, kernel, interpret=not GPU), wide(kernel) @ wide(row))
    close(
        gemv.gemv_add(row, kernel, stream, interpret=not GPU),
        wide(stream) + wide(kernel) @ wide(row),
    )


@pytest.mark.parametrize("gate", one_token.GATES)
def test_they_can_be_lowered_for_gpus(gate):
    def run(row, kernels, angles):
        x = gemv.NormedInput(row, row, 1e-5)
        hidden = gemv.norm_gate_up(x, kernels, ACTIVATIONS[gate])
        q, _, _ = gemv.norm_qkv_rope(x, kernels, angles, angles, (4, 2))
        return gemv.gemv_add(hidden, kernels, jnp.concatenate([row, hidden])), q

    shapes = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((512,), (1024, 512), (64,))]
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("triton") >= 3
