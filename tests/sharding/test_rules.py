"""Logical axis rules: the mesh axes of dimensions, on a mesh without devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.sharding import AxisRules, constrain, use_rules

SIZES = {"data": 2, "stage": 1, "fsdp": 4, "context": 1, "tensor": 2, "expert": 1}
RULES = (
    ("batch", ("data", "fsdp")),
    ("heads", ("tensor",)),
    ("mlp", ("fsdp", "tensor")),
    ("mlp", ("tensor",)),
    ("embed", ("fsdp", "context", "expert")),
    ("length", ("context",)),
    ("nowhere", ()),
    ("layers", ("stage",)),
    ("other", ("unknown_axis", "tensor")),
)


def rules(sizes=SIZES, table=RULES):
    return AxisRules(AbstractMesh(tuple(sizes.values()), tuple(sizes)), table)


CASES = {
    "several axes for one dimension": (("batch", None), (16, 5), (("data", "fsdp"), None)),
    "axes of size 1 are ignored": (("embed", "layers"), (8, 4), (("fsdp",), None)),
    "no rule": (("never heard of", "heads"), (8, 8), (None, ("tensor",))),
    "no name": ((None, None), (8, 8), (None, None)),
    "a rule of no axes": (("nowhere",), (8,), (None,)),
    "the first rule that fits": (("mlp",), (16,), (("fsdp", "tensor"),)),
    "the next rule where the first does not divide": (("mlp",), (6,), (("tensor",),)),
    "none divides": (("mlp", "batch"), (7, 7), (None, None)),
    "4 over 8 devices does not divide": (("batch",), (4,), (None,)),
    "used axes are skipped": (("embed", "mlp"), (8, 8), (("fsdp",), ("tensor",))),
    "also in the other order": (("mlp", "embed"), (16, 8), (("fsdp", "tensor"), None)),
    "a name twice": (("heads", "heads"), (4, 4), (("tensor",), None)),
    "an axis that the mesh does not have": (("other",), (4,), (("tensor",),)),
    "an axis that did not divide stays free": (("batch", "embed"), (6, 8), (None, ("fsdp",))),
}


@pytest.mark.parametrize("name", CASES)
def test_spec(name):
    axes, shape, expected = CASES[name]
    assert rules().spec(axes, shape) == PartitionSpec(*expected)


def test_rejects_names_that_do_not_match_the_shape():
    with pytest.raises(ValueError, match="zip"):
        rules().spec(("batch", None), (4,))


def test_one_device_shards_nothing():
    alone = rules(dict.fromkeys(SIZES, 1))
    for axes, shape, _ in CASES.values():
        assert alone.spec(axes, shape) == PartitionSpec(*(None,) * len(shape))


def test_rules_of_base_yml():
    """fsdp shards the embedding dimension of weights; tensor shards heads, MLP and vocabulary."""
    config = load(
        None,
        ["ici_data_parallelism=2", "ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"],
        environ={},
        devices=Devices(16),
    )
    mesh = AbstractMesh(tuple(config.ici_parallelism), tuple(config.mesh_axes))
    rules = AxisRules.from_config(config, mesh)
    fsdp, tensor = ("fsdp",), ("tensor",)
    assert rules.spec(("embed", "q_heads", "kv"), (64, 8, 16)) == PartitionSpec(fsdp, tensor, None)
    assert rules.spec(("heads", "kv", "embed"), (8, 16, 64)) == PartitionSpec(tensor, None, fsdp)
    assert rules.spec(("embed", "layers", "mlp"), (64, 3, 256)) == PartitionSpec(fsdp, None, tensor)
    assert rules.spec(("vocab", "embed_vocab"), (512, 64)) == PartitionSpec(tensor, fsdp)
    assert rules.spec(("embed", "kv_heads", "kv_head_dim"), (64, 1, 16)) == PartitionSpec(
        fsdp, None, None
    )  # MQA
    batch = config.input_data_sharding_logical_axes
    assert rules.spec(batch, (32, 128)) == PartitionSpec(("data", "fsdp"), None)


def test_constrain_needs_rules_and_several_devices():
    x = jnp.ones((4, 4))
    assert constrain(x, "batch", "length") is x
    single = AxisRules(jax.make_mesh((1,), ("data",)), RULES)
    with use_rules(single):
        assert constrain(x, "batch", "length") is x


def test_uses_only_allowed_axes():
    """data_sharding names the axes over which a batch is sharded at its arrival."""
    assert rules().sharding(("batch", None), (16, 5), {"data", "fsdp"}).spec == PartitionSpec(
        ("data", "fsdp"), None
    )
    assert rules().sharding(("batch", None), (16, 5), {"data", "tensor"}).spec == PartitionSpec(
        ("data",), None
    )
    assert rules().sharding(("batch", None), (16, 5), set()).spec == PartitionSpec(None, None)
