"""`maxtext train`, `sft`, `dpo`, `orpo`, `distill`, `reward` and `grpo`: training from a
configuration; and `maxtext distill-logits`.
"""

import logging
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from maxtext.cli import positionals
from maxtext.cli.arguments import Arguments
from maxtext.common import log, processes, signals
from maxtext.common.errors import ConfigError, UserError, as_config_error
from maxtext.common.files import local_path
from maxtext.common.hub import find_folder
from maxtext.common.supervise import die_with_launcher
from maxtext.configs import ledger, sources
from maxtext.configs.load import base_values, peek_setting
from maxtext.configs.startup import configure_process, process_settings
from maxtext.configs.types import MaxTextConfig

if TYPE_CHECKING:
    from maxtext.checkpoint.open import Checkpoint

SAMPLE_TOKENS = 300


def run(arguments: Arguments) -> int:
    method, args = arguments.command, arguments.all_args
    if method == "distill-logits":
        return write_teacher_logits(arguments)
    if method == "train":
        return train_run(*positionals.split(args), command=["train", *args])
    return run_method(method, args)


def run_method(method: str, args: list[str]) -> int:
    """`maxtext METHOD`, such as `sft` or `grpo`: `maxtext train` with a preset."""
    teachers = [positionals.TEACHER_KEY] if method == "distill" else []
    path, overrides = positionals.split(args, models=[positionals.MODEL_KEY, *teachers])
    if path in sources.presets() and positionals.is_model_folder(local_path(path)):
        raise ConfigError(
            f"{path} is a preset and a model in this folder: write ./{path} for the model, or "
            f"{path}.yml for the preset"
        )
    for name in overrides:
        if name.startswith("model_name=") and name not in args:
            raise ConfigError(
                f"{name.partition('=')[2]} is the name of sizes without weights: name a folder "
                f"with weights, or org/name of the Hugging Face Hub; {name} starts from random "
                "weights"
            )
    if path is None:
        path = str(sources.HERE / f"{method}.yml")
    else:
        overrides = [*overrides, *sources.METHOD_KEYS[method]]
    layer = sources.from_overrides(overrides)
    if method == "distill":
        check_has_teacher(path, layer)
    check_has_model(method, path, layer)
    return train_run(path, overrides, command=[method, *args])


def train_run(path: str | None, overrides: list[str], command: Sequence[str]) -> int:
    """Train with a configuration file and key=value overrides; returns the exit code. `command`:
    the arguments after `maxtext`, for messages."""
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
    from maxtext.trainers import banner
    from maxtext.trainers.hooks import FreezeObjects
    from maxtext.trainers.train import train

    has_prompt = config.prompt != base_values().prompt
    if has_prompt:
        banner.check(config)
    result = train(config, checkpoint, hooks=[FreezeObjects()])
    if has_prompt and result.summary["steps"] == config.steps:
        text = banner.complete(result.context, result.state, SAMPLE_TOKENS)
        if world.index == 0:
            print(f"\nwhat the model writes after {config.prompt!r}:\n")
            print(text)
    if world.index == 0 and (shown := next_command(config, result.signal, command)):
        print(f"next: {shown}")
    return 0 if result.signal is None else signals.exit_code(result.signal)


def next_command(config: MaxTextConfig, signal: int | None, command: Sequence[str]) -> str:
    """The next command after a run: `command` again if a signal ended it, else one that uses its
    weights: it generates text, or trains with a reward model. Empty if the run left none."""
    from maxtext.configs.derive import run_folder
    from maxtext.tokenizers import chat_template, load_tokenizer
    from maxtext.trainers.checkpointing.export import (
        ADAPTER_FOLDER,
        REWARD_FOLDER,
        STUDENT_FOLDER,
    )
    from maxtext.trainers.trainable import has_adapters

    folder = run_folder(config)
    has_checkpoint = config.enable_checkpointing and config.save_checkpoint_on_completion
    if signal is not None:
        name = [] if config.has_lasting_name else [f"run_name={config.run_name}"]
        return shlex.join(["maxtext", *command, *name]) if has_checkpoint else ""
    if config.num_labels:  # a reward model, which generates nothing
        reward_model = os.path.join(folder, REWARD_FOLDER)
        policy = config.load_parameters_path
        if not policy or has_adapters(config) or not os.path.isdir(reward_model):
            return ""
        args = [policy, "problems.jsonl", f"reward_model_path={reward_model}"]
        return shlex.join(["maxtext", "grpo", *args])
    model, adapter = folder if has_checkpoint else "", []
    if has_adapters(config):
        model = config.load_parameters_path
        adapter = ["--adapter", os.path.join(folder, ADAPTER_FOLDER)]
    elif config.learn_to_init_mode:
        model = os.path.join(folder, STUDENT_FOLDER)
    if not model or config.dataset_type.value == "synthetic":
        return ""
    try:
        has_template = chat_template(config, load_tokenizer(config)) is not None
    except UserError:  # the tokenizer has gone
        return ""
    # The folder of a run has no tokenizer.
    tokenizer = [] if adapter else [f"tokenizer_path={config.tokenizer_path or 'byte'}"]
    if not has_template:
        args = [f"load_parameters_path={model}", *adapter, *tokenizer, f"prompt={config.prompt}"]
        return shlex.join(["maxtext", "decode", *args])
    templates = [
        f"{key}={value}"
        for key in ("chat_template_path", "chat_template")
        if (value := getattr(config, key)) and config.source(key).is_user
    ]
    return shlex.join(["maxtext", "chat", model, *adapter, *tokenizer, *templates])


def check_has_teacher(path: str | None, overrides: sources.Layer) -> None:
    """Raise ConfigError if no key names a teacher."""
    keys = ("teacher_overrides", "offline_data_dir")
    if not any(peek_setting(key, path, overrides, os.environ) for key in keys):
        raise ConfigError(
            "there is no teacher to learn from: set teacher_overrides.load_parameters_path=DIR, or "
            "offline_data_dir=DIR to the logits of one"
        )


def check_has_model(method: str, path: str, overrides: sources.Layer) -> None:
    """Raise ConfigError if no key names the model to fine-tune, or describes one to initialize."""
    keys = ("load_parameters_path", "load_full_state_path", "model_name", "base_emb_dim")
    if not any(peek_setting(key, path, overrides, os.environ) for key in keys):
        raise ConfigError(
            f"which model? maxtext {method} MODEL DATA [key=value ...], where MODEL is a Hugging "
            "Face folder, org/name of its Hub, a converted checkpoint or a run's folder "
            "(load_parameters_path=DIR)"
        )


def check_has_data(config: MaxTextConfig) -> None:
    """Raise ConfigError if no key names a source of data."""
    if config.offline_data_dir:
        return
    is_unset = config.source("dataset_type").kind == "file" and not config.hf_path
    if config.dataset_type.value == "hf" and is_unset and not config.hf_train_files:
        if config.grain_train_files or config.grain_train_mixture_config_path:
            raise ConfigError("grain_train_files is read with dataset_type=grain: set it")
        raise ConfigError(
            "there is no data to train on: name files of it after the model, such as MODEL "
            "data.jsonl (grain_train_files), or a dataset of the Hugging Face Hub (hf_path)"
        )
    if all(
        config.source(key).kind == "default"
        for key in ("dataset_type", "dataset_name", "dataset_path")
    ):
        raise ConfigError(
            "there is no data to train on: try `maxtext train quickstart`, or "
            "dataset_type=synthetic for random tokens; for your own text, name its files or "
            "folders: maxtext train DATA (grain_train_files)"
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


def write_teacher_logits(arguments: Arguments) -> int:
    """`maxtext distill-logits`: the largest logits of a teacher, for offline_data_dir."""
    from maxtext.models.configuration import load

    args = arguments.all_args
    if not args or "=" in args[0]:
        raise ConfigError(f"name a folder for the logits: {arguments.usage}")
    folder = local_path(args[0])
    path, overrides = positionals.split(args[1:])
    path = path or str(sources.HERE / "distill.yml")
    layer = sources.from_overrides(overrides)
    checkpoint = open_model_checkpoint(path, layer)
    config = load(path, layer, model=checkpoint.model_layer if checkpoint else None)
    ledger.refuse_unsupported_model(config, base_values())
    check_has_data(config)
    configure_process(config)
    from maxtext.trainers.methods.distillation.write_logits import write_logits

    num_parts, num_rows = write_logits(config, folder, arguments["--top-k"], checkpoint)
    wrote = f"wrote {num_rows} rows in {num_parts} parts to"
    print(f"{wrote if num_parts else 'nothing was missing in'} {folder}")
    print(f"train on it with\noffline_data_dir={folder}")
    return 0
