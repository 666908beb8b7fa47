"""Derived values: each key of the DerivedValues group is computed by the function of its name
below.

A function sees the settings and the values derived before it (the order of the group), and nothing
else but the devices of this machine.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.common.processes import FULL_PROCESSES, STARTED, now
from maxtext.configs.types import DerivedValues

MESH_KEYS = {"stage": "pipeline"}  # the one mesh axis whose keys are not named after it

_PROJECTIONS = ["query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"]
_MINIMAL = [*_PROJECTIONS, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwi", "mlpwo"]
# remat policy -> the tensors that it keeps on the device
SAVED_ON_DEVICE = {
    "full": [],
    "save_qkv_proj": _PROJECTIONS,
    "save_out_proj": ["out_proj"],
    "save_dot_except_mlp": [*_PROJECTIONS, "out_proj"],
    "save_dot_with_context_except_mlp": [*_PROJECTIONS, "out_proj", "context"],
    "save_dot_except_mlpwi": [*_PROJECTIONS, "out_proj", "mlpwo"],
    "minimal": _MINIMAL,
    "minimal_with_context": [*_MINIMAL, "context"],
    "minimal_flash": [*_MINIMAL, "context"],
    "qkv_proj_offloaded": [],
    "minimal_offloaded": [],
}
# remat policy -> the tensors that it moves to pinned host memory
OFFLOADED = {
    "qkv_proj_offloaded": ["query_proj", "key_proj", "value_proj", "kv_proj"],
    "minimal_offloaded": _MINIMAL,
}
# the tensors whose place remat_policy=custom reads from the key of their name
CUSTOM_TENSORS = (
    "decoder_layer_input", "context", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo",
    "query_proj", "key_proj", "value_proj", "query_wa_proj", "kv_wa_proj", "qkv_proj", "out_proj", "mla_q", "mla_kv",
    "attention_out", "engram",
)  # fmt: skip


@dataclass(frozen=True)
class Devices:
    """How many devices a run has, over how many slices; `full`: how many before an elastic run lost
    some; `platform`: cpu, gpu or tpu, if it is known."""

    count: int
    slices: int = 1
    full: int | None = None
    platform: str = ""


def visible_devices(environ: Mapping[str, str] = os.environ) -> Devices:
    import jax

    devices = jax.devices()
    began_with = environ.get(FULL_PROCESSES)
    full = len(devices) // jax.process_count() * int(began_with) if began_with else None
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    return Devices(len(devices), slices, full, devices[0].platform)


class Draft:
    """The settings with the values derived so far."""

    def __init__(self, settings: Any, devices: Devices):
        self.settings, self.devices = settings, devices
        self.derived: dict[str, Any] = {}

    def __getattr__(self, key: str) -> Any:
        return self.derived[key] if key in self.derived else getattr(self.settings, key)


def derive(settings: Any, devices: Devices) -> dict[str, Any]:
    """All derived values of validated settings."""
    draft = Draft(settings, devices)
    for key in DerivedValues.model_fields:
        draft.derived[key] = globals()[key](draft)
    return draft.derived


# Sizes after global_parameter_scale = 2^n, n = 3a + r: depth takes a doublings, width one more when
# r > 1, heads and MLP one more when r > 0.


def size_factor(c: Any, extra_from: int) -> int:
    doublings = c.global_parameter_scale.bit_length() - 1
    whole, rest = divmod(doublings, 3)
    return 2 ** (whole + (rest >= extra_from))


def emb_dim(c: Any) -> int:
    return c.base_emb_dim * size_factor(c, extra_from=2)


def mlp_dim(c: Any) -> int:
    return c.base_mlp_dim * size_factor(c, extra_from=1)


def moe_mlp_dim(c: Any) -> int:
    return (
        c.mlp_dim if c.base_moe_mlp_dim == -1 else c.base_moe_mlp_dim * size_factor(c, extra_from=1)
    )


def num_decoder_layers(c: Any) -> int:
    return c.base_num_decoder_layers * size_factor(c, extra_from=3)


def num_kv_heads(c: Any) -> int:
    return c.base_num_kv_heads * size_factor(c, extra_from=1)


def num_query_heads(c: Any) -> int:
    return c.base_num_query_heads * size_factor(c, extra_from=1)


# The mesh.


def axis_sizes(c: Any, network: str) -> list[int]:
    return [
        getattr(c, f"{network}_{MESH_KEYS.get(axis, axis)}_parallelism") for axis in c.mesh_axes
    ]


def check_unused_axes(c: Any, network: str) -> None:
    """A size for an axis that the mesh does not have would do nothing."""
    prefix, suffix = f"{network}_", "_parallelism"
    used = {f"{prefix}{MESH_KEYS.get(axis, axis)}{suffix}" for axis in c.mesh_axes}
    for key in type(c.settings).model_fields:
        sized = key.startswith(prefix) and key.endswith(suffix) and key != f"{network}_parallelism"
        if sized and key not in used and getattr(c, key) not in (1, -1):
            axis = key.removeprefix(prefix).removesuffix(suffix)
            raise ConfigError(
                f"{key}={getattr(c, key)}, but mesh_axes has no axis {axis!r}: add it or leave the key 1"
            )


def fill(c: Any, network: str, total: int, what: str) -> list[int]:
    """Axis sizes with one -1 inferred, multiplying to `total`."""
    check_unused_axes(c, network)
    sizes = axis_sizes(c, network)
    named = dict(zip(c.mesh_axes, sizes, strict=True))
    bad = [axis for axis, size in named.items() if size < 1 and size != -1]
    if bad:
        raise ConfigError(
            f"{network}_{MESH_KEYS.get(bad[0], bad[0])}_parallelism={named[bad[0]]}: use a size of 1 or more, or -1"
        )
    free = [
        f"{network}_{MESH_KEYS.get(axis, axis)}_parallelism"
        for axis, size in named.items()
        if size == -1
    ]
    if len(free) > 1:
        raise ConfigError(
            f"{' and '.join(free)} are both -1: only one size a group can be inferred, set the others"
        )
    known = math.prod(size for size in sizes if size != -1)
    if free and total % known == 0:
        return [total // known if size == -1 else size for size in sizes]
    if not free and known == total:
        return sizes
    given = ", ".join(f"{axis}={size}" for axis, size in named.items() if size != 1) or "all 1"
    raise ConfigError(
        f"the {network}_*_parallelism sizes ({given}) multiply to {known}, which does not make {total} {what}: "
        f"change them, or set one of them to -1 to have it inferred"
    )


def slices(c: Any) -> int:
    """Slices that the DCN axes join: as set, as many as the DCN sizes say, or as many as there
    are.
    """
    if c.num_slices != -1:
        return c.num_slices
    sizes = axis_sizes(c, "dcn")
    known = math.prod(size for size in sizes if size > 0)
    return (
        max(c.devices.slices, known) if -1 in sizes or c.devices.slices == 1 else c.devices.slices
    )


def num_diloco_replicas(c: Any) -> int:
    return max(c.ici_diloco_parallelism, 1) * max(c.dcn_diloco_parallelism, 1)


def ici_parallelism(c: Any) -> list[int]:
    count, among = c.devices.count, slices(c)
    if count % among:
        raise ConfigError(
            f"{count} devices do not divide over {among} slices: change num_slices or the dcn_* sizes"
        )
    return fill(
        c, "ici", count // among, "devices" if among == 1 else f"devices in each of {among} slices"
    )


def dcn_parallelism(c: Any) -> list[int]:
    return fill(c, "dcn", slices(c), "slices")


def axis_size(c: Any, axis: str) -> int:
    if axis not in c.mesh_axes:
        return 1
    place = c.mesh_axes.index(axis)
    return c.ici_parallelism[place] * c.dcn_parallelism[place]


def using_pipeline_parallelism(c: Any) -> bool:
    return axis_size(c, "stage") > 1


def context_parallel_size(c: Any) -> int:
    return axis_size(c, c.context_sharding)


def num_target_devices(c: Any) -> int:
    return c.devices.count


# Batches, in sequences over all devices. A micro-batch is what one forward pass sees.


def batch_devices(c: Any) -> int:
    """The devices that per_device_batch_size multiplies: an elastic run keeps the global batch that
    it began with.
    """
    return c.devices.full if c.elastic_enabled and c.devices.full else c.num_target_devices


def micro_batch(c: Any, per_device: float) -> int:
    return round(per_device * batch_devices(c))


def micro_batch_to_load(c: Any, per_device: float) -> int:
    """At least one sequence a device, since each host loads whole sequences; more when few hosts
    read real data.
    """
    expansion = c.expansion_factor_real_data if c.expansion_factor_real_data > 0 else 1
    return round(max(per_device, 1) * batch_devices(c) * expansion)


def eval_per_device(c: Any) -> float:
    return c.eval_per_device_batch_size or c.per_device_batch_size


def global_batch_size_to_train_on(c: Any) -> int:
    return micro_batch(c, c.per_device_batch_size) * c.gradient_accumulation_steps


def global_batch_size_to_eval_on(c: Any) -> int:
    return micro_batch(c, eval_per_device(c))


def global_batch_size_to_load(c: Any) -> int:
    return micro_batch_to_load(c, c.per_device_batch_size) * c.gradient_accumulation_steps


def global_batch_size_to_load_eval(c: Any) -> int:
    return micro_batch_to_load(c, eval_per_device(c))


def micro_batch_size_to_train_on(c: Any) -> int:
    return micro_batch(c, c.per_device_batch_size)


def micro_batch_size_to_eval_on(c: Any) -> int:
    return micro_batch(c, eval_per_device(c))


# Batch ramp-up.


def global_batch_size_to_load_start(c: Any) -> int | None:
    if not c.enable_rampup_batch_size:
        return None
    return micro_batch_to_load(c, c.per_device_batch_size_start) * c.gradient_accumulation_steps


def global_batch_size_to_load_increment(c: Any) -> int | None:
    if not c.enable_rampup_batch_size:
        return None
    return micro_batch(c, c.per_device_batch_size_increment) * c.gradient_accumulation_steps


def rampup_increments(c: Any) -> int:
    start, step = c.per_device_batch_size_start, c.per_device_batch_size_increment
    return round((c.per_device_batch_size - start) / step)


def rampup_samples_per_increment_to_load(c: Any) -> float | None:
    return c.global_rampup_samples / rampup_increments(c) if c.enable_rampup_batch_size else None


def rampup_stages(c: Any) -> list[tuple[int, int]]:
    """(rows of a step, steps) of each stage below the full batch. Stage k of n ends with the step
    at which the run has used global_rampup_samples * (k + 1) / n samples, so the whole ramp ends
    less than one batch after all of them. Rows are rounded stage by stage: the rounding errors of
    fractional sizes do not add up."""
    increments, used, stages = rampup_increments(c), 0, []
    for stage in range(increments):
        per_device = c.per_device_batch_size_start + stage * c.per_device_batch_size_increment
        rows = micro_batch(c, per_device) * c.gradient_accumulation_steps
        missing = c.global_rampup_samples * (stage + 1) - used * increments
        steps = max(0, -(-missing // (rows * increments)))
        stages.append((rows, steps))
        used += rows * steps
    return stages


def rampup_end_step(c: Any) -> int | None:
    """The first step with the full batch."""
    return sum(steps for _, steps in rampup_stages(c)) if c.enable_rampup_batch_size else None


# Folders.


def run_folder(c: Any, name: str) -> str:
    return os.path.join(c.base_output_directory, c.run_name, name)


def checkpoint_dir(c: Any) -> str:
    return run_folder(c, "checkpoints")


def metrics_dir(c: Any) -> str:
    return run_folder(c, "metrics")


def tensorboard_dir(c: Any) -> str:
    return run_folder(c, "tensorboard")


def managed_mldiagnostics_dir(c: Any) -> str | None:
    return run_folder(c, "managed-mldiagnostics") if c.managed_mldiagnostics else None


def convert_checkpoint_if_possible(c: Any) -> bool:
    return c.source_checkpoint_layout == "safetensors" and bool(
        c.load_parameters_path or c.load_full_state_path
    )


# Rematerialization.


def tensors_on_device(c: Any) -> list[str] | None:
    """The activations that stay on the device; None when nothing is rematerialized."""
    if c.remat_policy in ("", "none"):
        return None
    if c.remat_policy == "custom":
        return [name for name in CUSTOM_TENSORS if getattr(c, name).value == "device"]
    pipelined = ["iteration_input", "decoder_layer_input"] if c.using_pipeline_parallelism else []
    return SAVED_ON_DEVICE[c.remat_policy] + pipelined


def tensors_to_offload(c: Any) -> list[str] | None:
    if c.remat_policy in ("", "none"):
        return None
    if c.remat_policy == "custom":
        return [name for name in CUSTOM_TENSORS if getattr(c, name).value == "offload"]
    return OFFLOADED.get(c.remat_policy, [])


# Keys that a user may leave empty.


def run_name(model_name: str, weights: str, environ: Mapping[str, str]) -> str:
    """Of a run without one: $JOBSET_NAME, else the folder that its weights come from, or its model,
    and the time.
    """
    path = re.sub(
        r"/checkpoints(/\d+)?$", "", os.path.abspath(os.path.expanduser(weights))
    )  # a run, not its step
    folder = os.path.basename(path) if weights else ""
    name = folder if model_name == "default" and folder else model_name
    return environ.get("JOBSET_NAME") or f"{name}-{environ.get(STARTED) or now()}"


def base_output_directory() -> str:
    return "./maxtext_output"
