"""The largest scores of a row, equals chosen as torch.topk chooses them on CPUs."""

import jax
import numpy as np
import pytest

from maxtext.kernels.attention.ties import largest_as_torch, largest_keys

torch = pytest.importorskip("torch")


def rows(size, count=300):
    """Scores of which some are equal, hidden from some place on, as an indexer's are."""
    draw = np.random.default_rng(size)
    scores = draw.normal(size=(count, size)).astype(np.float32)
    scores[draw.random(scores.shape) < draw.choice([0.05, 0.2, 0.9], (count, 1))] = 0
    scores[: count // 4] = np.round(scores[: count // 4] * 2) / 2
    hidden = np.arange(size) > draw.integers(size // 3, size, (count, 1))
    return np.where(hidden, -np.inf, scores)


def by_torch(scores, count):
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, torch.tensor(scores).topk(count).indices.numpy(), True, axis=1)
    return chosen


@pytest.mark.parametrize(
    ("size", "count"), [(48, 16), (64, 16), (211, 16), (37, 7), (9, 7), (7, 7), (5, 1)]
)
def test_equals_are_chosen_as_torch_does(size, count):
    scores = rows(size)
    ours = jax.jit(jax.vmap(lambda row: largest_as_torch(row, count)))(scores)
    np.testing.assert_array_equal(ours, by_torch(scores, count))


@pytest.mark.parametrize(("size", "count"), [(37, 7)])
def test_padding_after_a_row_does_not_count(size, count):
    """The choice of a padded row is torch's choice of the row without its padding."""
    scores = rows(size)[:40]
    padded = np.concatenate([scores, np.full((len(scores), 13), -np.inf, np.float32)], axis=1)
    ours = jax.jit(lambda scores, length: largest_keys(scores, count, length))(
        padded[:, None], np.full(len(scores), size, np.int32)
    )[:, 0]
    seen = np.isfinite(scores)
    np.testing.assert_array_equal(ours[:, :size] & seen, by_torch(scores, count) & seen)
    assert (ours.sum(axis=-1) == count).all()


def test_only_the_unclear_rows_are_touched():
    """Rows whose k-th score is hidden (-inf) keep the first of equals: what is hidden is not seen
    anyway.
    """
    scores = rows(48)
    expected = by_torch(scores, 16)
    ours = np.asarray(jax.jit(lambda scores: largest_keys(scores, 16))(scores[:, None]))[:, 0]
    seen = np.isfinite(scores)
    np.testing.assert_array_equal(ours & seen, expected & seen)
    assert (ours.sum(axis=-1) == 16).all()
