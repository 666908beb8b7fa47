"""Load-balanced orders against their definitions."""

import numpy as np
import pytest

from maxtext.kernels.attention_options import LoadBalancedOrder


def test_dual_chunk_swap():
    """Shard r holds chunks r and 2n - 1 - r."""
    assert LoadBalancedOrder("dual_chunk_swap", 2).positions(8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    positions = LoadBalancedOrder("dual_chunk_swap", 4).positions(32).reshape(4, 2, 4)
    for rank, (low, high) in enumerate(positions):
        assert low.tolist() == list(range(4 * rank, 4 * rank + 4))
        assert high.tolist() == list(range(4 * (7 - rank), 4 * (7 - rank) + 4))


def test_striped():
    """Token i goes to shard i mod n."""
    positions = LoadBalancedOrder("striped", 4).positions(16).reshape(4, 4)
    for rank, shard in enumerate(positions):
        assert shard.tolist() == list(range(rank, 16, 4))


@pytest.mark.parametrize("strategy", ["dual_chunk_swap", "striped"])
def test_shards_do_equal_work(strategy):
    """Causal attention: the number of visible keys differs between shards by less than a chunk."""
    num_keys = (LoadBalancedOrder(strategy, 4).positions(64) + 1).reshape(4, 16).sum(axis=1)
    assert np.ptp(num_keys) <= (0 if strategy == "dual_chunk_swap" else 16 * 3)


def test_rejects_unknown_strategies():
    with pytest.raises(ValueError, match="dual_chunk_swap or striped"):
        LoadBalancedOrder("zigzag", 2)
