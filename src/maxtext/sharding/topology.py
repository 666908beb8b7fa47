"""Compilation targets by name; they need not be this machine.

`cpu` and `gpu` are this machine's devices, `cpu:8` is eight virtual CPU devices. A TPU slice is
named by its shape in chips (`v5p:4x4x4`) or by its name in the cloud (`v5p-128`, which counts cores
if a chip has two, else chips). Its devices come from libtpu, which compiles without a TPU. Without
libtpu, the size and the memory of a target are still known.
"""

import difflib
import importlib.util
import math
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from maxtext.common import hardware
from maxtext.common.errors import ConfigError, MissingExtra
from maxtext.common.extras import require


@dataclass(frozen=True)
class Generation:
    """A generation of TPUs."""

    kind: str  # in the hardware table
    dimensions: int  # of a slice's shape
    cores_per_chip: int  # as counted in the cloud's names
    devices_per_chip: int = 1  # JAX devices


GENERATIONS = {
    "v4": Generation("TPU v4", 3, cores_per_chip=2),
    "v5p": Generation("TPU v5p", 3, cores_per_chip=2),
    "v5e": Generation("TPU v5e", 2, cores_per_chip=1),
    "v6e": Generation("TPU v6e", 2, cores_per_chip=1),
    "tpu7x": Generation("TPU7x", 3, cores_per_chip=2, devices_per_chip=2),
}
# chips -> the shape of a slice whose name has no shape
SHAPES_2D = {
    1: "1x1",
    4: "2x2",
    8: "2x4",
    16: "4x4",
    32: "4x8",
    64: "8x8",
    128: "8x16",
    256: "16x16",
}
SHAPES_3D = {
    4: "2x2x1",
    8: "2x2x2",
    16: "2x2x4",
    32: "2x4x4",
    64: "4x4x4",
    128: "4x4x8",
    192: "4x4x12",
    256: "4x8x8",
    384: "4x8x12",
    512: "8x8x8",
    768: "8x8x12",
    1024: "8x8x16",
    1536: "8x12x16",
    2048: "8x16x16",
    3072: "12x16x16",
    4096: "16x16x16",
    6144: "16x16x24",
}
MAX_CHIPS = {"v4": 4096, "v5p": 6144, "tpu7x": 4096}  # of one slice
HOST_SIDE = 2  # a host has up to 2x2 chips of a slice


@dataclass(frozen=True)
class Target:
    """`memory_bytes` of one device, or None if unknown; `topology` is libtpu's name of a slice."""

    name: str
    platform: str  # cpu, gpu or tpu
    kind: str
    devices_per_slice: int
    slices: int = 1
    memory_bytes: int | None = None
    topology: str = ""

    @property
    def count(self) -> int:
        return self.devices_per_slice * self.slices

    def __str__(self) -> str:
        shape = f", {self.slices} slices" if self.slices > 1 else ""
        return f"{self.name} ({self.count} x {self.kind}{shape})"

    def devices(self) -> Sequence[jax.Device]:
        """This machine's devices, or devices to compile for but not to run on."""
        return tpu_devices(self) if self.topology else jax.devices(self.platform)


def find_target(name: str = "", slices: int = 1) -> Target:
    """The target of a name (default: this machine). Raises ConfigError if it is unknown."""
    generation, _, size = (
        re.sub("^v5litepod", "v5e", name.lower()).replace(":", "-", 1).partition("-")
    )
    if generation in GENERATIONS:
        return tpu_target(name, generation, size, slices)
    if slices > 1:
        raise ConfigError(
            f"{slices} slices of {name or 'this machine'}: only TPU targets have slices"
        )
    if generation in ("", "cpu", "gpu") and (
        not size or (generation == "cpu" and re.fullmatch("[1-9][0-9]*", size))
    ):
        return local_target(generation, int(size or 0))
    similar = difflib.get_close_matches(name, target_names(), n=4, cutoff=0.5)
    hint = "for example v5p-128, v5p:4x4x4 or v6e-256"
    if similar:
        hint = f"similar names are {', '.join(similar)}"
    raise ConfigError(f"unknown target {name!r}: it is cpu, cpu:8, gpu, or a TPU slice; {hint}")


def target_names() -> list[str]:
    """All names without a shape."""
    slices = [
        f"{name}-{chips * generation.cores_per_chip}"
        for name, generation in GENERATIONS.items()
        for chips in named_shapes(name)
    ]
    return ["cpu", "gpu", *slices]


def named_shapes(generation: str) -> dict[int, str]:
    """Chips -> shape of the slices of a generation that have a name without a shape."""
    shapes = SHAPES_3D if GENERATIONS[generation].dimensions == 3 else SHAPES_2D
    max_chips = MAX_CHIPS.get(generation, max(SHAPES_2D))
    return {chips: shape for chips, shape in shapes.items() if chips <= max_chips}


def tpu_target(name: str, generation_name: str, size: str, slices: int) -> Target:
    """`size`: a shape in chips, or the number in the cloud's name."""
    generation = GENERATIONS[generation_name]
    shapes = named_shapes(generation_name)
    example = f"{generation_name}:{list(shapes.values())[2]}"
    shape = size
    if re.fullmatch("[1-9][0-9]*", size):
        chips, rest = divmod(int(size), generation.cores_per_chip)
        shape = "" if rest else shapes.get(chips, "")
        if not shape:
            sizes = ", ".join(str(chips * generation.cores_per_chip) for chips in shapes)
            raise ConfigError(
                f"unknown target {name!r}: the named sizes of {generation_name} are {sizes}; write "
                f"another slice with its shape, such as {example}"
            )
    if not re.fullmatch("x".join(["[1-9][0-9]*"] * generation.dimensions), shape):
        raise ConfigError(
            f"unknown target {name!r}: a slice of {generation_name} has {generation.dimensions} "
            f"dimensions, such as {example}"
        )
    chips = math.prod(int(side) for side in shape.split("x"))
    entry = hardware.lookup(generation.kind)
    return Target(
        name,
        "tpu",
        kind=generation.kind,
        devices_per_slice=chips * generation.devices_per_chip,
        slices=slices,
        memory_bytes=entry.memory_bytes if entry else None,
        topology=f"{generation_name}:{shape}",
    )


def local_target(platform_name: str, count: int) -> Target:
    """This machine's devices; `count` virtual CPU devices if it is not 0.

    Raises ConfigError if JAX has started already with another number of devices.
    """
    if count:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError as error:  # JAX has started
            if len(jax.devices("cpu")) != count:
                raise ConfigError(
                    f"the target cpu:{count} must be set before JAX starts: {error}"
                ) from error
    try:
        devices = jax.devices(platform_name or None)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"this machine has no {platform_name.upper()} that JAX can use ({reason}): "
            'install the right extra (pip install -e ".[cuda13]"), or name a TPU target or cpu'
        ) from error
    first = devices[0]
    name = f"cpu:{count}" if count else platform_name or first.platform
    return Target(
        name,
        first.platform,
        kind=first.device_kind,
        devices_per_slice=len(devices),
        memory_bytes=local_memory(first, len(devices)),
    )


def local_memory(device: jax.Device, count: int) -> int | None:
    """Bytes that a program may use on one device; virtual CPU devices share the host's memory."""
    if device.platform == "cpu":
        return hardware.host_memory_bytes() // count
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit:
        return int(limit)
    entry = hardware.lookup(device.device_kind)
    return entry.memory_bytes if entry else None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device: `used` by this process, and `free` for it."""

    total: int
    used: int
    free: int


def device_memory(device: jax.Device, count: int) -> DeviceMemory | None:
    """The memory of one of `count` local devices; None if the platform does not report it. The
    process can take no more than `local_memory`, and, beyond what JAX holds already, no more than
    other processes leave on the device. CPU devices share the host's memory."""
    if device.platform == "cpu":
        _, used = hardware.process_bytes()
        free = hardware.available_host_bytes() // count
        return DeviceMemory(hardware.host_memory_bytes() // count, used // count, free)
    limit, stats = local_memory(device, count), device.memory_stats() or {}
    if limit is None:
        return None
    used = stats.get("bytes_in_use", 0)
    free, total = limit - used, limit
    reported = None
    if device.platform == "gpu" and not hardware.gpu_capability().startswith("gfx"):
        reported = hardware.cuda_memory(device.local_hardware_id or 0)
    if reported is not None:
        outside, total = reported
        # JAX's pool grows from what the driver still has.
        free = min(free, stats.get("pool_bytes", used) - used + outside)
    return DeviceMemory(total, used, max(free, 0))


def free_memory(device: jax.Device, count: int) -> int | None:
    """Bytes of a device that this process can still take; None if that is not known."""
    memory = device_memory(device, count)
    return None if memory is None else memory.free


def tpu_devices(target: Target) -> Sequence[jax.Device]:
    """Devices to compile for, from libtpu's description of the slices."""
    require_libtpu(target)
    disable_tpu_discovery()
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(
            topology_name=target.topology, platform="tpu", **topology_options(target)
        ).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"libtpu has no slice {target.topology} for the target {target.name}: {reason}"
        ) from error


def disable_tpu_discovery() -> None:
    """With libtpu but no TPU, keep JAX from looking for one and from locking out other
    processes.
    """
    if importlib.util.find_spec("libtpu") is None:
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def topology_options(target: Target) -> dict[str, Any]:
    options: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
    sides = [int(side) for side in target.topology.partition(":")[2].split("x")]
    if any(side < HOST_SIDE for side in sides[:2]):  # a part of a host
        options["chips_per_host_bounds"] = [min(side, HOST_SIDE) for side in sides[:2]] + [1]
    return options


def require_libtpu(target: Target) -> ModuleType:
    hint = "estimate --no-compile gives the arithmetic without it"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise MissingExtra(
            f"compiling for {target.name} needs libtpu, which exists for x86-64 Linux only, not "
            f"for {platform.system()} on {platform.machine()}: compile on such a machine; {hint}"
        )
    return require("libtpu", f"compiling for {target.name} ({hint})")
