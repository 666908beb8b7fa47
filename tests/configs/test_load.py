"""Layers, precedence, conflicts, and where each value says it is from."""

import pytest

import maxtext
from maxtext.common.errors import ConfigError
from maxtext.configs import serialize, sources
from maxtext.configs.derive import Devices
from maxtext.configs.load import peek_setting
from maxtext.models.configuration import load


def resolved(overrides=(), path=None, environ=None, devices=1):
    return load(path, list(overrides), environ=environ or {}, devices=Devices(devices))


@pytest.fixture
def file(tmp_path):
    def write(content, name="mine.yml"):
        path = tmp_path / name
        path.write_text(content)
        return path

    return write


def test_later_layers_win(file):
    path = file("base_config: base.yml\nper_device_batch_size: 3\nbase_mlp_dim: 64\n")
    assert resolved().per_device_batch_size == 12
    assert resolved(path=path).per_device_batch_size == 3
    assert resolved(path=path, environ={"M_PER_DEVICE_BATCH_SIZE": "4"}).per_device_batch_size == 4
    assert resolved(["per_device_batch_size=5"], path).per_device_batch_size == 5
    assert resolved(["per_device_batch_size=5"], path).base_mlp_dim == 64


def test_inheritance_is_relative_to_the_file_then_to_the_package(file):
    file("base_emb_dim: 32\nbase_mlp_dim: 64\n", "parent.yml")
    child = file("base_config: parent.yml\nbase_mlp_dim: 128\n", "child.yml")
    config = resolved(path=child)
    assert (config.base_emb_dim, config.base_mlp_dim, config.base_num_kv_heads) == (32, 128, 16)
    assert config.source("base_emb_dim").line == 1
    assert str(config.source("base_mlp_dim")).endswith("child.yml:2")


def test_sources(file):
    path = file("# a comment\nbase_config: base.yml\nbase_mlp_dim: 64\n")
    environ = {"M_PER_DEVICE_BATCH_SIZE": "2", "HOME": "/nowhere"}
    config = resolved(["model_name=default", "base_emb_dim=32"], path, environ)
    assert str(config.source("base_emb_dim")) == "command line"
    assert str(config.source("base_mlp_dim")).endswith("mine.yml:3")
    assert str(config.source("per_device_batch_size")) == "environment (M_PER_DEVICE_BATCH_SIZE)"
    assert config.source("emb_dim").kind == "derived"
    assert config.source("head_dim").kind == "default"
    config = resolved(["model_name=llama2-7b"])
    assert str(config.source("base_emb_dim")).startswith("models/llama2-7b.yml:")
    assert "base.yml" in str(config.source("logical_axis_rules"))
    assert "models/llama2-7b.yml" in str(config.source("logical_axis_rules"))


def test_override_model_config_is_needed_only_for_differences(file):
    assert resolved(["model_name=llama2-7b", "base_emb_dim=4096"]).emb_dim == 4096
    assert resolved(["model_name=gemma3-4b", "normalization_layer_epsilon=1e-06"]).emb_dim == 2560
    overrides = ["model_name=llama2-7b", "base_num_decoder_layers=2", "override_model_config=true"]
    assert resolved(overrides).num_decoder_layers == 2
    path = file("base_config: base.yml\nbase_num_decoder_layers: 2\noverride_model_config: true\n")
    assert resolved(["model_name=llama2-7b"], path).num_decoder_layers == 2


def test_a_full_copy_of_the_base_file_does_not_conflict_with_a_model(file):
    copy = sources.BASE.read_text().replace("model_name: default", "model_name: mistral-7b")
    assert resolved(path=file(copy)).emb_dim == 4096
    changed = copy.replace("base_emb_dim: 2048", "base_emb_dim: 1024")
    with pytest.raises(
        ConfigError, match="base_emb_dim=1024 .* differs from 4096 in the model's file"
    ):
        resolved(path=file(changed))


def test_printed_configuration_can_be_loaded(file):
    first = resolved(["model_name=gpt-oss-20b", "run_name=x", "remat_policy=minimal"])
    path = file(
        "\n".join(serialize.yaml_line(key, getattr(first, key)) for key in serialize.KEYS_IN_ORDER)
    )
    assert resolved(path=path).model_dump() == first.model_dump()


@pytest.mark.parametrize(
    ("overrides", "truncates", "source"),
    [
        ([], False, "derived (pre-training text)"),
        (["use_truncation=true"], True, "command line"),
        (["use_truncation=false"], False, "command line"),
        (["use_sft=true"], True, "default"),
        (["use_dpo=true", "packing=false"], True, "default"),
        (["use_grpo=true"], True, "default"),
    ],
)
def test_documents_of_pre_training_are_split_unless_the_user_truncates(
    overrides, truncates, source
):
    config = resolved(overrides)
    assert config.use_truncation is truncates
    assert str(config.source("use_truncation")).startswith(source)


@pytest.mark.parametrize(
    ("preset", "all_weights", "adapters"),
    [
        ("sft", 2e-5, 2e-4),  # as TRL's scripts sft.py and distillation.py
        ("distill", 2e-5, 2e-4),
        ("dpo", 1e-6, 5e-6),  # DPOConfig, and dpo.py with LoRA
        ("orpo", 8e-6, 8e-5),
        ("grpo", 1e-6, 1e-5),
    ],
)
def test_adapters_have_a_learning_rate_of_their_own(file, preset, all_weights, adapters):
    data = ["dataset_type=grain", "grain_train_files=rows.jsonl", "grain_file_type=jsonl"]
    if preset == "distill":
        data.append("teacher_overrides.load_parameters_path=teacher")

    def rate(path, *overrides):
        return load(path, [*data, *overrides], environ={}, devices=Devices(1)).learning_rate

    assert rate(preset) == rate(preset, "lora_rank=8", "enable_lora=false") == all_weights
    assert rate(preset, "lora_rank=8") == rate(preset, "lora_restore_path=adapter") == adapters
    assert rate(preset, "lora_rank=8", "learning_rate=0.5") == 0.5
    mine = file(f"base_config: {preset}.yml\nlearning_rate: 0.25\nlora_rank: 8\n")
    assert rate(mine) == 0.25


def test_adapters_of_pre_training_have_the_default_learning_rate():
    config = load(None, ["dataset_type=synthetic", "lora_rank=8"], environ={}, devices=Devices(1))
    assert config.learning_rate == 3e-5


def test_use_truncation_in_a_file_of_the_user_counts_as_set(file):
    assert resolved(path=file("use_truncation: true\n")).use_truncation
    assert resolved(path=file(sources.BASE.read_text())).use_truncation


def test_none_clears_a_key():
    assert resolved(["max_num_checkpoints_to_keep=none"]).max_num_checkpoints_to_keep is None
    assert resolved(["remat_policy=None"]).remat_policy == ""
    assert resolved(["remat_policy=none"]).tensors_on_device is None


def test_text_stays_text_and_numbers_may_be_written_1e5():
    assert resolved(["run_name=123"]).run_name == "123"
    assert resolved(["run_name=a: b"]).run_name == "a: b"
    assert resolved(["normalization_layer_epsilon=1e-5"]).normalization_layer_epsilon == 1e-5


def test_numbers_in_files_may_be_written_1e5(file):
    config = resolved(path=file("normalization_layer_epsilon: 1e-5\nrun_name: 2024\n"))
    assert config.normalization_layer_epsilon == 1e-5
    assert config.run_name == "2024"


def test_axis_rules_replace_rules_of_the_same_name():
    base = resolved()
    config = resolved(["logical_axis_rules=[[mlp, [tensor]], [fresh, [data]], [mlp, []]]"])
    assert [axes for name, axes in config.logical_axis_rules if name == "mlp"] == [["tensor"], []]
    assert config.logical_axis_rules[-1] == ["fresh", ["data"]]
    others = [rule for rule in config.logical_axis_rules if rule[0] not in ("mlp", "fresh")]
    assert others == [rule for rule in base.logical_axis_rules if rule[0] != "mlp"]


def test_all_axis_rules_can_be_replaced():
    overrides = ["logical_axis_rules=[[mlp, tensor]]", "override_logical_axis_rules=true"]
    assert resolved(overrides).logical_axis_rules == [["mlp", ["tensor"]]]
    model = resolved(["model_name=deepseek3-671b-batchsplit"])
    assert ["expert_only", ["expert"]] in model.logical_axis_rules
    assert "vocab" not in [name for name, _ in model.logical_axis_rules]


def test_run_name_and_folder_when_empty():
    assert resolved(environ={"JOBSET_NAME": "job"}).run_name == "job"
    config = resolved(["model_name=qwen3-4b"])
    assert config.run_name.startswith("qwen3-4b-20")
    assert config.checkpoint_dir == f"./maxtext_output/{config.run_name}/checkpoints"
    assert resolved(["model_name=qwen3-4b"]).tokenizer_path == "Qwen/Qwen3-4B"
    assert resolved(["model_name=qwen3-4b", "tokenizer_path=/here"]).tokenizer_path == "/here"


def test_python_keywords_equal_overrides(monkeypatch):
    monkeypatch.delenv("JOBSET_NAME", raising=False)
    from_python = maxtext.config(
        model_name="mistral-7b", run_name="x", per_device_batch_size=2, num_slices=-1
    )
    from_overrides = load(None, ["model_name=mistral-7b", "run_name=x", "per_device_batch_size=2"])
    assert from_python.model_dump() == from_overrides.model_dump()
    assert str(from_python.source("run_name")) == "python"


def test_config_is_frozen_and_refuses_unknown_keys():
    config = resolved()
    with pytest.raises(Exception, match="frozen"):
        config.steps = 3
    with pytest.raises(ConfigError, match="unknown key 'stepz'.*did you mean steps"):
        maxtext.config(stepz=1)


def test_presets_are_found_by_name():
    assert resolved(["run_name=x"], "base").model_dump() == resolved(["run_name=x"]).model_dump()


def test_mappings_of_keys_merge_over_layers(file):
    path = file("teacher_overrides: {model_name: llama2-7b, dtype: float32}\n")
    overrides = ["teacher_overrides.dtype=bfloat16", "teacher_overrides.scan_layers=false"]
    assert resolved(overrides, path).teacher_overrides == {
        "model_name": "llama2-7b",
        "dtype": "bfloat16",
        "scan_layers": False,
    }
    with pytest.raises(ConfigError, match="teacher_overrides.dtype is set twice"):
        resolved(["teacher_overrides.dtype=bfloat16", "teacher_overrides.dtype=float32"])


def test_student_overrides_replace_common_keys_which_the_teacher_keeps(file):
    path = file(
        "model_name: llama2-7b\ndtype: float32\n"
        "student_overrides: {model_name: qwen3-0.6b, dtype: bfloat16}\n"
        "teacher_overrides: {load_parameters_path: there}\n"
    )
    config = resolved(path=path)
    assert (config.model_name, config.emb_dim, config.dtype.value) == (
        "qwen3-0.6b",
        1024,
        "bfloat16",
    )
    assert str(config.source("dtype")) == "student_overrides"
    assert config.teacher_overrides == {
        "load_parameters_path": "there",
        "model_name": "llama2-7b",
        "dtype": "float32",
    }
    assert peek_setting("model_name", path, {}, {}) == "qwen3-0.6b"
