"""Ahead-of-time compiled train steps in files, and the cache of the compiled steps of a run.

`save` and `load` are for files: `maxtext compile` writes them, training loads them. A file is one
line of JSON, which describes the program, followed by the executable. Training lowers its own step
and runs a loaded one only if the two programs are textually identical; otherwise it reports what
differs. The executable is unpickled: load only files that you trust.

`StepCache` holds compiled steps by batch size, by the number of segments in a row, and by the
tokens that rows of rollouts share. Ramp-up changes the batch size. On one GPU, attention over
packed rows is faster if the step knows a bound on the segments (documents) of a row. So segment
counts are rounded up to buckets, and a batch runs the program of the smallest bucket that holds it.
The choice depends on nothing but the batch. With max_segments_per_seq there is one program, unless
the data exceeds that bound.
"""

import hashlib
import json
import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import atomic_writer
from maxtext.common.log import LOGGER
from maxtext.common.types import Json
from maxtext.configs import serialize
from maxtext.configs.types import AOT, DerivedValues
from maxtext.kernels.attention import AUTOSELECTED, cudnn
from maxtext.layers.attention_sharding import packed_request
from maxtext.layers.specs import AttentionSpec, MlaSpec
from maxtext.models.registry import layers
from maxtext.trainers.compilation.compile import compile_lowered, lower_train_step
from maxtext.trainers.data_loader import DeviceBatch
from maxtext.trainers.model_losses import needs_segment_mask
from maxtext.trainers.run_context import RunContext
from maxtext.trainers.step import TrainState

MARK = "maxtext compiled train step"
VERSION = 1
# Keys that name a run and its output. They do not change the program.
IGNORED_KEYS = {
    "run_name",
    "base_output_directory",
    "base_config",
    "jax_cache_dir",
    *AOT.model_fields,
}


def compile_without_cache(context: RunContext, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """`compile_lowered` without JAX's persistent cache: on CPUs, an executable that was loaded from
    the cache lacks functions after it has been serialized and loaded again."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # JAX reads the setting again only then
    try:
        return compile_lowered(context, lowered)
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def describe_program(context: RunContext, lowered: jax.stages.Lowered) -> Json:
    """The versions, devices and keys that a program was compiled for, and its hash."""
    config = context.config
    devices = context.rules.mesh.devices.flat
    keys = [
        key
        for key in serialize.KEYS_IN_ORDER
        if key not in IGNORED_KEYS and key not in DerivedValues.model_fields
    ]
    return {
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "platform": devices[0].platform,
        "processor": processor() if devices[0].platform == "cpu" else "",
        "device_kind": devices[0].device_kind,
        "devices": len(devices),
        "device_order": [device.id for device in devices],
        "program": hashlib.sha256(
            f"{config.compile_xla_flags}\n{lowered.as_text()}".encode()
        ).hexdigest(),
        "config": {key: serialize.plain(getattr(config, key)) for key in keys},
    }


@cache
def processor() -> str:
    """The architecture and a hash of the instruction sets of this machine's processor, all of which
    compiled code may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {hashlib.sha256(features.encode()).hexdigest()[:12]}"


def save(
    path: str, context: RunContext, lowered: jax.stages.Lowered, compiled: jax.stages.Compiled
) -> int:
    """Write the file atomically; return its size in bytes."""
    executable, _, _ = serialize_executable.serialize(compiled)
    header = {"mark": MARK, "version": VERSION, "digest": hashlib.sha256(executable).hexdigest()}
    line = json.dumps(header | describe_program(context, lowered)).encode() + b"\n"
    try:
        with atomic_writer(path, "wb") as file:
            file.write(line)
            file.write(executable)
    except OSError as error:
        raise UserError(
            f"cannot write compiled_trainstep_file={path}: {error.strerror or error}"
        ) from error
    return len(line) + len(executable)


def check_writable(path: str) -> None:
    """Raise UserError if the file cannot be written: compiling first would take minutes."""
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    if Path(path).is_dir():
        raise UserError(f"compiled_trainstep_file={path} is a folder: name a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(
            f"cannot write compiled_trainstep_file={path}: {folder} is not a writable folder"
        )


def load(path: str, context: RunContext, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The compiled step of a file. Raises ConfigError if it is not `lowered` on these devices."""
    header, executable = read(path)
    mismatch = describe_mismatch(header, describe_program(context, lowered))
    if mismatch:
        raise ConfigError(
            f"compiled_trainstep_file={path} was compiled for another run: {mismatch}; compile it "
            "again with `maxtext compile` and this run's settings, or leave it out"
        )
    devices = list(context.rules.mesh.devices.flat)
    try:
        return serialize_executable.deserialize_and_load(
            executable,
            lowered.in_tree,
            lowered.out_tree,
            backend=devices[0].client,
            execution_devices=devices,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"compiled_trainstep_file={path} cannot be loaded on this machine: "
            f"{str(error).splitlines()[0]}; compile it again with `maxtext compile`"
        ) from error


def read(path: str) -> tuple[Json, bytes]:
    """The header and the executable of a file. Raises UserError if the file is not intact."""
    try:
        line, _, executable = Path(path).read_bytes().partition(b"\n")
    except OSError as error:
        raise UserError(
            f"cannot read compiled_trainstep_file={path}: {error.strerror or error}"
        ) from error
    try:
        header = json.loads(line)
    except ValueError:
        header = {}
    if not isinstance(header, dict) or header.get("mark") != MARK:
        raise UserError(f"compiled_trainstep_file={path} is not a file of `maxtext compile`")
    if header.get("version") != VERSION:
        raise UserError(
            f"compiled_trainstep_file={path} is of another version: compile it again with "
            "`maxtext compile`"
        )
    if hashlib.sha256(executable).hexdigest() != header["digest"]:
        raise UserError(
            f"compiled_trainstep_file={path} is damaged: compile it again with `maxtext compile`"
        )
    return header, executable


def describe_mismatch(saved: Json, current: Json) -> str:
    """The reasons against running a saved program here; empty if there are none."""
    mismatches = [
        f"{name.replace('_', ' ')} {saved[name]} there, {current[name]} here"
        for name in ("jax", "jaxlib", "platform", "processor", "device_kind", "devices")
        if saved[name] != current[name]
    ]
    if mismatches:
        return ", ".join(mismatches)
    if saved["program"] == current["program"] and saved["device_order"] == current["device_order"]:
        return ""
    keys = [
        f"{key}={value} there, {current['config'][key]} here"
        for key, value in saved["config"].items()
        if value != current["config"].get(key)
    ]
    return ", ".join(keys) or "its program is not this version's, with the same keys"


UNBOUNDED = -1  # the bucket of any number of segments
SMALLEST_BUCKET = 15  # segments; together with the padding after them, a power of two


class StepCache:
    """Runs each batch with the program for it, which is compiled on first use."""

    def __init__(self, context: RunContext):
        self.context = context
        self.largest_bucket = largest_segment_bucket(context)
        # by (rows, bucket, shared prefix)
        self.programs: dict[tuple[int, int, int], jax.stages.Compiled] = {}

    def __call__(self, state: TrainState, batch: DeviceBatch, key: jax.Array) -> Any:
        rows = next(iter(batch.fields.values())).shape[0]
        program = self.get(rows, batch.max_segments, batch.shared_prefix)
        return program(state, batch.fields, key)

    def get(self, rows: int, max_segments: int = 1, shared_prefix: int = 0) -> jax.stages.Compiled:
        """The program for batches of `rows` rows with at most `max_segments` segments each, and for
        groups of rollouts that share `shared_prefix` tokens."""
        bucket = self.segment_bucket(max_segments)
        if (program := self.programs.get((rows, bucket, shared_prefix))) is not None:
            return program
        if self.programs and self.largest_bucket:
            LOGGER.info(
                "compiling the step for rows of %s documents",
                "any number of" if bucket == UNBOUNDED else bucket,
            )
        elif self.programs and shared_prefix:
            LOGGER.info("compiling the step for prompts of at least %d tokens", shared_prefix + 1)
        context = self.bounded_context(bucket).with_shared_prefix(shared_prefix)
        self.programs[rows, bucket, shared_prefix] = load_or_compile(context, rows)
        return self.programs[rows, bucket, shared_prefix]

    def bounded_context(self, bucket: int) -> RunContext:
        config = self.context.config
        if bucket == config.max_segments_per_seq:
            return self.context
        bounded = config.model_copy(update={"max_segments_per_seq": bucket})
        return self.context.with_config(bounded)

    def segment_bucket(self, max_segments: int) -> int:
        bound = self.context.config.max_segments_per_seq
        if not self.largest_bucket or max_segments <= bound <= self.largest_bucket:
            return bound
        bucket = max(SMALLEST_BUCKET, (1 << max_segments.bit_length()) - 1)
        return bucket if bucket <= self.largest_bucket else UNBOUNDED


def load_or_compile(context: RunContext, rows: int) -> jax.stages.Compiled:
    """The step in compiled_trainstep_file, or one that is compiled now."""
    config = context.config
    if config.compile_topology:
        raise ConfigError(
            f"compile_topology={config.compile_topology} is for maxtext compile and estimate; "
            "training runs on the devices that are here: leave it out"
        )
    lowered = lower_train_step(context, rows)
    if not config.compiled_trainstep_file:
        return compile_lowered(context, lowered)
    compiled = load(config.compiled_trainstep_file, context, lowered)
    LOGGER.info("the train step comes from %s and is not compiled", config.compiled_trainstep_file)
    return compiled


def largest_segment_bucket(context: RunContext) -> int:
    """The largest bound on the segments of a row that makes attention faster; 0 if none does.

    It is 0 on more than one device, so all processes of a run use the program of
    max_segments_per_seq, whatever segments each of them has.
    """
    config, devices = context.config, context.rules.mesh.devices
    uses_cudnn = config.attention in (AUTOSELECTED, "cudnn_flash_jax")
    if not uses_cudnn or config.compiled_trainstep_file or not needs_segment_mask(config):
        return 0
    if devices.size > 1 or devices.flat[0].platform != "gpu":
        return 0
    specs = [getattr(layer, "attention", None) for layer in layers(config)]
    sizes = config.max_target_length, config.dtype.value, "gpu"
    requests = [
        packed_request(spec, *sizes) for spec in specs if isinstance(spec, AttentionSpec | MlaSpec)
    ]
    limits = [
        cudnn.max_packed_segments(request.q_length, max(request.head_dim, request.v_head_dim))
        for request in requests
        if cudnn.unsupported_reason(request) is None
    ]
    largest = max(limits, default=1) - 1  # the padding takes one segment
    return largest if largest >= SMALLEST_BUCKET else 0
