"""How the state lies on a mesh: splits beyond the rules, and layouts that are refused. No devices
are needed.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from maxtext.common.errors import ConfigError
from maxtext.sharding import AxisRules
from maxtext.sharding.state import check_batch, check_split, describe, split_further

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
        (("fsdp", None), (8, 6), (("fsdp", "data"), None)),  # the first dimension that it divides
        (("fsdp", None), (4, 6), (None, ("data",))),  # 4 over fsdp leaves one
        ((), (6, 5), (("data",), None)),
        (("fsdp", "tensor"), (4, 2), None),  # nothing divides: as it is
        (("data",), (4,), None),  # it is split so already
    ],
)
def test_split_further(spec, shape, expected):
    before = NamedSharding(MESH, PartitionSpec(*spec))
    after = split_further(before, shape, "data")
    if expected is None:
        assert after == before
        return
    entries = [entry if entry else before.spec[place] if place < len(spec) else None
               for place, entry in enumerate(expected)]  # fmt: skip
    entries = [(entry,) if isinstance(entry, str) else entry for entry in entries]
    assert after.spec == PartitionSpec(*entries)


def test_an_axis_that_the_mesh_does_not_have():
    sharding = NamedSharding(MESH, PartitionSpec("fsdp"))
    assert split_further(sharding, (8,), "expert") == sharding


AXES = {"table": ("vocab", None), "kernel": ("embed", "mlp"), "scale": ("norm",)}


def test_too_much_of_the_weights_is_whole():
    weights = {"table": weight(96, 32), "kernel": weight(32, 32), "scale": weight(32)}
    with pytest.raises(
        ConfigError, match=r"75\.2% of the weights .*sharding_tolerance=0\.02: table \[96, 32\]"
    ):
        check_split(RULES, AXES, weights, 0.02)  # 3,104 of 4,128 numbers
    check_split(RULES, AXES, weights, 0.8)


def test_what_cannot_be_split_does_not_count():
    """Sizes that no axis divides are nobody's fault, nor is a mesh whose axes split no weight."""
    check_split(
        RULES, AXES, {"table": weight(95, 33), "kernel": weight(32, 32), "scale": weight(31)}, 0.02
    )
    alone = AxisRules(AbstractMesh((16, 1, 1), MESH.axis_names), RULES.rules)
    check_split(
        alone, AXES, {"table": weight(96, 32), "kernel": weight(32, 32), "scale": weight(32)}, 0.0
    )


def test_a_batch_that_does_not_divide():
    check_batch(RULES, 16, "per_device_batch_size")
    message = "6 sequences does not divide over the 8 devices of data x fsdp: change per_device_batch_size, or .*context"
    with pytest.raises(ConfigError, match=message):
        check_batch(RULES, 6, "per_device_batch_size")


def test_description():
    lines = list(
        describe(
            RULES, AXES, {"table": weight(96, 32), "kernel": weight(32, 32), "scale": weight(32)}
        )
    )
    assert "kernel [32, 32]: (embed, mlp) -> (fsdp, tensor), shards [8, 16]" in lines
    assert "scale [32]: (norm) -> (-), shards [32]" in lines
