"""The kernel that reads pages where they lie, interpreted, against the definition over gathered
pages; and that it can be lowered for GPUs that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.attention import AttentionMask, attend
from maxtext.kernels.decode import paged_attention as decode
from maxtext.kernels.weight_only import dequantize, quantize

BATCH, HEADS, GROUPS, SIZE, PAGES, PAGE, COLUMNS = 4, 6, 2, 16, 30, 16, 3
REACH = PAGE * COLUMNS
POSITIONS = np.array([37, -1, 9, 0])  # one row is idle, one has a single token


GPU = jax.default_backend() == "gpu"  # where it is no longer interpreted
DTYPE, CLOSE = (jnp.bfloat16, 2e-2) if GPU else (jnp.float32, 1e-5)


def problem():
    random = np.random.default_rng(0)
    q = jnp.asarray(random.normal(size=(BATCH, HEADS, SIZE)), DTYPE)
    pool, new = (
        {
            name: jnp.asarray(random.normal(size=(*first, GROUPS, SIZE)), DTYPE)
            for name in ("key", "value")
        }
        for first in ((PAGES, PAGE), (BATCH,))
    )
    table = jnp.asarray(
        random.permutation(PAGES)[: BATCH * COLUMNS].reshape(BATCH, COLUMNS), jnp.int32
    )
    return q, new, pool, table


def written(new, pool, table):
    """The pool with the new tokens where they belong."""
    after = {name: np.array(array) for name, array in pool.items()}
    for row, position in enumerate(POSITIONS):
        if position >= 0:
            for name, array in new.items():
                after[name][table[row, position // PAGE], position % PAGE] = array[row]
    return {name: jnp.asarray(array) for name, array in after.items()}


def expected(q, pool, table, **options):
    """By the definition, over a copy of each row's pages in order."""
    k, v = (
        pool[name][table].reshape(BATCH, REACH, GROUPS, SIZE).astype(jnp.float32)
        for name in ("key", "value")
    )
    positions = jnp.asarray(POSITIONS)[:, None]
    return attend(
        q[:, None].astype(jnp.float32), k, v, backend="dot_product", mask=AttentionMask(), scale=0.3,
        q_positions=positions, k_positions=jnp.broadcast_to(jnp.arange(REACH), (BATCH, REACH)),
        q_segments=(positions >= 0).astype(jnp.int32), k_segments=jnp.ones((BATCH, REACH), jnp.int32), **options,
    )[:, 0]  # fmt: skip


def found(q, new, pool, table, **options):
    mixed, after = decode.paged_attention(
        q,
        new,
        pool,
        table,
        jnp.asarray(POSITIONS, jnp.int32),
        scale=0.3,
        interpret=not GPU,
        **options,
    )
    return np.asarray(mixed, np.float32), after


@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("block", [4, 8, 64])
def test_rows_of_all_lengths(block, splits):
    q, new, pool, table = problem()
    mixed, after = found(q, new, pool, table, block=block, splits=splits)
    right = written(new, pool, table)
    np.testing.assert_allclose(mixed, expected(q, right, table), atol=CLOSE)
    assert not mixed[1].any()
    for name, array in right.items():
        assert np.array_equal(after[name], array), name


@pytest.mark.parametrize("option", ["soft_cap", "sinks"])
def test_options(option):
    q, new, pool, table = problem()
    options = (
        {"soft_cap": 2.0}
        if option == "soft_cap"
        else {"sinks": jnp.arange(HEADS, dtype=jnp.float32) / 3}
    )
    mixed, _ = found(q, new, pool, table, **options)
    right = written(new, pool, table)
    np.testing.assert_allclose(mixed, expected(q, right, table, **options), atol=CLOSE)
    assert np.abs(mixed - expected(q, right, table)).max() > 3 * CLOSE


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("dtype", [jnp.int8] if GPU else [jnp.int8, jnp.int4])
def test_integers(dtype, by_head):
    q, *floats, table = problem()

    def stored(arrays):
        """As integers, with a scale for each head of a token, or for the token."""
        values = {}
        for name, array in arrays.items():
            axes = (array.ndim - 1,) if by_head else (array.ndim - 2, array.ndim - 1)
            values[name], scale = quantize(array, axes, dtype)
            values[name + "_scale"] = scale.reshape(scale.shape[: array.ndim - len(axes)])
        return values

    def rounded(arrays):
        scales = [arrays[name + "_scale"] for name in ("key", "value")]
        scales = [each[..., None] if by_head else each[..., None, None] for each in scales]
        return {
            name: dequantize(arrays[name], scale, DTYPE)
            for name, scale in zip(("key", "value"), scales, strict=True)
        }

    new, pool = map(stored, floats)
    mixed, after = found(q, new, pool, table)
    right = written(new, pool, table)
    np.testing.assert_allclose(mixed, expected(q, rounded(right), table), atol=CLOSE)
    for name, array in right.items():
        assert np.array_equal(after[name], array), name


def test_what_nobody_wrote_is_not_read():
    q, new, pool, table = problem()
    known = np.zeros((PAGES, PAGE), bool)
    for row, position in enumerate(POSITIONS):
        for place in range(position):
            known[table[row, place // PAGE], place % PAGE] = True
    dirty = {
        name: jnp.where(known[..., None, None], array, 1e30).astype(DTYPE)
        for name, array in pool.items()
    }
    mixed, _ = found(q, new, dirty, table, block=8)
    np.testing.assert_allclose(mixed, expected(q, written(new, pool, table), table), atol=CLOSE)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_it_can_be_lowered_for_gpus(dtype):
    batch, heads, groups, size, page = 4, 32, 8, 128, 64

    def shape(*sizes, of=dtype):
        return jax.ShapeDtypeStruct(sizes, of)

    def arrays(*first):
        made = {name: shape(*first, groups, size) for name in ("key", "value")}
        return made | (
            {f"{name}_scale": shape(*first, of="float32") for name in made}
            if dtype == "int8"
            else {}
        )

    def run(q, new, pool, table, positions):
        return decode.paged_attention(q, new, pool, table, positions, scale=0.1)

    arguments = (shape(batch, heads, size, of="bfloat16"), arrays(batch), arrays(40, page),
                 shape(batch, 8, of="int32"), shape(batch, of="int32"))  # fmt: skip
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "paged_attention" in text
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
        ((512, 64, "bfloat16", "gpu"), None),
        ((4096, 64, "bfloat16", "gpu"), "too large for a GPU's shared memory"),
        ((128, 64, "bfloat16", "gpu", "7.5"), "8.0 or newer, not 7.5"),
        ((128, 64, "bfloat16", "gpu", "gfx942"), "8.0 or newer, not gfx942"),
    ],
)
def test_what_it_can_do(arguments, reason):
    found = decode.supports(*arguments)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("splits", [3, 66, 500])
def test_its_parts_can_be_lowered_for_gpus(splits):
    def run(x, angles, mixed, largest, sinks):
        spans = decode.combine_spans(mixed, largest, largest, sinks, jnp.bfloat16, interpret=False)
        return decode.split_qkv_rope(x, angles, angles, (8, 1)), spans

    shapes = (4, 10 * 256), (4, 128), (4, 1, splits, 8, 256), (4, 1, splits, 8), (8,)
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "split_qkv_rope" in text
    assert "combine_attention_spans" in text


def test_parts_of_one_product():
    """Halves of a head are a complex number that turns."""
    random = np.random.default_rng(5)
    x = jnp.asarray(random.normal(size=(BATCH, (HEADS + 2 * GROUPS) * SIZE)), DTYPE)
    angles = random.uniform(0, 6, (BATCH, SIZE // 2)).astype(np.float32)
    found = decode.split_qkv_rope(
        x, jnp.cos(angles), jnp.sin(angles), (HEADS, GROUPS), interpret=not GPU
    )
    heads = np.asarray(x, np.float64).reshape(BATCH, -1, SIZE)
    turning = (heads[..., : SIZE // 2] + 1j * heads[..., SIZE // 2 :]) * np.exp(1j * angles)[
        :, None
    ]
    turned = np.concatenate([turning.real, turning.imag], axis=-1)
    right = turned[:, :HEADS], turned[:, HEADS:-GROUPS], heads[:, -GROUPS:]
    for each, expected in zip(found, right, strict=True):
        np.testing.assert_allclose(np.asarray(each, np.float64), expected, atol=CLOSE)


@pytest.mark.parametrize("splits", [1, 3, 7, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_spans_as_one(monkeypatch, splits, sinks):
    """Of two groups of three heads; some spans saw nothing. Eight at a time."""
    monkeypatch.setattr(decode, "COMBINED_ELEMENTS", 8 * SIZE)
    random = np.random.default_rng(6)
    logits = random.normal(size=(2, 2, splits, 3, 5)) * 4
    values = random.normal(size=(2, 2, splits, 3, 5, SIZE))
    seen = random.random((2, 2, splits, 1)) < 0.7
    seen[:, :, 0] = True
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    largest = np.where(seen, logits.max(-1), decode.MASK_VALUE)
    total = np.where(seen, weights.sum(-1), 0)
    mixed = np.where(seen[..., None], (weights[..., None] * values).sum(-2), 0)
    sink = random.normal(size=6) if sinks else None
    whole = np.exp(logits) * seen[..., None]
    right = (whole[..., None] * values).sum((2, 4))
    right /= (whole.sum((2, 4)) + (np.exp(sink).reshape(2, 3) if sinks else 0))[..., None]
    spans = [jnp.asarray(part, jnp.float32) for part in (mixed, largest, total)]
    found = decode.combine_spans(
        *spans, None if sink is None else jnp.asarray(sink), jnp.float32, interpret=not GPU
    )
    np.testing.assert_allclose(found, right, atol=1e-5)
