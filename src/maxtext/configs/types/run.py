"""Identity of a run, ahead-of-time compilation, and development switches."""

import os
from typing import Literal

from pydantic import field_validator

from maxtext.configs.types.group import Group


class RunInfo(Group):
    """What this run is called, which model it uses, where output goes."""

    base_config: None | str = None
    run_name: str = ""
    model_name: Literal[
        "default",
        "llama2-7b",
        "llama2-13b",
        "llama2-70b",
        "llama3-8b",
        "llama3.1-8b-Instruct",
        "llama3-70b",
        "llama3.1-70b-Instruct",
        "llama3.1-8b",
        "llama3.1-70b",
        "llama3.1-405b",
        "llama3.3-70b",
        "mistral-7b",
        "mixtral-8x7b",
        "mixtral-8x22b",
        "deepseek2-16b",
        "deepseek2-236b",
        "deepseek3-671b",
        "deepseek3-671b-2dfsdp",
        "deepseek3-671b-batchsplit",
        "deepseek3-test",
        "deepseek3-tiny",
        "deepseek3.2-671b",
        "deepseek-custom",
        "kimi-k2-1t",
        "gemma-7b",
        "gemma-2b",
        "gemma2-2b",
        "gemma2-9b",
        "gemma2-27b",
        "gemma3-4b",
        "gemma3-12b",
        "gemma3-27b",
        "gemma4-26b",
        "gemma4-31b",
        "qwen2.5-1.5b",
        "qwen2.5-7b",
        "qwen2.5-14b",
        "qwen3-0.6b",
        "qwen3-1.7b",
        "qwen3-1.7b-base",
        "qwen3-4b",
        "qwen3-4b-base",
        "qwen3-4b-thinking-2507",
        "qwen3-8b",
        "qwen3-8b-base",
        "qwen3-14b",
        "qwen3-14b-base",
        "qwen3-32b",
        "qwen3-235b-a22b",
        "qwen3-30b-a3b",
        "qwen3-30b-a3b-base",
        "qwen3-480b-a35b",
        "qwen3-next-80b-a3b",
        "qwen3-omni-30b-a3b",
        "qwen3-custom-30b-a3b",
        "qwen3.5-397b-a17b",
        "gpt3-175b",
        "gpt3-22b",
        "gpt3-6b",
        "gpt3-52k",
        "gpt-oss-20b",
        "gpt-oss-120b",
        "llama4-17b-16e",
        "llama4-17b-128e",
        "olmo3-7b",
        "olmo3-7b-pt",
        "olmo3-32b",
        "llama3-405b",
        "qwen3.5-35b-a3b",
        "phi-3-mini",
        "phi-3-medium",
        "phi-4",
        "phi-4-mini",
        "olmo2-1b",
        "olmo2-7b",
        "olmo2-13b",
        "olmo2-32b",
        "command-r-35b",
        "command-r7b",
    ] = "default"
    override_model_config: bool = False
    override_logical_axis_rules: bool = False
    log_config: bool = True
    debug_sharding: bool = False
    base_output_directory: str = ""
    sharding_strategy: None | Literal["experimental"] = None


class AOT(Group):
    """Compiling the train step ahead of time for chosen hardware."""

    compiled_trainstep_file: str = ""
    compile_topology: str = ""
    compile_topology_num_slices: int = -1


class MemoryCheck(Group):
    """What happens if a training run seems too large for its devices."""

    check_memory: bool = True


class DevelopmentAndDebugging(Group):
    """JAX start-up, compilation cache and extra run-time checks."""

    constant_bound_config: list = []
    jax_cache_dir: str | None = "~/jax_cache"
    jax_distributed_initialization_timeout: int = 300
    jax_debug_log_modules: str = ""
    skip_jax_distributed_system: bool = False
    enable_single_controller: bool = False
    subslice_shape: str = ""
    max_checkify: bool = False

    @field_validator("jax_cache_dir")
    @classmethod
    def expand_home(cls, path: str | None) -> str | None:
        return os.path.expanduser(path) if path else path


class Debug(Group):
    """Switches for verbose output of single subsystems."""

    rl: bool = False
