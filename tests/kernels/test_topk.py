"""Top-k masks whose choice among equals is that of torch.topk on CPUs."""

import jax
import numpy as np
import pytest

from maxtext.kernels.attention.topk import torch_topk_mask, torch_topk_mask_of_row

torch = pytest.importorskip("torch")


def rows(size, count=300):
    """Scores of which some are equal, masked from some key on, as those of an indexer."""
    draw = np.random.default_rng(size)
    scores = draw.normal(size=(count, size)).astype(np.float32)
    scores[draw.random(scores.shape) < draw.choice([0.05, 0.2, 0.9], (count, 1))] = 0
    scores[: count // 4] = np.round(scores[: count // 4] * 2) / 2
    hidden = np.arange(size) > draw.integers(size // 3, size, (count, 1))
    return np.where(hidden, -np.inf, scores)


def torch_choice(scores, count):
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, torch.tensor(scores).topk(count).indices.numpy(), True, axis=1)
    return chosen


@pytest.mark.parametrize(
    ("size", "count"), [(48, 16), (64, 16), (211, 16), (37, 7), (9, 7), (7, 7), (5, 1)]
)
def test_choice_among_equals_matches_torch(size, count):
    scores = rows(size)
    chosen = jax.jit(jax.vmap(lambda row: torch_topk_mask_of_row(row, count)))(scores)
    np.testing.assert_array_equal(chosen, torch_choice(scores, count))


@pytest.mark.parametrize(("size", "count"), [(37, 7)])
def test_padding_does_not_change_the_choice(size, count):
    """The choice of a padded row is torch's choice of the row without its padding."""
    scores = rows(size)[:40]
    padded = np.concatenate([scores, np.full((len(scores), 13), -np.inf, np.float32)], axis=1)
    chosen = jax.jit(lambda scores, length: torch_topk_mask(scores, count, length))(
        padded[:, None], np.full(len(scores), size, np.int32)
    )[:, 0]
    visible = np.isfinite(scores)
    np.testing.assert_array_equal(chosen[:, :size] & visible, torch_choice(scores, count) & visible)
    assert (chosen.sum(axis=-1) == count).all()


def test_only_ambiguous_rows_change():
    """Rows whose k-th score is hidden (-inf) keep the first of equals: masked keys are not
    visible anyway.
    """
    scores = rows(48)
    expected = torch_choice(scores, 16)
    chosen = np.asarray(jax.jit(lambda scores: torch_topk_mask(scores, 16))(scores[:, None]))[:, 0]
    visible = np.isfinite(scores)
    np.testing.assert_array_equal(chosen & visible, expected & visible)
    assert (chosen.sum(axis=-1) == 16).all()
