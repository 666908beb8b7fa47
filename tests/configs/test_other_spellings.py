"""MaxText's post-training files and command lines, as they are written there."""

import importlib
import runpy
import sys
from pathlib import Path

import pytest

import maxtext
from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.configs.sources import HERE, find_file, flatten, from_overrides, from_python
from maxtext.models.configuration import load

SFT = """
base_config: "../base.yml"
use_sft: True
use_tunix_gradient_accumulation: True
sft_train_on_completion_only: True
dataset_type: hf
hf_path: 'some/chats'
train_data_columns: ['messages']
"""
LORA_OFF = "enable_lora: False\nlora_rank: 0\nlora_alpha: 0.0\nlora_weight_qtype: null\n"
LORA_OFF += 'lora_tile_size: null\nhf_lora_adapter_path: ""\n'
LORA = "lora:\n  enable_lora: True\n  lora_rank: 16\n  lora_alpha: 32.0\n  lora_tile_size: null\n"
DPO = """
base_config: "base.yml"
use_dpo: true
packing: false
dataset_type: hf
hf_path: 'some/pairs'
dpo:
  algo: "orpo"
  orpo_lambda: 0.2
  max_prompt_length: 256
"""

# Keys of reinforcement learning, with the values that MaxText's file has
RL = """
base_config: "base.yml"
trainer_devices_fraction: 0.5
sampler_devices_fraction: 0.5
chips_per_vm: 4
rollout_data_parallelism: -1
rollout_tensor_parallelism: -1
rollout_expert_parallelism: 1
rollout_subslice_shape: ""
rollout_enable_single_controller: False
rl:
  num_generations: 2
  num_iterations: 1
  grpo_beta: 0.08
  grpo_epsilon: 0.2
  loss_algo: 'grpo'
use_pathways: True
debug:
  rl: True
enable_tunix_perf_metrics: False
batch_size: 4
micro_batch_size: 2
num_test_batches: 5
eval_interval: 10
eval_sampling_strategy: "greedy"
generation_configs:
  greedy: {eval_temperature: 0.01, eval_top_k: 1, eval_top_p: 1.0}
max_prefill_predict_length: 256
max_target_length: 1024
kv_cache_buffer: 256
hbm_utilization_vllm: 0.72
swap_space_vllm_gb: 2
decode_sampling_temperature: 0.9
decode_sampling_top_k: 50
decode_sampling_nucleus_p: 1.0
enable_dp_attention: False
max_num_batched_tokens: null
max_num_seqs: null
async_scheduling: True
stop_strings: null
skip_jax_distributed_system: True
dataset_name: 'gsm8k'
train_split: 'train'
eval_split: 'test'
tokenizer_type: 'huggingface'
"""


@pytest.fixture
def load_text(tmp_path):
    def load_file(text, *overrides):
        (tmp_path / "run.yml").write_text(text)
        return load(tmp_path / "run.yml", list(overrides), environ={}, devices=Devices(1))

    return load_file


def test_files_load_as_they_are(load_text):
    assert load_text(SFT + LORA_OFF).lora_rank == 0
    nested = load_text(SFT + LORA)
    assert (nested.lora_rank, nested.lora_alpha, nested.lora_tile_size) == (16, 32.0, 64)
    orpo = load_text(DPO)
    assert (orpo.dpo_loss_type, orpo.orpo_lambda, orpo.max_prompt_length) == ("orpo", 0.2, 256)
    sigmoid = load_text(DPO.replace("orpo_lambda", "dpo_beta").replace('"orpo"', '"dpo"'))
    assert (sigmoid.dpo_loss_type, sigmoid.dpo_beta) == ("sigmoid", 0.2)


def test_files_of_reinforcement_learning_load_as_they_are(load_text):
    config = load_text(RL, "use_grpo=true")  # as `maxtext grpo FILE` sets it
    assert config.decode_sampling_strategy.value == "topk"
    assert (config.packing, config.rl, config.num_generations) == (False, True, 2)
    assert config.gradient_accumulation_steps == config.rollout_micro_batch_size == 2
    nucleus = load_text(RL.replace("nucleus_p: 1.0", "nucleus_p: 0.9"), "use_grpo=true")
    assert nucleus.decode_sampling_strategy.value == "composite"
    plain = load_text(RL.replace("top_k: 50", "top_k: 0"), "use_grpo=true")
    assert plain.decode_sampling_strategy.value == "weighted"


def test_sections_on_the_command_line(load_text):
    words = ("lora.enable_lora=True", "lora.lora_rank=4", "lora.lora_alpha=8")
    config = load_text(SFT + LORA_OFF, *words)
    assert (config.lora_rank, config.lora_alpha) == (4, 8.0)
    off = load_text(SFT + LORA, "lora.enable_lora=False")
    assert (off.lora_rank, off.lora_alpha) == (0, 0.0)
    with pytest.raises(ConfigError, match="enable_lora=True .* needs lora_rank"):
        load_text(SFT, "lora.enable_lora=True")


def test_keys_of_reinforcement_learning_are_flat():
    layer = flatten(
        from_python(
            {
                "rl": {"num_generations": 4, "loss_algo": "gspo-token"},
                "debug": {"rl": True},
                "micro_batch_size": 2,
                "rollout_subslice_shape": "",
            }
        )
    )
    assert {key: setting.value for key, setting in layer.items()} == {
        "num_generations": 4,
        "loss_algo": "gspo-token",
        "rl": True,
        "train_micro_batch_size": 2,
        "rollout_micro_batch_size": 2,
    }
    assert flatten(from_overrides(["rl=true"]))["rl"].value is True


def test_two_spellings_must_agree():
    with pytest.raises(ConfigError, match="lora_rank is set twice .* 4 and 8"):
        from_python({"lora_rank": 4, "lora": {"lora_rank": 8}})


@pytest.mark.parametrize(
    ("path", "preset"),
    [
        ("src/maxtext/configs/post_train/sft.yml", "post_train/sft.yml"),
        ("src/MaxText/configs/sft.yml", "sft.yml"),
        ("MaxText/configs/base.yml", "base.yml"),
        ("src/maxtext/configs/post_train/rl.yml", "post_train/rl.yml"),
        ("src/MaxText/configs/rl.yml", "rl.yml"),
        ("../base.yml", "base.yml"),
        ("post_train/distillation.yml", "post_train/distillation.yml"),
    ],
)
def test_presets_have_the_paths_of_a_checkout(path, preset, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_file(path) == HERE / preset
    with pytest.raises(ConfigError, match="no configuration file"):
        find_file(path.replace(".yml", "_.yml"))


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("maxtext.trainers.post_train.sft.train_sft", "sft"),
        ("maxtext.trainers.post_train.sft.train_sft_native", "sft"),
        ("maxtext.trainers.post_train.dpo.train_dpo", "dpo"),
        ("maxtext.trainers.post_train.distillation.train_distill", "distill"),
        ("maxtext.trainers.post_train.rl.train_rl", "grpo"),
        ("MaxText.rl.train_rl", "grpo"),
        ("maxtext.trainers.pre_train.train", "train"),
        ("maxtext.trainers.pre_train.train_compile", "compile"),
        ("MaxText.train", "train"),
        ("MaxText.decode", "decode"),
        ("MaxText.sft_trainer", "sft"),
        ("MaxText.sft.sft_trainer", "sft"),
    ],
)
def test_modules_are_doors_to_commands(module, command, monkeypatch):
    commands = []
    monkeypatch.syspath_prepend(Path(maxtext.__file__).parents[1])
    monkeypatch.setattr(sys, "argv", [module])
    monkeypatch.setattr("maxtext.cli.main.main", lambda args: commands.append(args) or 0)
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert commands == [[command]]


def test_importing_an_alias_runs_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "maxtext.cli.entry", None)
    module = importlib.import_module("maxtext.trainers.post_train.sft.train_sft")
    assert module.__name__ == "maxtext.trainers.post_train.sft.train_sft"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("maxtext.trainers.post_train.sft.train")
