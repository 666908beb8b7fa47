"""Named layouts, and combinations of the mesh with the model that are refused."""

import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.configs.sources import LAYOUTS
from maxtext.configs.types import CustomRule
from maxtext.models.configuration import load


def config(*overrides):
    return load(None, overrides, environ={}, devices=Devices(8))


@pytest.mark.parametrize("name", [rule.value for rule in CustomRule if rule.value])
def test_every_name_has_a_file(name):
    assert (LAYOUTS / f"{name}.yml").is_file()
    found = config(f"custom_mesh_and_rule={name}")
    assert [axis for axes in found.data_sharding for axis in axes] == found.mesh_axes
    assert found.source("mesh_axes").location.endswith(f"{name}.yml")


def test_a_layout_replaces_only_its_own_rules():
    found, plain = config("custom_mesh_and_rule=ep-as-cp"), config()
    rules, base = (dict(map(tuple, one.logical_axis_rules)) for one in (found, plain))
    assert rules["activation_length"] == ["expert"]
    assert rules["activation_batch"] == ["data", "fsdp"]
    assert rules["heads"] == base["heads"]
    assert (found.context_sharding, plain.context_sharding) == ("expert", "context")


def test_user_settings_override_the_layout():
    found = config(
        "custom_mesh_and_rule=pure-fsdp", "mesh_axes=['data', 'fsdp']", "ici_data_parallelism=2"
    )
    assert found.ici_parallelism == [2, 4]


DELTA = [
    "decoder_block=qwen3_next",
    "gdn_num_key_heads=2",
    "gdn_num_value_heads=2",
    "gdn_key_head_dim=8",
    "gdn_value_head_dim=8",
    "inhomogeneous_layer_cycle_interval=4",
]
REFUSED = {
    "an axis that no rule names": (
        ["ici_sequence_parallelism=2"],
        "ici_sequence_parallelism=2 would split nothing",
    ),
    "balance with DeltaNets": (
        [*DELTA, "ici_context_parallelism=2"],
        "DeltaNet .*context_parallel_load_balance=false",
    ),
    "balance with further tokens": (
        ["mtp_num_layers=1", "ici_context_parallelism=2"],
        "which mtp_num_layers does not support",
    ),
    "an order without balance": (
        ["context_parallel_reorder_strategy=striped"],
        "context_parallel_reorder_strategy=striped would do nothing",
    ),
    "explicit with muon": (
        ["shard_mode=explicit", "opt_type=muon"],
        "explicit does not support opt_type=muon",
    ),
    "explicit with ZeRO-1": (
        ["shard_mode=explicit", "shard_optimizer_over_data=true"],
        "shard_optimizer_over_data",
    ),
    "offloaded layers that interleave": (
        ["parameter_memory_host_offload=true"],
        "set param_scan_axis=0 .* or scan_layers=false",
    ),
    "another way of context": (
        ["context_parallel_strategy=ring"],
        "only context_parallel_strategy=all_gather is implemented",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_conflicting_layout_is_refused(case):
    overrides, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        config(*overrides)
