"""Paged decode attention, interpreted unless there is a GPU, against dot_product over gathered
pages; and its lowering for GPUs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.attention import AttentionMask, attend
from maxtext.kernels.decode import paged_attention as decode
from maxtext.kernels.decode.prefix_attention import GROUP_ROWS, PrefixGroups
from maxtext.kernels.fp8.quantize import E4M3
from maxtext.kernels.weight_only import dequantize, quantize

BATCH, HEADS, GROUPS, HEAD_DIM, PAGES, PAGE, COLUMNS = 4, 6, 2, 16, 30, 16, 3
MAX_LENGTH = PAGE * COLUMNS
POSITIONS = np.array([37, -1, 9, 0])  # one row is idle, one has a single token
GPU = jax.default_backend() == "gpu"
DTYPE, TOLERANCE = (jnp.bfloat16, 2e-2) if GPU else (jnp.float32, 1e-5)


def problem():
    random = np.random.default_rng(0)
    q = jnp.asarray(random.normal(size=(BATCH, HEADS, HEAD_DIM)), DTYPE)
    pool, new = (
        {
            name: jnp.asarray(random.normal(size=(*first, GROUPS, HEAD_DIM)), DTYPE)
            for name in ("key", "value")
        }
        for first in ((PAGES, PAGE), (BATCH,))
    )
    table = jnp.asarray(
        random.permutation(PAGES)[: BATCH * COLUMNS].reshape(BATCH, COLUMNS), jnp.int32
    )
    return q, new, pool, table


def write_tokens(new, pool, table, positions=POSITIONS):
    """The pool with the new tokens in their pages."""
    after = {name: np.array(array) for name, array in pool.items()}
    for row, position in enumerate(positions):
        if position >= 0:
            for name, array in new.items():
                after[name][table[row, position // PAGE], position % PAGE] = array[row]
    return {name: jnp.asarray(array) for name, array in after.items()}


def reference(q, pool, table, positions=POSITIONS, **options):
    """dot_product over a copy of each row's pages in order."""
    k, v = (
        pool[name][table].reshape(BATCH, MAX_LENGTH, GROUPS, HEAD_DIM).astype(jnp.float32)
        for name in ("key", "value")
    )
    positions = jnp.asarray(positions)[:, None]
    return attend(
        q[:, None].astype(jnp.float32),
        k,
        v,
        backend="dot_product",
        mask=AttentionMask(),
        scale=0.3,
        q_positions=positions,
        k_positions=jnp.broadcast_to(jnp.arange(MAX_LENGTH), (BATCH, MAX_LENGTH)),
        q_segments=(positions >= 0).astype(jnp.int32),
        k_segments=jnp.ones((BATCH, MAX_LENGTH), jnp.int32),
        **options,
    )[:, 0]


def run(q, new, pool, table, positions=POSITIONS, **options):
    context, after = decode.paged_attention(
        q,
        new,
        pool,
        table,
        jnp.asarray(positions, jnp.int32),
        scale=0.3,
        interpret=not GPU,
        **options,
    )
    return np.asarray(context, np.float32), after


TILES_AND_SPLITS = [(4, None), (8, 3), (64, 1)]  # each tile size and each number of splits


@pytest.mark.parametrize(
    ("tile_size", "splits"),
    [
        *TILES_AND_SPLITS,
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in itertools.product((4, 8, 64), (None, 1, 3))
            if case not in TILES_AND_SPLITS
        ),
    ],
)
def test_rows_of_different_lengths(tile_size, splits):
    q, new, pool, table = problem()
    context, after = run(q, new, pool, table, tile_size=tile_size, splits=splits)
    right = write_tokens(new, pool, table)
    np.testing.assert_allclose(context, reference(q, right, table), atol=TOLERANCE)
    assert not context[1].any()
    for name, array in right.items():
        assert np.array_equal(after[name], array), name


@pytest.mark.parametrize("option", ["soft_cap", "sinks"])
def test_soft_cap_and_sinks(option):
    q, new, pool, table = problem()
    options = (
        {"soft_cap": 2.0}
        if option == "soft_cap"
        else {"sinks": jnp.arange(HEADS, dtype=jnp.float32) / 3}
    )
    context, _ = run(q, new, pool, table, **options)
    right = write_tokens(new, pool, table)
    np.testing.assert_allclose(context, reference(q, right, table, **options), atol=TOLERANCE)
    assert np.abs(context - reference(q, right, table)).max() > 3 * TOLERANCE


@pytest.mark.parametrize(
    ("positions", "shared_rows", "splits"),
    [
        ([37, 40, 9, 32], [0, 1, 3], 1),
        ([37, -1, 47, 32], [0, 1, 2, 3], 2),  # one row of the group is idle
    ],
)
def test_pages_of_several_rows_are_read_once(positions, shared_rows, splits):
    q, new, pool, table = problem()
    table = np.array(table)
    table[shared_rows, :2] = table[shared_rows[0], :2]
    pages = [row[:3].tolist() for row in table]
    groups = PrefixGroups.from_blocks(pages, range(BATCH), BATCH, PAGE)
    assert sorted(groups.rows[groups.rows < BATCH]) == shared_rows
    assert groups.lengths.tolist() == [2 * PAGE]
    table = jnp.asarray(table)
    options = {"soft_cap": 2.0}
    if splits > 1:
        options["sinks"] = jnp.arange(HEADS, dtype=jnp.float32) / 3
    context, after = run(
        q, new, pool, table, positions, groups=groups, splits=splits, tile_size=8, **options
    )
    right = write_tokens(new, pool, table, positions)
    expected = reference(q, right, table, positions, **options)
    np.testing.assert_allclose(context, expected, atol=TOLERANCE)
    assert not context[np.array(positions) < 0].any()
    for name, array in right.items():
        assert np.array_equal(after[name], array), name
    # The pages of a group are those of its first row, whatever the others' tables say.
    others = np.setdiff1d(shared_rows, groups.rows[0, 0])
    elsewhere = table.at[others, :2].set(0)
    context, _ = run(
        q, new, pool, elsewhere, positions, groups=groups, splits=splits, tile_size=8, **options
    )
    np.testing.assert_allclose(context, expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        ([[5, 6, 7], [1, 2, 3], [5, 6, 8], [1, 2, 4]], {(0, 2): 2, (1, 3): 2}),
        ([[5, 6, 7, 8], [5, 6, 7, 9], [5, 2]], {(0, 1): 3}),  # the last one shares too little
        ([[5, 6, 7], [5, 2], [5, 6, 8]], {(0, 1, 2): 1}),
        ([[index] for index in range(4)], {}),
        ([[5, index] for index in range(10)], {tuple(range(8)): 1, (8, 9): 1}),
    ],
)
def test_groups_are_rows_that_begin_with_the_same_pages(pages, expected):
    rows = range(10, 10 + len(pages))
    groups = PrefixGroups.from_blocks(pages, rows, 20, PAGE)
    actual = {
        tuple(sorted(int(row) - 10 for row in members if row < 20)): int(length) // PAGE
        for members, length in zip(groups.rows, groups.lengths, strict=True)
        if length
    }
    assert actual == expected
    lengths = np.zeros(20, int)
    for members, count in expected.items():
        lengths[[10 + row for row in members]] = count * PAGE
    np.testing.assert_array_equal(groups.row_lengths, lengths)


@pytest.mark.parametrize("splits", [1, 3])
def test_new_tokens_are_quantized_by_the_kernel(splits):
    q, *floats, table = problem()
    new, pool = (
        dict(zip(("key", "key_scale", "value", "value_scale"), arrays, strict=True))
        for arrays in (
            [part for x in arrays.values() for part in quantize(x, (x.ndim - 1,), E4M3)]
            for arrays in floats
        )
    )
    new, pool = (
        {name: x[..., 0] if name.endswith("scale") else x for name, x in arrays.items()}
        for arrays in (new, pool)
    )
    assert decode.quantizes_heads(pool)
    expected = run(q, new, pool, table, splits=splits)
    actual = run(q, floats[0], pool, table, splits=splits)
    np.testing.assert_allclose(actual[0], expected[0], atol=1e-6)
    for name, array in expected[1].items():
        assert np.array_equal(actual[1][name], array), name


@pytest.mark.parametrize("by_head", [True, False])
@pytest.mark.parametrize("dtype", [jnp.int8, E4M3, *([] if GPU else [jnp.int4])])
@pytest.mark.slow
def test_quantized_cache(dtype, by_head):
    q, *floats, table = problem()

    def quantize_cache(arrays):
        """With a scale for each head of a token, or for the token."""
        values = {}
        for name, array in arrays.items():
            axes = (array.ndim - 1,) if by_head else (array.ndim - 2, array.ndim - 1)
            values[name], scale = quantize(array, axes, dtype)
            values[name + "_scale"] = scale.reshape(scale.shape[: array.ndim - len(axes)])
        return values

    def dequantize_cache(arrays):
        scales = [arrays[name + "_scale"] for name in ("key", "value")]
        scales = [x[..., None] if by_head else x[..., None, None] for x in scales]
        return {
            name: dequantize(arrays[name], scale, DTYPE)
            for name, scale in zip(("key", "value"), scales, strict=True)
        }

    new, pool = map(quantize_cache, floats)
    context, after = run(q, new, pool, table)
    right = write_tokens(new, pool, table)
    np.testing.assert_allclose(
        context, reference(q, dequantize_cache(right), table), atol=TOLERANCE
    )
    for name, array in right.items():
        assert np.array_equal(after[name], array), name


def test_unwritten_slots_are_not_read():
    q, new, pool, table = problem()
    written = np.zeros((PAGES, PAGE), bool)
    for row, position in enumerate(POSITIONS):
        for index in range(position):
            written[table[row, index // PAGE], index % PAGE] = True
    dirty = {
        name: jnp.where(written[..., None, None], array, 1e30).astype(DTYPE)
        for name, array in pool.items()
    }
    context, _ = run(q, new, dirty, table, tile_size=8)
    right = write_tokens(new, pool, table)
    np.testing.assert_allclose(context, reference(q, right, table), atol=TOLERANCE)


@pytest.mark.parametrize(("dtype", "page"), [("bfloat16", 64), ("bfloat16", 32), ("int8", 64)])
def test_kernel_lowers_for_gpus(dtype, page):
    batch, heads, groups, head_dim = 4, 32, 8, 128

    def shape(*sizes, of=dtype):
        return jax.ShapeDtypeStruct(sizes, of)

    def arrays(*first):
        cache = {name: shape(*first, groups, head_dim) for name in ("key", "value")}
        if dtype == "int8":
            cache |= {f"{name}_scale": shape(*first, of="float32") for name in ("key", "value")}
        return cache

    def lower(q, new, pool, table, positions, groups):
        splits = None if groups is None else 1
        return decode.paged_attention(
            q, new, pool, table, positions, scale=0.1, groups=groups, splits=splits
        )

    arguments = (
        shape(batch, heads, head_dim, of="bfloat16"),
        arrays(batch),
        arrays(40, page),
        shape(batch, 8, of="int32"),
        shape(batch, of="int32"),
    )
    rows, lengths = shape(1, GROUP_ROWS, of="int32"), shape(1, of="int32")
    groups = PrefixGroups(rows, lengths, shape(batch, of="int32"))
    for prefix in (None, groups):
        traced = jax.jit(lower).trace(*arguments, prefix)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "paged_attention" in text
        assert ("prefix_attention" in text) == (prefix is not None)
        assert "triton" in text


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((128, 64, "bfloat16", "cpu"), "a kernel for NVIDIA GPUs, and this is a CPU"),
        ((128, 64, "int4", "gpu"), "does not read int4"),
        ((96, 64, "bfloat16", "gpu"), "a head_dim of 96"),
        ((8, 64, "bfloat16", "gpu"), "a head_dim of 8"),
        ((128, 20, "int8", "gpu"), "blocks of 20 tokens"),
        ((128, 1536, "int8", "gpu"), None),
        ((64, 32, "float16", "gpu"), None),
        ((512, 64, "bfloat16", "gpu"), None),
        ((4096, 64, "bfloat16", "gpu"), "too large for a GPU's shared memory"),
        ((128, 64, "bfloat16", "gpu", "7.5"), "8.0 or newer, not 7.5"),
        ((128, 64, "bfloat16", "gpu", "gfx942"), "8.0 or newer, not gfx942"),
    ],
)
def test_supports(arguments, reason):
    answer = decode.unsupported_reason(*arguments)
    assert answer is None if reason is None else reason in answer


@pytest.mark.parametrize("splits", [3, 66, 500])
def test_combination_lowers_for_gpus(splits):
    def run(context, largest, sinks):
        return decode.combine_spans(
            context, largest, largest, sinks=sinks, dtype=jnp.bfloat16, interpret=False
        )

    shapes = (4, 1, splits, 8, 256), (4, 1, splits, 8), (8,)
    arguments = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "combine_attention_spans" in text


RING = 16


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tile_size", [16, 64])
@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_ring_buffers(kind, tile_size, splits):
    """Rows that are shorter than the buffer, as long, and longer; one is idle, one has a single
    token."""
    random = np.random.default_rng(3)
    positions = np.array([5, -1, RING, 3 * RING + 7, 0, 2 * RING - 1])
    batch, size = len(positions), int(positions.max()) + 1
    q = jnp.asarray(random.normal(size=(batch, HEADS, HEAD_DIM)), DTYPE)
    tokens = {
        name: np.asarray(random.normal(size=(batch, size, GROUPS, HEAD_DIM)), np.float32)
        for name in ("key", "value")
    }
    pool = {name: np.zeros((batch, RING, GROUPS, HEAD_DIM), np.float32) for name in tokens}
    for name, array in tokens.items():
        for row, position in enumerate(positions):
            for earlier in range(max(position, 0)):
                pool[name][row, earlier % RING] = array[row, earlier]
    new = {n: jnp.asarray(x[np.arange(batch), np.maximum(positions, 0)], DTYPE)
           for n, x in tokens.items()}  # fmt: skip
    context, after = decode.paged_attention(
        q,
        new,
        {name: jnp.asarray(array, DTYPE) for name, array in pool.items()},
        jnp.arange(batch, dtype=jnp.int32)[:, None],
        jnp.asarray(positions, jnp.int32),
        scale=0.3,
        tile_size=tile_size,
        splits=splits,
        ring=kind,
        interpret=not GPU,
    )
    for row, position in enumerate(positions):
        if position < 0:
            assert not np.asarray(context[row]).any()
            continue
        start = position // RING * RING if kind == "chunk" else max(0, position - RING + 1)
        keys, values = (
            np.repeat(tokens[name][row, start : position + 1], HEADS // GROUPS, axis=1)
            for name in ("key", "value")
        )
        logits = 0.3 * np.einsum("hd,thd->ht", np.asarray(q[row], np.float32), keys)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        expected = np.einsum("ht,thd->hd", weights, values)
        np.testing.assert_allclose(
            np.asarray(context[row], np.float32), expected, atol=TOLERANCE, rtol=TOLERANCE
        )
        np.testing.assert_allclose(
            np.asarray(after["key"][row, position % RING], np.float32),
            np.asarray(new["key"][row], np.float32),
        )


@pytest.mark.parametrize("splits", [1, 3, 7, 40])
@pytest.mark.parametrize("sinks", [False, True])
def test_combine_spans(monkeypatch, splits, sinks):
    """Two groups of three heads; some spans are empty. Eight spans at a time."""
    monkeypatch.setattr(decode, "COMBINED_ELEMENTS", 8 * HEAD_DIM)
    random = np.random.default_rng(6)
    logits = random.normal(size=(2, 2, splits, 3, 5)) * 4
    values = random.normal(size=(2, 2, splits, 3, 5, HEAD_DIM))
    nonempty = random.random((2, 2, splits, 1)) < 0.7
    nonempty[:, :, 0] = True
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    largest = np.where(nonempty, logits.max(-1), decode.MASK_VALUE)
    total = np.where(nonempty, weights.sum(-1), 0)
    context = np.where(nonempty[..., None], (weights[..., None] * values).sum(-2), 0)
    sink = random.normal(size=6) if sinks else None
    exponentials = np.exp(logits) * nonempty[..., None]
    right = (exponentials[..., None] * values).sum((2, 4))
    right /= (exponentials.sum((2, 4)) + (np.exp(sink).reshape(2, 3) if sinks else 0))[..., None]
    spans = [jnp.asarray(part, jnp.float32) for part in (context, largest, total)]
    sink = None if sink is None else jnp.asarray(sink)
    actual = decode.combine_spans(*spans, sinks=sink, dtype=jnp.float32, interpret=not GPU)
    np.testing.assert_allclose(actual, right, atol=1e-5)
