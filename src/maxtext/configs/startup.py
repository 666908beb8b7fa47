"""Configures JAX for the whole process by the keys for it, and its persistent compilation cache.

Every entry that compiles programs calls `configure_process`: commands, `LLM.load` and `tune.*`. It
calls `use_compilation_cache`, which sets the folder of compiled programs.
"""

import os
from types import SimpleNamespace

from maxtext.common import processes
from maxtext.configs import fields
from maxtext.configs.load import base_values, peek_setting
from maxtext.configs.provenance import Layer
from maxtext.configs.types import MaxTextConfig
from maxtext.configs.types.enums import ShardMode

MIN_COMPILE_SECONDS = 0.1  # of a program that is worth a file
FOLDER, ENABLED = "jax_compilation_cache_dir", "jax_enable_compilation_cache"


def use_compilation_cache(folder: str | None, is_chosen: bool) -> None:
    """Read and write compiled programs in `folder`, so that a second start skips compiling. None or
    "" disables the cache.

    `is_chosen`: the user named the folder. A default folder does not replace a cache that JAX
    already has, and does not enable one that the user has disabled.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    # Type checkers do not know the flags as attributes.
    current, is_enabled = (getattr(jax.config, flag) for flag in (FOLDER, ENABLED))
    if not is_chosen and (current or not folder or not is_enabled):
        return
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)
    if folder:
        jax.config.update(ENABLED, True)
    if (folder or None) != current:
        jax.config.update(FOLDER, folder or None)
        compilation_cache.reset_cache()  # JAX would keep the folder of its first program


def process_settings(path: str | os.PathLike | None, overrides: Layer) -> SimpleNamespace:
    """The keys that `processes.start` reads. An invalid value is replaced by the default here:
    `load` reports it later."""
    settings = {}
    for key in (
        "hardware",
        "gpu_memory_utilization",
        "jax_distributed_initialization_timeout",
        "skip_jax_distributed_system",
    ):
        value = fields.normalise(key, peek_setting(key, path, overrides, os.environ))
        is_valid = value is not None and fields.fits(key, value)
        settings[key] = value if is_valid else getattr(base_values(), key)
    return SimpleNamespace(**settings)


def configure_process(config: MaxTextConfig) -> None:
    """Apply shardy, remove_size_one_mesh_axis_from_type and jax_cache_dir. Raises ConfigError if
    JAX runs on other devices than `hardware` names.

    `derive.visible_devices` selected the platform of `hardware` when the configuration was loaded,
    unless JAX had started before.
    """
    processes.check_platform(config.hardware)
    configure_compiler(config)


def configure_compiler(config: MaxTextConfig) -> None:
    """As `configure_process`, for programs of any machine."""
    import jax

    jax.config.update("jax_use_shardy_partitioner", config.shardy)
    if config.shard_mode is ShardMode.EXPLICIT:
        jax.config.update(
            "jax_remove_size_one_mesh_axis_from_type", config.remove_size_one_mesh_axis_from_type
        )
    use_compilation_cache(config.jax_cache_dir, config.source("jax_cache_dir").is_user)
