"""Sharding of the training state, and rejected shardings. Needs no devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from maxtext.common.errors import ConfigError
from maxtext.sharding import AxisRules
from maxtext.sharding.state import (
    check_batch_size,
    check_sharded_fraction,
    describe_shardings,
    shard_over,
)

MESH = AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"))
RULES = AxisRules(
    MESH,
    (
        ("activation_batch", ("data", "fsdp")),
        ("embed", ("fsdp",)),
        ("mlp", ("tensor",)),
        ("vocab", ()),
        ("norm", ()),
    ),
)


def weight(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (("fsdp", None), (8, 6), (("fsdp", "data"), None)),  # the first dimension that is divisible
        (("fsdp", None), (4, 6), (None, ("data",))),  # 4 over fsdp leaves one
        ((), (6, 5), (("data",), None)),
        (("fsdp", "tensor"), (4, 2), None),  # nothing divides: unchanged
        (("data",), (4,), None),  # used already
    ],
)
def test_shard_over(spec, shape, expected):
    before = NamedSharding(MESH, PartitionSpec(*spec))
    after = shard_over(before, shape, "data")
    if expected is None:
        assert after == before
        return
    padded = [*before.spec, *[None] * (len(shape) - len(spec))]
    entries = [entry or old for entry, old in zip(expected, padded, strict=True)]
    entries = [(entry,) if isinstance(entry, str) else entry for entry in entries]
    assert after.spec == PartitionSpec(*entries)


def test_shard_over_ignores_axes_outside_the_mesh():
    sharding = NamedSharding(MESH, PartitionSpec("fsdp"))
    assert shard_over(sharding, (8,), "expert") == sharding


AXES = {"table": ("vocab", None), "weight": ("embed", "mlp"), "scale": ("norm",)}


def test_rejects_too_many_replicated_weights():
    weights = {"table": weight(96, 32), "weight": weight(32, 32), "scale": weight(32)}
    with pytest.raises(
        ConfigError, match=r"75\.2% of the weights .*sharding_tolerance=0\.02: table \[96, 32\]"
    ):
        check_sharded_fraction(RULES, AXES, weights, 0.02)  # 3,104 of 4,128 elements
    check_sharded_fraction(RULES, AXES, weights, 0.8)


def test_weights_that_no_axis_divides_do_not_count():
    """Neither do weights on a mesh whose axes shard no weight."""
    check_sharded_fraction(
        RULES, AXES, {"table": weight(95, 33), "weight": weight(32, 32), "scale": weight(31)}, 0.02
    )
    alone = AxisRules(AbstractMesh((16, 1, 1), MESH.axis_names), RULES.rules)
    check_sharded_fraction(
        alone, AXES, {"table": weight(96, 32), "weight": weight(32, 32), "scale": weight(32)}, 0.0
    )


def test_rejects_a_batch_that_does_not_divide():
    check_batch_size(RULES, 16, "per_device_batch_size")
    message = (
        "6 sequences does not divide over the 8 devices of data x fsdp: change "
        "per_device_batch_size, or .*context"
    )
    with pytest.raises(ConfigError, match=message):
        check_batch_size(RULES, 6, "per_device_batch_size")


def test_describe_shardings():
    lines = list(
        describe_shardings(
            RULES, AXES, {"table": weight(96, 32), "weight": weight(32, 32), "scale": weight(32)}
        )
    )
    assert "weight [32, 32]: (embed, mlp) -> (fsdp, tensor), shards [8, 16]" in lines
    assert "scale [32]: (norm) -> (-), shards [32]" in lines
