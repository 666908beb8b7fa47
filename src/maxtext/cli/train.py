"""`maxtext train`: pre-training from a configuration."""

import logging
import os
from types import SimpleNamespace

from maxtext.cli import arguments
from maxtext.common import log, processes, signals
from maxtext.common.errors import ConfigError
from maxtext.common.supervise import die_with_launcher
from maxtext.configs import fields, ledger, sources
from maxtext.configs.load import base_values, peek_setting
from maxtext.configs.types import MaxTextConfig
from maxtext.models.configuration import load

SAMPLE_TOKENS = 300


def run(args: list[str]) -> int:
    path, overrides = arguments.split(args)
    die_with_launcher(os.environ)
    # The configuration counts the devices of all processes, so they join first.
    world = processes.start(start_settings(path, sources.from_overrides(overrides)))
    config = load(path, overrides, model=checkpoint_model(path, sources.from_overrides(overrides)))
    ledger.refuse_unsupported_model(config, base_values())
    refuse_no_data(config)
    if config.elastic_enabled and processes.FULL_PROCESSES not in os.environ:
        raise ConfigError(
            "elastic_enabled=true would do nothing: it needs `maxtext launch --local N -- train ...`"
        )
    log.configure(world.index, world.count, logging.INFO if world.index == 0 else logging.WARNING)
    set_up_jax(config)
    processes.preallocate_gpu_memory()
    from maxtext.trainers import sample
    from maxtext.trainers.pretrain import train

    continues = config.prompt != base_values().prompt
    if continues:
        sample.check(config)
    result = train(config)
    if continues and result.summary["steps"] == config.steps:
        text = sample.complete(result.context, result.state.weights, SAMPLE_TOKENS)
        if world.index == 0:
            print(f"\nwhat the model writes after {config.prompt!r}:\n")
            print(text)
    return 0 if result.signal is None else signals.exit_code(result.signal)


def refuse_no_data(config: MaxTextConfig) -> None:
    """Raise ConfigError if no key names a source of data, before the model is set up."""
    if all(
        config.source(key).kind == "default"
        for key in ("dataset_type", "dataset_name", "dataset_path")
    ):
        raise ConfigError(
            "there is no data to train on: try `maxtext train quickstart`, or dataset_type=synthetic for random "
            "tokens; for your own text, dataset_type=grain grain_file_type=text grain_train_files=FILES"
        )


def start_settings(path: str | None, overrides: sources.Layer) -> SimpleNamespace:
    """The keys of process start-up. One with a value that does not fit has its default: `load` then
    refuses it.
    """
    found = {}
    for key in (
        "hardware",
        "jax_distributed_initialization_timeout",
        "skip_jax_distributed_system",
    ):
        value = fields.normalise(key, peek_setting(key, path, overrides, os.environ))
        found[key] = (
            value if value is not None and fields.fits(key, value) else getattr(base_values(), key)
        )
    return SimpleNamespace(**found)


def checkpoint_model(path: str | None, overrides: sources.Layer) -> sources.Layer | None:
    """What the checkpoint that a run starts from says of its model; nothing where model_name says
    it.
    """
    folder = peek_setting("load_parameters_path", path, overrides, os.environ)
    if not folder or peek_setting("model_name", path, overrides, os.environ) not in (
        None,
        "default",
    ):
        return None
    from maxtext.checkpoint.open import open_checkpoint

    return open_checkpoint(folder).settings


def set_up_jax(config) -> None:
    """The compiler's part that splits programs, and the persistent cache, with which a second start
    skips compiling.
    """
    import jax

    jax.config.update("jax_use_shardy_partitioner", config.shardy)
    if config.shard_mode.value == "explicit":
        jax.config.update(
            "jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type
        )
    if config.jax_cache_dir:
        jax.config.update("jax_compilation_cache_dir", config.jax_cache_dir)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
