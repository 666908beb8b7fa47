"""Identity of a run, ahead-of-time compilation, and development switches."""

import os
from typing import Literal

from pydantic import field_validator

from maxtext.configs.types import inert
from maxtext.configs.types.key import Group, key


class RunInfo(Group):
    """The name of the run, its model, and its output folder."""

    base_config: None | str = key(
        None,
        "YAML file that this one inherits from, relative to this file or to the package; "
        "none: base.yml",
        is_path=True,
    )
    run_name: str = key(
        "",
        "Name of the run and its output folder; reuse it to resume; empty: $JOBSET_NAME, else the "
        "name of the model or of the folder in load_parameters_path, and the time",
        is_path=True,
    )
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
        "glm4.5-355b-a32b",
        "glm4.5-106b-a12b",
        "glm4.6-355b-a32b",
        "minimax-m2-230b-a10b",
        "smollm3-3b",
        "seed-oss-36b",
        "exaone4-32b",
        "exaone4-1.2b",
        "ernie4.5-0.3b",
    ] = key(
        "default",
        "Which configs/models/<name>.yml to apply, e.g. llama3.1-8b or qwen3-4b; default: "
        "sizes come from this file",
    )
    override_model_config: bool = key(
        False, "Let your values override the model's file; false: a differing value is an error"
    )
    override_logical_axis_rules: bool = key(
        False,
        "Replace the whole logical_axis_rules list; false: only rules of the same name are "
        "replaced",
    )
    log_config: bool = key(
        True, "Write the resolved configuration to config.yml in the folder of the run"
    )
    debug_sharding: bool = key(
        False, "Print the logical and physical partition spec of each tensor at start-up"
    )
    base_output_directory: str = key(
        "", "Parent folder of all runs, a local path; empty: ./maxtext_output", is_path=True
    )
    sharding_strategy: None | Literal["experimental"] = key(
        None,
        "Alternative activation sharding for inference meshes: experimental, or null for the "
        "normal rules",
        status=inert.EXPERIMENTS,
    )


class AOT(Group):
    """Compiling the train step ahead of time for chosen hardware."""

    compiled_trainstep_file: str = key(
        "",
        "File with the compiled train step: train_compile writes it, train loads it. Empty = "
        "compile at start",
        is_path=True,
    )
    compile_topology: str = key(
        "",
        "Hardware to compile for without owning it, such as v5p-128 or v5e-256; empty = the "
        "devices present",
    )
    compile_topology_num_slices: int = key(
        -1,
        "How many slices of compile_topology to compile for; required with it. -1 = not set",
        low=1,
        special=(-1,),
        needs="compile_topology",
    )


class MemoryCheck(Group):
    """The check whether a training run fits into the memory of its devices."""

    check_memory: bool = key(
        True,
        "Refuse a run whose state or compiled step needs more memory than is free, before its"
        " first step; false: warn and try",
    )


class DevelopmentAndDebugging(Group):
    """JAX start-up, compilation cache and extra run-time checks."""

    constant_bound_config: list = key(
        [],
        "Six fixed scale bounds for static fp8 quantization, forward and both gradients; "
        "empty = dynamic scales",
        status=inert.QUANTIZATION_METHODS,
    )
    jax_cache_dir: str | None = key(
        "~/jax_cache",
        "Folder of the persistent compilation cache, so a second start skips compiling; none:"
        " no cache",
        is_path=True,
    )
    jax_distributed_initialization_timeout: int = key(
        300, "Seconds each process waits for all the others when jax.distributed starts", low=1
    )
    jax_debug_log_modules: str = key(
        "",
        "Module whose debug logs JAX prints, for example 'jax'; empty = none",
        status=inert.DIAGNOSTICS,
    )
    skip_jax_distributed_system: bool = key(
        False,
        "Do not start jax.distributed: for a single process, or when the caller already did it",
    )
    enable_single_controller: bool = key(
        False,
        "One Python process drives all devices through Google Pathways, instead of one "
        "process per host",
        status=inert.PATHWAYS,
    )
    subslice_shape: str = key(
        "",
        "Use only this part of a TPU slice, as 'x,y,z' chips; needs enable_single_controller."
        " Empty = all of it",
        status=inert.PATHWAYS,
    )
    max_checkify: bool = key(
        False,
        "Add run-time checks for NaN, bad indices and division by zero to the step; slow, for"
        " debugging",
        status=inert.DIAGNOSTICS,
    )

    @field_validator("jax_cache_dir")
    @classmethod
    def expand_home(cls, path: str | None) -> str | None:
        return os.path.expanduser(path) if path else path


class Debug(Group):
    """Switches for verbose output of single subsystems."""

    rl: bool = key(
        False,
        "Log one completion of each step of reinforcement learning in full, with its rewards",
        needs="use_grpo",
    )
