"""The memory that a run needs, by shapes and by the compiler's count, and the refusal of a run that
does not fit.

Free memory is measured before the weights are created. A run is refused if its state alone needs
more, or its state with the caches of rollouts, which shapes and shards say before anything is
compiled or loaded, or if its compiled step does. `check_memory=false` (`--force`) makes these
refusals warnings.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax

from maxtext.checkpoint.multihost import allgather_int
from maxtext.common import progress
from maxtext.common.hardware import available_host_bytes, format_bytes
from maxtext.common.log import LOGGER
from maxtext.configs.types import MaxTextConfig
from maxtext.sharding.memory import MemoryBytes, shard_bytes
from maxtext.sharding.topology import Target, free_memory
from maxtext.trainers.build import build_run_context
from maxtext.trainers.compilation.compile import OutOfDeviceMemory, compile_train_step
from maxtext.trainers.memory.activations import policy_of
from maxtext.trainers.memory.estimate import batch_shards, with_batch
from maxtext.trainers.methods import method_of
from maxtext.trainers.run_context import RunContext

MAX_COMPILATIONS = 4  # to find the largest batch that fits
MIB = 2**20


def step_bytes(step: jax.stages.Compiled) -> MemoryBytes:
    """Bytes that a step needs on one device, and of its host; 0 if the compiler does not report
    them."""
    memory = step.memory_analysis()
    if memory is None:
        return MemoryBytes()
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    host = memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes
    return MemoryBytes(
        memory.argument_size_in_bytes + max(new_outputs, 0) + memory.temp_size_in_bytes, host
    )


def state_bytes(context: RunContext) -> MemoryBytes:
    """Bytes of weights, optimizer state and reference on one device, and in its host's memory."""
    return shard_bytes(context.abstract_state, context.shardings.state)


def sampling_bytes(context: RunContext) -> MemoryBytes:
    """Bytes on one device while rollouts are sampled on the devices of the trainer: the state, with
    all weights on the device, and the caches of `max_num_seqs` sequences. 0 without rollouts, or if
    they are sampled on other devices.
    """
    caches = method_of(context.config).rollout_bytes(context)
    if not caches or context.rules.mesh.size < jax.device_count():
        return MemoryBytes()
    state = state_bytes(context)
    offloaded = shard_bytes(context.abstract_state.weights, context.shardings.state.weights).host
    return MemoryBytes(state.device + offloaded + caches, state.host)


def peak_bytes() -> int | None:
    """The most memory that this process has had on a local device at a time; None where the
    platform does not count it."""
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes of one device, and of the host for one of its devices; None if unknown. The least
    of all processes, so that all of them decide alike."""

    device: int | None
    host: int | None = None

    @classmethod
    def measure(cls) -> "FreeMemory":
        devices = jax.local_devices()
        sizes = [free_memory(device, len(devices)) for device in devices]
        known = [size for size in sizes if size is not None]
        device = min(known) if len(known) == len(sizes) else 0
        is_cpu = devices[0].platform == "cpu"
        host = 0 if is_cpu else available_host_bytes() // len(devices)
        least = [min(allgather_int(size // MIB)) * MIB for size in (device, host)]
        return cls(least[0] if len(known) == len(sizes) else None, None if is_cpu else least[1])

    def shortage(self, needed: MemoryBytes) -> str:
        """By how much `needed` is too much; empty if it fits, or if that is not known."""
        if self.device is not None and needed.device > self.device:
            return (
                f"needs {format_bytes(needed.device)} on each device, and "
                f"{format_bytes(self.device)} are free"
            )
        if self.host is not None and needed.host > self.host:
            return (
                f"needs {format_bytes(needed.host)} of host memory for each device, and "
                f"{format_bytes(self.host)} are free"
            )
        return ""


def check_state(context: RunContext, free: FreeMemory) -> None:
    """Raise OutOfDeviceMemory if weights and optimizer alone do not fit, or not with the caches of
    rollouts."""
    shortage = free.shortage(state_bytes(context))
    if not shortage:
        return check_sampling(context, free)
    weights = shard_bytes(context.abstract_state.weights, context.shardings.state.weights)
    refuse_or_warn(
        context.config,
        f"the state of training, with {format_bytes(weights.device + weights.host)} of weights, "
        f"{shortage}, so no batch size fits: train adapters (lora_rank=16, and "
        "lora_weight_qtype=nf4 for a quantized base), use more devices, or a smaller model "
        "(base_emb_dim, base_num_decoder_layers)",
    )


def check_sampling(context: RunContext, free: FreeMemory) -> None:
    """Raise OutOfDeviceMemory if the state does not fit with the cache of one rollout. If it does
    not with those of all, the engine samples fewer at a time (`EngineSizer`): a warning."""
    config = context.config
    shortage = free.shortage(sampling_bytes(context))
    if not shortage:
        return
    advice = f"lower max_target_length={config.max_target_length}"
    one = context.with_config(config.model_copy(update={"max_num_seqs": 1}))
    if least := free.shortage(sampling_bytes(one)):
        refuse_or_warn(config, f"sampling one rollout with the state of training {least}: {advice}")
    else:
        LOGGER.warning(
            "sampling all rollouts at once with the state of training %s, so fewer are sampled at "
            "a time: %s to sample more",
            shortage,
            advice,
        )


def compile_and_check(
    context: RunContext, free: FreeMemory, compile_step: Callable[[], jax.stages.Compiled]
) -> jax.stages.Compiled:
    """The compiled step. Raises OutOfDeviceMemory with the largest batch that fits if it needs more
    memory than is free, or if the compiler refuses it for that."""
    config = context.config
    try:
        step = compile_step()
    except OutOfDeviceMemory as error:
        advice = describe_batch(context, free, needed=None)
        raise OutOfDeviceMemory(f"{error}; {advice}") from error
    shortage = free.shortage(step_bytes(step))
    if shortage and not free.shortage(state_bytes(context)):
        key, rows = context.batches.microbatch_key, config.micro_batch_size_to_train_on
        batch = f"a step of {rows} rows ({key}={getattr(config, key):g})"
        advice = describe_batch(context, free, step_bytes(step)) if config.check_memory else ""
        refuse_or_warn(config, f"{batch} {shortage}" + (f": {advice}" if advice else ""))
    return step


def refuse_or_warn(config: MaxTextConfig, problem: str) -> None:
    if config.check_memory:
        raise OutOfDeviceMemory(
            f"{problem}; `maxtext estimate` with the same arguments shows what else would fit, and "
            "--force (check_memory=false) tries it anyway"
        )
    LOGGER.warning("%s; expect it to fail or to swap", problem)


def describe_batch(context: RunContext, free: FreeMemory, needed: MemoryBytes | None) -> str:
    """Names the largest batch that fits, which is compiled to be sure."""
    config = context.config
    batches = context.batches
    key = batches.microbatch_key
    if config.enable_rampup_batch_size or free.device is None:
        return f"lower {key} or max_target_length"
    with progress.working(f"finding the largest {key} that fits"):
        rows, is_largest = largest_batch(context, free, needed)
    if not rows:
        return (
            f"no {key} fits with remat_policy={policy_of(config)} and "
            f"max_target_length={config.max_target_length}; lower the length, or recompute more "
            "(remat_policy=full)"
        )
    value = batches.microbatch_value(config, rows, target_of(context).count)
    return f"{key}={value:g} {'is the largest that fits' if is_largest else 'fits'}"


def largest_batch(
    context: RunContext, free: FreeMemory, needed: MemoryBytes | None
) -> tuple[int, bool]:
    """(rows of a microbatch that fits, whether no larger one does). The batch of the configuration
    does not fit; `needed` is what it needs. Memory is linear in the rows, about, so the next batch
    to compile is interpolated."""
    config, shards = context.config, batch_shards(context.rules)
    batches = context.batches
    low, high = 0, config.micro_batch_size_to_train_on
    low_bytes = state_bytes(context).device
    high_bytes = needed.device if needed is not None else 0
    for _ in range(MAX_COMPILATIONS):
        smallest = next_rows(context, shards, low)
        if smallest >= high:
            return low, True
        guess = (low + high) // 2
        if high_bytes > low_bytes:
            part = ((free.device or 0) - low_bytes) / (high_bytes - low_bytes)
            guess = low + int((high - low) * part)
        rows = max(batches.possible_rows(config, min(guess, high - 1), shards), smallest)
        size = compiled_bytes(context, rows)
        if size is not None and not free.shortage(size):
            low, low_bytes = rows, size.device
        else:
            high, high_bytes = rows, 0 if size is None else size.device
    return low, next_rows(context, shards, low) >= high


def next_rows(context: RunContext, shards: int, rows: int) -> int:
    """The next larger microbatch that the configuration can have."""
    config, batches = context.config, context.batches
    full = config.micro_batch_size_to_train_on
    for larger in range(rows + 1, full):
        if batches.possible_rows(config, larger, shards) == larger:
            return larger
    return full


def compiled_bytes(context: RunContext, rows: int) -> MemoryBytes | None:
    """Bytes of the step of microbatches of `rows` rows; None if the compiler refuses it."""
    config = context.config
    smaller = build_run_context(with_batch(config, target_of(context), policy_of(config), rows))
    try:
        return step_bytes(compile_train_step(smaller, smaller.config.global_batch_size_to_train_on))
    except OutOfDeviceMemory:
        return None


def target_of(context: RunContext) -> Target:
    """The devices of a run."""
    mesh, slices = context.rules.mesh, math.prod(context.config.dcn_parallelism)
    device = mesh.devices.flat[0]
    return Target(
        "this machine",
        device.platform,
        kind=device.device_kind,
        devices_per_slice=mesh.size // slices,
        slices=slices,
    )
