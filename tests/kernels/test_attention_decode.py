"""The kernel that reads pages where they lie, interpreted, against the definition over gathered pages; and that it can
be lowered for GPUs that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.attention import Visibility, attend, decode
from maxtext.kernels.quantized import dequantize, quantize

BATCH, HEADS, GROUPS, SIZE, PAGES, PAGE, COLUMNS = 4, 6, 2, 16, 30, 8, 6
REACH = PAGE * COLUMNS
POSITIONS = np.array([37, -1, 9, 0])  # one row is idle, one has a single token


def problem(dtype=jnp.float32):
    random = np.random.default_rng(0)
    q = jnp.asarray(random.normal(size=(BATCH, HEADS, SIZE)), dtype)
    pools = [jnp.asarray(random.normal(size=(PAGES, PAGE, GROUPS, SIZE)), dtype) for _ in range(2)]
    table = jnp.asarray(random.permutation(PAGES)[: BATCH * COLUMNS].reshape(BATCH, COLUMNS), jnp.int32)
    return q, pools, table


def expected(q, pools, table, **options):
    """By the definition, over a copy of each row's pages in order."""
    k, v = (pool[table].reshape(BATCH, REACH, GROUPS, SIZE) for pool in pools)
    positions = jnp.asarray(POSITIONS)[:, None]
    return attend(
        q[:, None], k, v, backend="dot_product", visibility=Visibility(), scale=0.3, q_positions=positions,
        k_positions=jnp.broadcast_to(jnp.arange(REACH), (BATCH, REACH)),
        q_segments=(positions >= 0).astype(jnp.int32), k_segments=jnp.ones((BATCH, REACH), jnp.int32), **options,
    )[:, 0]  # fmt: skip


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("block", [4, 8, 64])
def test_rows_of_all_lengths(block, splits):
    q, pools, table = problem()
    found = decode.attend(
        q, *pools, table, jnp.asarray(POSITIONS), scale=0.3, reach=REACH, block=block, splits=splits, interpret=True
    )
    np.testing.assert_allclose(found, expected(q, pools, table), atol=1e-5)
    assert not np.asarray(found)[1].any()


@pytest.mark.parametrize("option", ["soft_cap", "sinks"])
def test_options(option):
    q, pools, table = problem()
    options = {"soft_cap": 2.0} if option == "soft_cap" else {"sinks": jnp.arange(HEADS, dtype=jnp.float32) / 3}
    found = decode.attend(
        q, *pools, table, jnp.asarray(POSITIONS), scale=0.3, reach=REACH, interpret=True, **options
    )  # fmt: skip
    np.testing.assert_allclose(found, expected(q, pools, table, **options), atol=1e-5)
    assert np.abs(found - expected(q, pools, table)).max() > 1e-3


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4])
def test_integers(dtype):
    q, pools, table = problem()
    values, scales = zip(*(quantize(pool, (3,), dtype) for pool in pools), strict=True)
    rounded = [dequantize(*pair, jnp.float32) for pair in zip(values, scales, strict=True)]
    found = decode.attend(
        q, *values, table, jnp.asarray(POSITIONS), scale=0.3, reach=REACH, interpret=True,
        key_scales=scales[0][..., 0], value_scales=scales[1][..., 0],
    )  # fmt: skip
    np.testing.assert_allclose(found, expected(q, rounded, table), atol=1e-5)


def test_what_nobody_wrote_is_not_read():
    q, pools, table = problem()
    written = np.zeros((PAGES, PAGE), bool)
    for row, position in enumerate(POSITIONS):
        for place in range(position + 1):
            written[table[row, place // PAGE], place % PAGE] = True
    dirty = [jnp.where(written[..., None, None], pool, 1e30) for pool in pools]
    found = decode.attend(q, *dirty, table, jnp.asarray(POSITIONS), scale=0.3, reach=REACH, block=8, interpret=True)
    np.testing.assert_allclose(found, expected(q, pools, table), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_it_can_be_lowered_for_gpus(dtype):
    batch, heads, groups, size, page = 4, 32, 8, 128, 64

    def shape(*sizes, of=dtype):
        return jax.ShapeDtypeStruct(sizes, of)

    pool, scales = shape(40, page, groups, size), shape(40, page, groups, of="float32")
    extra = {"key_scales": scales, "value_scales": scales} if dtype == "int8" else {}

    def run(q, keys, values, table, positions, extra):
        return decode.attend(q, keys, values, table, positions, scale=0.1, reach=512, **extra)

    arguments = (shape(batch, heads, size, of="bfloat16"), pool, pool, shape(batch, 8, of="int32"),
                 shape(batch, of="int32"), extra)  # fmt: skip
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "attention_over_pages" in text
    assert "triton" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((128, 64, "bfloat16", "cpu"), "a kernel for NVIDIA GPUs, and this is a CPU"),
        ((128, 64, "int4", "gpu"), "does not read int4"),
        ((96, 64, "bfloat16", "gpu"), "heads of 96 numbers"),
        ((8, 64, "bfloat16", "gpu"), "heads of 8 numbers"),
        ((128, 20, "int8", "gpu"), "pages of 20 tokens"),
        ((128, 1536, "int8", "gpu"), None),
        ((64, 32, "float16", "gpu"), None),
    ],
)
def test_what_it_can_do(arguments, reason):
    found = decode.supports(*arguments)
    assert found is None if reason is None else reason in found
