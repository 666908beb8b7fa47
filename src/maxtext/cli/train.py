"""`maxtext train`, `sft`, `dpo`, `orpo`, `distill` and `grpo`: training from a configuration."""

import logging
import os
from typing import TYPE_CHECKING

from maxtext.cli import arguments
from maxtext.common import log, processes, signals
from maxtext.common.errors import ConfigError, as_config_error
from maxtext.common.hub import find_folder
from maxtext.common.supervise import die_with_launcher
from maxtext.configs import sources
from maxtext.configs.load import base_values, peek_setting
from maxtext.configs.startup import process_settings
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.checkpoint.open import Checkpoint

SAMPLE_TOKENS = 300


# The keys that choose the method of a command, if a FILE replaces its preset.
METHOD_KEYS = {
    "sft": ["use_sft=true"],
    "dpo": ["use_dpo=true"],
    "orpo": ["use_dpo=true", "dpo_loss_type=orpo"],
    "distill": [],
    "grpo": ["use_grpo=true"],
}


def run_method(method: str, args: list[str]) -> int:
    """`maxtext sft`, `dpo`, `orpo`, `distill` and `grpo`: `maxtext train` with a preset."""
    path, overrides = arguments.split(args)
    if method == "distill":
        check_has_teacher(path, sources.from_overrides(overrides))
    preset = str(sources.HERE / f"{method}.yml")
    return run([preset, *overrides] if path is None else [*args, *METHOD_KEYS[method]])


def run(args: list[str]) -> int:
    path, overrides = arguments.split(args)
    die_with_launcher(os.environ)
    # The configuration counts the devices of all processes, so they join first.
    layer = sources.from_overrides(overrides)
    world = processes.start(process_settings(path, layer))
    checkpoint = open_model_checkpoint(path, layer)
    from maxtext.trainers.configuration import load_run

    config = load_run(path, layer, checkpoint)
    check_has_data(config)
    if config.elastic_enabled and processes.FULL_PROCESSES not in os.environ:
        raise ConfigError(
            "elastic_enabled=true would do nothing: it needs "
            "`maxtext launch --local N -- train ...`"
        )
    log.configure(world.index, world.count, logging.INFO if world.index == 0 else logging.WARNING)
    processes.preallocate_gpu_memory()
    from maxtext.trainers import sample
    from maxtext.trainers.hooks import FreezeObjects
    from maxtext.trainers.train import train

    has_prompt = config.prompt != base_values().prompt
    if has_prompt:
        sample.check(config)
    result = train(config, checkpoint, hooks=[FreezeObjects()])
    if has_prompt and result.summary["steps"] == config.steps:
        text = sample.complete(result.context, result.state, SAMPLE_TOKENS)
        if world.index == 0:
            print(f"\nwhat the model writes after {config.prompt!r}:\n")
            print(text)
    return 0 if result.signal is None else signals.exit_code(result.signal)


def check_has_teacher(path: str | None, overrides: sources.Layer) -> None:
    """Raise ConfigError if no key names a teacher."""
    keys = ("teacher_overrides", "offline_data_dir")
    if not any(peek_setting(key, path, overrides, os.environ) for key in keys):
        raise ConfigError(
            "there is no teacher to learn from: set teacher_overrides.load_parameters_path=DIR, or "
            "offline_data_dir=DIR to the logits of one"
        )


def check_has_data(config: MaxTextConfig) -> None:
    """Raise ConfigError if no key names a source of data."""
    if not config.offline_data_dir and all(
        config.source(key).kind == "default"
        for key in ("dataset_type", "dataset_name", "dataset_path")
    ):
        raise ConfigError(
            "there is no data to train on: try `maxtext train quickstart`, or "
            "dataset_type=synthetic for random tokens; for your own text, dataset_type=grain "
            "grain_file_type=text grain_train_files=FILES"
        )


def open_model_checkpoint(path: str | None, overrides: sources.Layer) -> "Checkpoint | None":
    """The checkpoint at load_parameters_path, whose settings define the model of the run; None if
    there is none, or if model_name defines the model."""
    folder = peek_setting("load_parameters_path", path, overrides, os.environ)
    model_name = peek_setting("model_name", path, overrides, os.environ)
    if not folder or model_name not in (None, "default"):
        return None
    from maxtext.checkpoint.open import open_checkpoint

    with as_config_error():
        token = peek_setting("hf_access_token", path, overrides, os.environ)
        return open_checkpoint(find_folder(folder, token))
