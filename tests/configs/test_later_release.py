"""Files of a later release of MaxText load as they are; its keys act, or are refused with the
reason.

later_keys.json lists the keys of its base.yml that the published list does not have, or has with
another default, and the published keys that it lacks.
"""

import json
from pathlib import Path

import pytest
import yaml

from maxtext.common.errors import ConfigError
from maxtext.configs import ledger, serialize, types
from maxtext.configs.derive import Devices
from maxtext.configs.load import base_values
from maxtext.configs.sources import from_python
from maxtext.models.configuration import load

HERE = Path(__file__).parent
LATER = json.loads((HERE / "later_keys.json").read_text())
PUBLISHED = json.loads((HERE / "published_keys.json").read_text())["groups"]
RL = """
base_config: "../base.yml"
rl: {num_generations: 2, num_iterations: 1, grpo_beta: 0.08, grpo_epsilon: 0.2, loss_algo: grpo}
debug: {rl: true}
num_batches: 4
max_prefill_predict_length: 256
max_target_length: 1024
decode_sampling_temperature: 0.9
decode_sampling_top_k: 50
rollout_subslice_shape: ""
data_template_path: maxtext/examples/chat_templates/gsm8k_rl.json
dataset_name: openai/gsm8k
hf_subset: main
"""


@pytest.fixture
def base_file(tmp_path):
    """base.yml of the later release."""
    keys = [key for group in PUBLISHED.values() for key in group if key not in LATER["absent"]]
    defaults = {key: serialize.plain(getattr(base_values(), key)) for key in keys}
    rules = [
        [name, [a for axis in axes for a in with_ulysses(axis)]]
        for name, axes in defaults["logical_axis_rules"]
    ]
    path = tmp_path / "base.yml"
    path.write_text(yaml.safe_dump({**defaults, "logical_axis_rules": rules, **LATER["defaults"]}))
    return path


def with_ulysses(axis):
    return [axis, "context_usp_ulysses"] if axis == "context" else [axis]


def load_file(path, *overrides):
    return load(path, list(overrides), environ={}, devices=Devices(1))


def test_base_file_loads_as_it_is(base_file):
    config, plain = load_file(base_file), load(None, [], environ={}, devices=Devices(1))
    differing = {
        key
        for key in types.Settings.model_fields
        if (getattr(config, key) or None) != (getattr(plain, key) or None)
    }
    assert differing - set(types.DerivedValues.model_fields) == {
        "run_name",  # has the time
        "save_checkpoint_on_start",
        "use_truncation",  # that of the file
        "enable_nnx",
        "pure_nnx",
        "pure_nnx_decoder",
        "scan_pipeline_repeats",
        "mesh_axes",
        "data_sharding",
        "logical_axis_rules",
        "dataset_name",
        "eval_dataset_name",
    } - ({"run_name"} if config.run_name == plain.run_name else set())
    assert config.global_batch_size_to_train_on == plain.global_batch_size_to_train_on


def test_file_of_reinforcement_learning_loads_as_it_is(base_file):
    path = base_file.parent / "post_train" / "rl.yml"
    path.parent.mkdir()
    path.write_text(RL)
    config = load_file(path, "use_grpo=true")  # as `maxtext grpo FILE` sets it
    assert config.hf_name == "main"
    assert config.data_template_path == "maxtext/examples/chat_templates/gsm8k_rl.json"
    # defaults of the copied base.yml are no choices, so that those of use_grpo hold
    assert config.decode_sampling_strategy.value == "topk"
    assert (config.packing, config.steps) == (False, 4)


def test_small_files_and_resolved_configurations_keep_their_choices(tmp_path):
    path = tmp_path / "own.yml"
    path.write_text("use_truncation: true\n")
    config = load_file(path)
    assert config.use_truncation
    path.write_text(serialize.yaml_text(config, serialize.KEYS_IN_ORDER))
    assert load_file(path).use_truncation


def test_every_key_of_a_later_release_is_known():
    known = set(types.Settings.model_fields) | {"hf_lora_adapter_path"}
    assert set(LATER["defaults"]) <= known
    assert set(types.LaterReleases.model_fields) <= set(LATER["defaults"])


def other_value(key, default):
    field = types.LaterReleases.model_fields[key]
    if isinstance(default, bool) or field.annotation == bool | None:
        return not default
    if isinstance(default, list):
        return [4]
    if isinstance(default, int | float) or field.annotation == int | None:
        return (default or 0) + 2
    return "device" if key in ("kv_proj", "indexer_cutoff_threshold") else "other"


def test_inert_keys_of_a_later_release_are_refused_with_the_reason():
    keys = {
        key: other_value(key, getattr(base_values(), key))
        for key in types.LaterReleases.model_fields
    }
    with pytest.raises(ConfigError) as raised:
        load(None, from_python(keys), environ={}, devices=Devices(1))
    message = str(raised.value)
    for key in keys:
        status = ledger.status(key)
        assert status.kind in ("not_yet", "never")
        assert f"{key}={ledger.shown(keys[key])} (python) would be ignored: it {status}" in message


def test_rules_of_evaluation_are_completed_by_those_of_training():
    own = "logical_axis_rules_for_eval=[[activation_batch, fsdp], [mine, [data]]]"
    config = load_file(None, "eval_interval=2", own, "logical_axis_rules=[[embed, [data]]]")
    rules, own_rules = config.logical_axis_rules, config.logical_axis_rules_for_eval
    assert dict(own_rules)["activation_batch"] == ["fsdp"]
    assert dict(own_rules)["mine"] == ["data"]
    replaced = {"activation_batch", "mine"}
    assert [rule for rule in own_rules if rule[0] not in replaced] == [
        rule for rule in rules if rule[0] not in replaced
    ]
    layout = load_file(None, "eval_interval=2", "custom_mesh_and_rule_for_eval=ep-as-cp")
    assert dict(layout.logical_axis_rules_for_eval)["activation_length"] == ["expert"]
    assert layout.mesh_axes == config.mesh_axes
    assert load_file(None, "eval_interval=2").logical_axis_rules_for_eval == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval_start_step=3"], "eval_start_step=3 .* would do nothing: it needs eval_interval"),
        (["eval_interval=2", "steps=5", "eval_start_step=9"], "after the last of steps=5"),
        (
            ["logical_axis_rules_for_eval=[[embed, [data]]]"],
            "logical_axis_rules_for_eval=.*would do nothing: it needs eval_interval",
        ),
        (
            ["eval_interval=2", "logical_axis_rules_for_eval=[3]"],
            "logical_axis_rules_for_eval .*; 3 is not such a pair",
        ),
        (["max_inflight_computations=0"], "max_inflight_computations=0 is out of range"),
        (["wandb_run_name=a"], "wandb_run_name=a .* it needs enable_wandb=true"),
        (["data_template_path=a.json"], "data_template_path=a.json .* it needs use_grpo=true"),
        (["mesh_axes=[data, usp]"], "mesh_axes has unknown axes 'usp'"),
    ],
)
def test_acting_keys_of_a_later_release_are_checked(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_file(None, *overrides)
