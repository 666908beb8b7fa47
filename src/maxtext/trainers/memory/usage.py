"""The device memory that a run needs, by the compiler's count and by shapes."""

import math

import jax

from maxtext.common import hardware
from maxtext.common.log import LOGGER
from maxtext.sharding.topology import local_memory
from maxtext.trainers.run_context import RunContext


def step_bytes(step: jax.stages.Compiled) -> int:
    """Bytes that a step needs on one device; 0 if the compiler does not report them."""
    memory = step.memory_analysis()
    if memory is None:
        return 0
    new_outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + max(new_outputs, 0) + memory.temp_size_in_bytes


def peak_bytes() -> int | None:
    """The most memory that this process has had on a local device at a time; None where the
    platform does not count it."""
    peaks = [
        (device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()
    ]
    return max((peak for peak in peaks if peak is not None), default=None)


def state_bytes(context: RunContext) -> int:
    """Bytes of weights and optimizer state on one device."""
    leaves = jax.tree.leaves(context.abstract_state)
    shardings = jax.tree.leaves(context.shardings.state)
    return sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(leaves, shardings, strict=True)
        if sharding.memory_kind != "pinned_host"
    )


def warn_if_too_large(needed: int, what: str) -> bool:
    """Log a warning if `what` does not fit on a device; return whether it did."""
    devices = jax.local_devices()
    limit = local_memory(devices[0], len(devices))
    if limit is None or needed <= limit:
        return False
    LOGGER.warning(
        "%s needs about %s on each device, which has %s: expect it to fail or to swap; lower "
        "per_device_batch_size, max_target_length or the size of the model (base_emb_dim, "
        "base_num_decoder_layers), set remat_policy=full, or use more devices; `maxtext estimate` "
        "with the same arguments says what fits",
        what,
        hardware.format_bytes(needed),
        hardware.format_bytes(limit),
    )
    return True
