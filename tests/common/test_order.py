"""Orders of tokens over shards, against their definitions."""

import numpy as np
import pytest

from maxtext.common.order import Order


def test_dual_chunks():
    """Shard r holds chunks r and 2n - 1 - r."""
    assert Order("dual_chunk_swap", 2).tokens(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    tokens = Order("dual_chunk_swap", 4).tokens(32).reshape(4, 2, 4)
    for rank, (low, high) in enumerate(tokens):
        assert low.tolist() == list(range(4 * rank, 4 * rank + 4))
        assert high.tolist() == list(range(4 * (7 - rank), 4 * (7 - rank) + 4))


def test_striped():
    """Token i goes to shard i mod n."""
    tokens = Order("striped", 4).tokens(16).reshape(4, 4)
    for rank, own in enumerate(tokens):
        assert own.tolist() == list(range(rank, 16, 4))


@pytest.mark.parametrize("kind", ["dual_chunk_swap", "striped"])
def test_equal_work(kind):
    """Causal attention: how many keys a shard's queries see differs by less than a chunk's
    worth.
    """
    seen = (Order(kind, 4).tokens(64) + 1).reshape(4, 16).sum(axis=1)
    assert np.ptp(seen) <= (0 if kind == "dual_chunk_swap" else 16 * 3)


def test_unknown_kind():
    with pytest.raises(ValueError, match="dual_chunk_swap or striped"):
        Order("zigzag", 2)
