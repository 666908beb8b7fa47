"""Mixture of block attention against a slow loop over queries.

Shapes: B batch, S sequence, H query heads, K key heads, D head dim.
"""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.moba import moba_selection

select = jax.jit(moba_selection, static_argnums=(2, 3))


def problem(length, batch=2, q_heads=4, k_heads=2, head_dim=6, seed=0):
    draw = np.random.default_rng(seed).normal
    return [
        draw(size=(batch, length, heads, head_dim)).astype(np.float32)
        for heads in (q_heads, k_heads)
    ]


def loop_selection(q, k, chunk, topk):
    """One row without packing, by a loop over queries and heads: [H, S, S]."""
    length, q_heads = q.shape[:2]
    groups = q_heads // k.shape[1]
    selected = np.zeros((q_heads, length, length), bool)
    starts = range(0, length, chunk)
    for head in range(q_heads):
        keys = k[:, head // groups].astype(np.float64)
        pools = [keys[start : start + chunk].mean(0) for start in starts]
        for i in range(length):
            own = i // chunk
            past = sorted(range(own), key=lambda c: -(q[i, head] @ pools[c]))
            for c in [own, *past[: topk - 1]]:
                for j in range(c * chunk, min((c + 1) * chunk, length)):
                    selected[head, i, j] = j <= i
    return selected


@pytest.mark.parametrize(
    ("length", "chunk", "topk"),
    [(16, 4, 2), (16, 4, 1), (16, 4, 3), (18, 4, 3), (16, 4, 9), (5, 8, 2), (7, 1, 3)],
)
def test_selected_chunks_match_a_loop(length, chunk, topk):
    q, k = problem(length)
    expected = np.stack([loop_selection(*row, chunk, topk) for row in zip(q, k, strict=True)])
    np.testing.assert_array_equal(select(q, k, chunk, topk), expected)
    if topk * chunk < length:
        assert expected[:, :, -1].sum(-1).max() < length  # some chunk is not selected


@pytest.mark.parametrize(("topk", "length"), [(1, 18), (2, 18), (2, 300)])
def test_packed_documents_select_as_if_unpacked(topk, length):
    """Documents do not start at chunk boundaries of the row; 300 tokens exceed a block of
    queries.
    """
    q, k = problem(length)
    chunk = 4 if length == 18 else 30
    cuts = (
        [[0, 7, 16], [0, length]] if length == 18 else [[0, 113, 290], [0, 1, length]]
    )  # then padding
    segments, positions = np.zeros((2, length), np.int32), np.zeros((2, length), np.int32)
    expected = np.zeros((2, 4, length, length), bool)
    for row, bounds in enumerate(cuts):
        for name, (start, end) in enumerate(pairwise(bounds), start=1):
            segments[row, start:end], positions[row, start:end] = name, np.arange(end - start)
            part = slice(start, end)
            expected[row, :, part, part] = loop_selection(q[row, part], k[row, part], chunk, topk)
    np.testing.assert_array_equal(select(q, k, chunk, topk, positions, segments), expected)


def test_one_document_selects_the_same_packed_or_not():
    q, k = map(jnp.asarray, problem(18))
    ones = jnp.ones((2, 18), jnp.int32)
    plain = select(q, k, 4, 2)
    np.testing.assert_array_equal(
        select(q, k, 4, 2, jnp.broadcast_to(jnp.arange(18), (2, 18)), ones), plain
    )


def test_segments_need_positions():
    q, k = map(jnp.asarray, problem(8))
    with pytest.raises(ValueError, match="positions"):
        moba_selection(q, k, 4, 2, segments=jnp.ones((2, 8), jnp.int32))


def test_gates_are_float32():
    """In bfloat16 the choice is that of float32 arithmetic on the rounded inputs."""
    q, k = (jnp.asarray(array, jnp.bfloat16) for array in problem(64))
    rounded = [np.asarray(array, np.float32) for array in (q, k)]
    expected = np.stack([loop_selection(*row, 8, 3) for row in zip(*rounded, strict=True)])
    np.testing.assert_array_equal(select(q, k, 8, 3), expected)
