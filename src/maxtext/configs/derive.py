"""Derived values: each key of the DerivedValues group is computed by the function of its name.

A function reads the settings and the values that come before its own in the group. It knows nothing
else but the devices.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from maxtext.common.errors import ConfigError
from maxtext.common.processes import FULL_PROCESSES, STARTED, choose_platform, now
from maxtext.common.types import Json
from maxtext.configs.mesh_sizes import axis_sizes, infer_axis_sizes
from maxtext.configs.types import DerivedValues, MaxTextConfig, Settings
from maxtext.configs.types.remat import CUSTOM_TENSORS, OFFLOADED, SAVED_ON_DEVICE


@dataclass(frozen=True)
class Devices:
    """The devices of a run."""

    count: int
    slices: int = 1  # over which the devices are spread
    full: int | None = None  # count before an elastic run lost some
    platform: str = ""  # cpu, gpu or tpu, if known


def visible_devices(hardware: str = "tpu", environ: Mapping[str, str] = os.environ) -> Devices:
    """The devices of this machine; with hardware=cpu, its CPUs, unless JAX uses others already."""
    choose_platform(hardware)
    import jax

    devices = jax.devices()
    began_with = environ.get(FULL_PROCESSES)
    full = len(devices) // jax.process_count() * int(began_with) if began_with else None
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return Devices(len(devices), slices, full, devices[0].platform)


DERIVED: dict[str, Callable[[MaxTextConfig, Devices], object]] = {}
OfConfig = TypeVar("OfConfig", bound=Callable[[MaxTextConfig], object])
OfDevices = TypeVar("OfDevices", bound=Callable[[MaxTextConfig, Devices], object])


def derived(function: OfConfig) -> OfConfig:
    """Register a function that computes the key of its own name."""
    DERIVED[function.__name__] = lambda config, devices: function(config)
    return function


def derived_from_devices(function: OfDevices) -> OfDevices:
    """Register a function that also needs the devices."""
    DERIVED[function.__name__] = function
    return function


def with_model_sizes(settings: Settings) -> MaxTextConfig:
    """The settings with those derived values that give the sizes of the model, and no others."""
    config = MaxTextConfig.model_construct(**dict(settings))
    config._architecture = settings.architecture
    config._sources = settings._sources
    for compute in MODEL_SIZES:
        config.__dict__[compute.__name__] = compute(config)
    return config


def derive(settings: Settings, devices: Devices) -> Json:
    """All derived values of validated settings, computed in the order of the group."""
    draft = MaxTextConfig.model_construct(**dict(settings))
    values: Json = {}
    for key in DerivedValues.model_fields:
        values[key] = draft.__dict__[key] = DERIVED[key](draft, devices)
    return values


# Model sizes for global_parameter_scale = 2^n with n = 3a + r: depth doubles a times, the embedding
# once more if r > 1, heads and MLP once more if r > 0.


def size_factor(config: MaxTextConfig, extra_from: int) -> int:
    doublings = config.global_parameter_scale.bit_length() - 1
    thirds, remainder = divmod(doublings, 3)
    return 2 ** (thirds + (remainder >= extra_from))


@derived
def emb_dim(config: MaxTextConfig) -> int:
    return config.base_emb_dim * size_factor(config, extra_from=2)


@derived
def mlp_dim(config: MaxTextConfig) -> int:
    return config.base_mlp_dim * size_factor(config, extra_from=1)


@derived
def moe_mlp_dim(config: MaxTextConfig) -> int:
    return (
        config.mlp_dim
        if config.base_moe_mlp_dim == -1
        else config.base_moe_mlp_dim * size_factor(config, extra_from=1)
    )


@derived
def num_decoder_layers(config: MaxTextConfig) -> int:
    return config.base_num_decoder_layers * size_factor(config, extra_from=3)


@derived
def num_kv_heads(config: MaxTextConfig) -> int:
    return config.base_num_kv_heads * size_factor(config, extra_from=1)


@derived
def num_query_heads(config: MaxTextConfig) -> int:
    return config.base_num_query_heads * size_factor(config, extra_from=1)


MODEL_SIZES: tuple[Callable[[MaxTextConfig], int], ...] = (
    emb_dim,
    mlp_dim,
    moe_mlp_dim,
    num_decoder_layers,
    num_kv_heads,
    num_query_heads,
)


# The mesh.


def slices(config: MaxTextConfig, devices: Devices) -> int:
    """The number of slices: num_slices if set, else what the DCN sizes multiply to or the devices
    report.
    """
    if config.num_slices != -1:
        return config.num_slices
    sizes = axis_sizes(config, "dcn")
    known = math.prod(size for size in sizes if size > 0)
    return max(devices.slices, known) if -1 in sizes or devices.slices == 1 else devices.slices


@derived
def num_diloco_replicas(config: MaxTextConfig) -> int:
    return max(config.ici_diloco_parallelism, 1) * max(config.dcn_diloco_parallelism, 1)


@derived_from_devices
def ici_parallelism(config: MaxTextConfig, devices: Devices) -> list[int]:
    count, num_slices = devices.count, slices(config, devices)
    if count % num_slices:
        raise ConfigError(
            f"{count} devices do not divide over {num_slices} slices: change num_slices or the "
            "dcn_* sizes"
        )
    return infer_axis_sizes(
        config,
        "ici",
        count // num_slices,
        "devices" if num_slices == 1 else f"devices in each of {num_slices} slices",
    )


@derived_from_devices
def dcn_parallelism(config: MaxTextConfig, devices: Devices) -> list[int]:
    return infer_axis_sizes(config, "dcn", slices(config, devices), "slices")


def axis_size(config: MaxTextConfig, axis: str) -> int:
    if axis not in config.mesh_axes:
        return 1
    index = config.mesh_axes.index(axis)
    return config.ici_parallelism[index] * config.dcn_parallelism[index]


@derived
def using_pipeline_parallelism(config: MaxTextConfig) -> bool:
    return axis_size(config, "stage") > 1


@derived
def context_parallel_size(config: MaxTextConfig) -> int:
    return axis_size(config, config.context_sharding)


@derived_from_devices
def num_target_devices(config: MaxTextConfig, devices: Devices) -> int:
    return devices.count


# Batch sizes, in sequences over all devices. One forward pass processes one microbatch.


def batch_devices(config: MaxTextConfig, devices: Devices) -> int:
    """The number of devices that per_device_batch_size multiplies. An elastic run keeps the global
    batch size that it started with.
    """
    return devices.full if config.elastic_enabled and devices.full else config.num_target_devices


def microbatch_size(config: MaxTextConfig, devices: Devices, per_device: float) -> int:
    return round(per_device * batch_devices(config, devices))


def microbatch_size_to_load(config: MaxTextConfig, devices: Devices, per_device: float) -> int:
    """At least one sequence per device, since hosts load whole sequences, times
    expansion_factor_real_data.
    """
    expansion = config.expansion_factor_real_data if config.expansion_factor_real_data > 0 else 1
    return round(max(per_device, 1) * batch_devices(config, devices) * expansion)


def eval_per_device(config: MaxTextConfig) -> float:
    return config.eval_per_device_batch_size or config.per_device_batch_size


@derived_from_devices
def global_batch_size_to_train_on(config: MaxTextConfig, devices: Devices) -> int:
    if config.use_grpo:
        return config.batch_size * config.num_generations
    return (
        microbatch_size(config, devices, config.per_device_batch_size)
        * config.gradient_accumulation_steps
    )


@derived_from_devices
def global_batch_size_to_eval_on(config: MaxTextConfig, devices: Devices) -> int:
    return microbatch_size(config, devices, eval_per_device(config))


@derived_from_devices
def global_batch_size_to_load(config: MaxTextConfig, devices: Devices) -> int:
    return (
        microbatch_size_to_load(config, devices, config.per_device_batch_size)
        * config.gradient_accumulation_steps
    )


@derived_from_devices
def global_batch_size_to_load_eval(config: MaxTextConfig, devices: Devices) -> int:
    return microbatch_size_to_load(config, devices, eval_per_device(config))


@derived_from_devices
def micro_batch_size_to_train_on(config: MaxTextConfig, devices: Devices) -> int:
    if config.use_grpo:
        rows = config.batch_size * config.num_generations
        return rows // config.gradient_accumulation_steps
    return microbatch_size(config, devices, config.per_device_batch_size)


@derived_from_devices
def micro_batch_size_to_eval_on(config: MaxTextConfig, devices: Devices) -> int:
    return microbatch_size(config, devices, eval_per_device(config))


# Batch ramp-up.


@derived_from_devices
def global_batch_size_to_load_start(config: MaxTextConfig, devices: Devices) -> int | None:
    if not config.enable_rampup_batch_size:
        return None
    return (
        microbatch_size_to_load(config, devices, config.per_device_batch_size_start)
        * config.gradient_accumulation_steps
    )


@derived_from_devices
def global_batch_size_to_load_increment(config: MaxTextConfig, devices: Devices) -> int | None:
    if not config.enable_rampup_batch_size:
        return None
    return (
        microbatch_size(config, devices, config.per_device_batch_size_increment)
        * config.gradient_accumulation_steps
    )


def rampup_increments(config: MaxTextConfig) -> int:
    start, step = config.per_device_batch_size_start, config.per_device_batch_size_increment
    return round((config.per_device_batch_size - start) / step)


@derived
def rampup_samples_per_increment_to_load(config: MaxTextConfig) -> float | None:
    return (
        config.global_rampup_samples / rampup_increments(config)
        if config.enable_rampup_batch_size
        else None
    )


def rampup_stages(config: MaxTextConfig) -> list[tuple[int, int]]:
    """(rows per step, number of steps) of each stage before the full batch.

    Stage k of n ends with the step at which the run has used global_rampup_samples * (k + 1) / n
    samples, so the ramp ends less than one batch after all of them. Rows are rounded per stage, so
    that rounding errors of fractional sizes do not accumulate.
    """
    # Exact: with a ramp-up per_device_batch_size is above 1.
    num_devices = round(config.micro_batch_size_to_train_on / config.per_device_batch_size)
    increments, used, stages = rampup_increments(config), 0, []
    for stage in range(increments):
        per_device = (
            config.per_device_batch_size_start + stage * config.per_device_batch_size_increment
        )
        rows = round(per_device * num_devices) * config.gradient_accumulation_steps
        missing = config.global_rampup_samples * (stage + 1) - used * increments
        steps = max(0, -(-missing // (rows * increments)))
        stages.append((rows, steps))
        used += rows * steps
    return stages


@derived
def rampup_end_step(config: MaxTextConfig) -> int | None:
    """The first step with the full batch."""
    return (
        sum(steps for _, steps in rampup_stages(config))
        if config.enable_rampup_batch_size
        else None
    )


# Folders.


def run_folder(config: MaxTextConfig, *names: str) -> str:
    """The folder of a run, or a path in it."""
    return os.path.join(config.base_output_directory, config.run_name, *names)


@derived
def checkpoint_dir(config: MaxTextConfig) -> str:
    return run_folder(config, "checkpoints")


@derived
def metrics_dir(config: MaxTextConfig) -> str:
    return run_folder(config, "metrics")


@derived
def tensorboard_dir(config: MaxTextConfig) -> str:
    return run_folder(config, "tensorboard")


@derived
def managed_mldiagnostics_dir(config: MaxTextConfig) -> str | None:
    return run_folder(config, "managed-mldiagnostics") if config.managed_mldiagnostics else None


@derived
def convert_checkpoint_if_possible(config: MaxTextConfig) -> bool:
    return config.source_checkpoint_layout == "safetensors" and bool(
        config.load_parameters_path or config.load_full_state_path
    )


# Rematerialization.


@derived
def tensors_on_device(config: MaxTextConfig) -> list[str] | None:
    """The activations that are saved on the device; None if nothing is rematerialized."""
    if config.remat_policy in ("", "none"):
        return None
    if config.remat_policy == "custom":
        return [name for name in CUSTOM_TENSORS if getattr(config, name).value == "device"]
    pipelined = (
        ["iteration_input", "decoder_layer_input"] if config.using_pipeline_parallelism else []
    )
    return SAVED_ON_DEVICE[config.remat_policy] + pipelined


@derived
def tensors_to_offload(config: MaxTextConfig) -> list[str] | None:
    if config.remat_policy in ("", "none"):
        return None
    if config.remat_policy == "custom":
        return [name for name in CUSTOM_TENSORS if getattr(config, name).value == "offload"]
    return OFFLOADED.get(config.remat_policy, [])


# Defaults of keys that a user may leave empty.


def run_name(model_name: str, weights: str, environ: Mapping[str, str]) -> str:
    """The default name of a run: $JOBSET_NAME, else the time after the name of the model, or of the
    folder that its weights come from.
    """
    # the folder of a run, not its checkpoints or one of their steps
    path = re.sub(r"/checkpoints(/\d+)?$", "", os.path.abspath(os.path.expanduser(weights)))
    folder = os.path.basename(path) if weights else ""
    name = folder if model_name == "default" and folder else model_name
    return environ.get("JOBSET_NAME") or f"{name}-{environ.get(STARTED) or now()}"


def base_output_directory() -> str:
    return "./maxtext_output"
