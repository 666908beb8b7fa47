"""Paged decode attention over latents against numpy in float64; interpreted unless there is a
GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.decode.latent_attention import latent_attention, unsupported_reason

RANK, ROPE, BLOCKS, BLOCK, COLUMNS = 32, 16, 20, 16, 3
POSITIONS = np.array([37, -1, 9, 0, 47])
GPU = jax.default_backend() == "gpu"


def draw(random, *shape):
    return jnp.asarray(random.normal(size=shape), jnp.bfloat16)


@pytest.mark.parametrize(
    ("heads", "splits", "soft_cap"), [(5, None, None), (16, 1, 2.0), (40, 3, None)]
)
def test_rows_of_different_lengths(heads, splits, soft_cap):
    random = np.random.default_rng(heads)
    batch = len(POSITIONS)
    q, q_rope = draw(random, batch, heads, RANK), draw(random, batch, heads, ROPE)
    new = draw(random, batch, RANK), draw(random, batch, ROPE)
    pools = draw(random, BLOCKS, BLOCK, RANK), draw(random, BLOCKS, BLOCK, ROPE)
    table = random.permutation(BLOCKS)[: batch * COLUMNS].reshape(batch, COLUMNS)
    before = [np.asarray(pool, np.float64) for pool in pools]
    actual, written = latent_attention(
        q,
        q_rope,
        new,
        pools,
        jnp.asarray(table, jnp.int32),
        jnp.asarray(POSITIONS, jnp.int32),
        scale=0.2,
        soft_cap=soft_cap,
        splits=splits,
        interpret=not GPU,
    )
    for row, position in enumerate(POSITIONS):
        if position < 0:
            assert not np.asarray(actual[row], np.float32).any()
            continue
        for pool, token in zip(before, new, strict=True):
            pool[table[row, position // BLOCK], position % BLOCK] = np.asarray(token[row])
        latents, ropes = (
            pool[table[row]].reshape(-1, pool.shape[-1])[: position + 1] for pool in before
        )
        logits = np.asarray(q[row], np.float64) @ latents.T
        logits = 0.2 * (logits + np.asarray(q_rope[row], np.float64) @ ropes.T)
        logits = logits if soft_cap is None else soft_cap * np.tanh(logits / soft_cap)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        expected = weights / weights.sum(axis=1, keepdims=True) @ latents
        np.testing.assert_allclose(np.asarray(actual[row], np.float64), expected, atol=0.03)
    for pool, expected in zip(written, before, strict=True):
        np.testing.assert_array_equal(np.asarray(pool, np.float64), expected)


def test_lowers_for_gpus():
    def run(*arguments):
        q, q_rope, latent, rope, latents, ropes, table, positions = arguments
        return latent_attention(
            q, q_rope, (latent, rope), (latents, ropes), table, positions, scale=1.0
        )

    shapes = [(2, 16, 512), (2, 16, 64), (2, 512), (2, 64), (8, 64, 512), (8, 64, 64)]
    arguments = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]
    arguments += [jax.ShapeDtypeStruct(shape, "int32") for shape in ((2, 4), (2,))]
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "latent_attention" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((512, 64, 64, "bfloat16", "gpu", "9.0"), None),
        ((512, 64, 64, "bfloat16", "cpu", ""), "NVIDIA"),
        ((512, 64, 64, "int8", "gpu", "9.0"), "bfloat16"),
        ((96, 64, 64, "bfloat16", "gpu", "9.0"), "powers of two"),
        ((512, 64, 40, "bfloat16", "gpu", "9.0"), "40 tokens"),
    ],
)
def test_unsupported_reason(arguments, reason):
    actual = unsupported_reason(*arguments)
    assert actual is None if reason is None else reason in actual
