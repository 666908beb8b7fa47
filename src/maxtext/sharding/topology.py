"""Targets by name: what a program is compiled for, which need not be this machine.

`cpu` and `gpu` are this machine's devices, `cpu:8` is eight devices made of its processor. A TPU
slice is named by its shape in chips (`v5p:4x4x4`) or as the cloud sells it (`v5p-128`: cores where
a chip has two, chips where it has one). Its devices come from libtpu, which compiles without a TPU;
without libtpu a target is still known by its numbers.
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
    """A kind of TPU."""

    kind: str  # as in the hardware table
    dimensions: int  # of a slice's shape
    named_by: int  # what the cloud's name counts, for each chip
    devices: int = 1  # JAX devices a chip


GENERATIONS = {
    "v4": Generation("TPU v4", 3, named_by=2),
    "v5p": Generation("TPU v5p", 3, named_by=2),
    "v5e": Generation("TPU v5e", 2, named_by=1),
    "v6e": Generation("TPU v6e", 2, named_by=1),
    "tpu7x": Generation("TPU7x", 3, named_by=2, devices=2),
}
# chips -> shape of the slice that a name without a shape means; other shapes of as many chips are
# written out
FLAT = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
SOLID = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 192: "4x4x12", 256: "4x8x8",
    384: "4x8x12", 512: "8x8x8", 768: "8x8x12", 1024: "8x8x16", 1536: "8x12x16", 2048: "8x16x16", 3072: "12x16x16",
    4096: "16x16x16", 6144: "16x16x24",
}  # fmt: skip
LARGEST = {"v4": 4096, "v5p": 6144, "tpu7x": 4096}  # chips of one slice
HOST_SIDE = 2  # a host holds up to two by two chips of a slice


@dataclass(frozen=True)
class Target:
    """`memory_bytes` of one device, or None where it is not known; `topology` is libtpu's name of
    one slice.
    """

    name: str
    platform: str  # cpu, gpu or tpu
    kind: str
    per_slice: int  # devices
    slices: int = 1
    memory_bytes: int | None = None
    topology: str = ""

    @property
    def count(self) -> int:
        return self.per_slice * self.slices

    def __str__(self) -> str:
        shape = f", {self.slices} slices" if self.slices > 1 else ""
        return f"{self.name} ({self.count} x {self.kind}{shape})"

    def devices(self) -> Sequence[jax.Device]:
        """Those of this machine, or devices to compile for and not to run on."""
        return tpu_devices(self) if self.topology else jax.devices(self.platform)


def find_target(name: str = "", slices: int = 1) -> Target:
    """The target of a name; of none, this machine."""
    generation, _, size = (
        re.sub("^v5litepod", "v5e", name.lower()).replace(":", "-", 1).partition("-")
    )
    if generation in GENERATIONS:
        return tpu_target(name, generation, size, slices)
    if slices > 1:
        raise ConfigError(
            f"{slices} slices of {name or 'this machine'}: only TPU targets are joined from slices"
        )
    if generation in ("", "cpu", "gpu") and (
        not size or (generation == "cpu" and re.fullmatch("[1-9][0-9]*", size))
    ):
        return local_target(generation, int(size or 0))
    near = difflib.get_close_matches(name, names(), n=4, cutoff=0.5)
    hint = (
        f"near names are {', '.join(near)}" if near else "for example v5p-128, v5p:4x4x4 or v6e-256"
    )
    raise ConfigError(f"unknown target {name!r}: it is cpu, cpu:8, gpu, or a TPU slice; {hint}")


def names() -> list[str]:
    """Every name that needs no shape."""
    found = ["cpu", "gpu"]
    for generation, facts in GENERATIONS.items():
        most = LARGEST.get(generation, max(FLAT))
        found += [
            f"{generation}-{chips * facts.named_by}"
            for chips in shapes(generation)
            if chips <= most
        ]
    return found


def shapes(generation: str) -> dict[int, str]:
    return SOLID if GENERATIONS[generation].dimensions == 3 else FLAT


def tpu_target(name: str, generation: str, size: str, slices: int) -> Target:
    facts = GENERATIONS[generation]
    shape = size
    if re.fullmatch("[1-9][0-9]*", size):
        chips, rest = divmod(int(size), facts.named_by)
        shape = (
            shapes(generation).get(chips, "")
            if not rest and chips <= LARGEST.get(generation, max(FLAT))
            else ""
        )
        if not shape:
            sizes = [
                known.partition("-")[2] for known in names() if known.startswith(f"{generation}-")
            ]
            raise ConfigError(
                f"unknown target {name!r}: the named sizes of {generation} are {', '.join(sizes)}; "
                f"another slice is written with its shape, such as {generation}:{list(shapes(generation).values())[2]}"
            )
    if not re.fullmatch("x".join(["[1-9][0-9]*"] * facts.dimensions), shape):
        example = list(shapes(generation).values())[2]
        raise ConfigError(
            f"unknown target {name!r}: a slice of {generation} has {facts.dimensions} sides, as {generation}:{example}"
        )
    chips = math.prod(int(side) for side in shape.split("x"))
    known = hardware.lookup(facts.kind)
    memory = known.memory_bytes if known else None
    return Target(
        name, "tpu", facts.kind, chips * facts.devices, slices, memory, f"{generation}:{shape}"
    )


def local_target(platform_name: str, count: int) -> Target:
    """What JAX has on this machine. `count` processor devices are made where JAX has not started
    yet.
    """
    if count:
        try:
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError as error:  # JAX has started: then it has as many as it has
            if len(jax.devices("cpu")) != count:
                raise ConfigError(
                    f"the target cpu:{count} has to be asked for before JAX starts: {error}"
                ) from error
    try:
        devices = jax.devices(platform_name or None)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"this machine has no {platform_name.upper()} that JAX can use ({reason}): "
            'install the right extra (pip install "maxtext[cuda13]"), or name a TPU target or cpu'
        ) from error
    first = devices[0]
    name = f"cpu:{count}" if count else platform_name or first.platform
    return Target(
        name, first.platform, first.device_kind, len(devices), 1, local_memory(first, len(devices))
    )


def local_memory(device: jax.Device, count: int) -> int | None:
    """What a program may use on one device; devices made of a processor share its machine's
    memory.
    """
    if device.platform == "cpu":
        return hardware.host_memory_bytes() // count
    limit = (device.memory_stats() or {}).get("bytes_limit")
    known = hardware.lookup(device.device_kind)
    return int(limit) if limit else known.memory_bytes if known else None


def tpu_devices(target: Target) -> Sequence[jax.Device]:
    """Devices that programs can be compiled for, from libtpu's description of the slices."""
    require_libtpu(target)
    look_for_no_tpu()
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


def look_for_no_tpu() -> None:
    """Where libtpu is installed and no TPU is, JAX must not look for one, nor keep other processes
    from compiling.
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
    if any(side < HOST_SIDE for side in sides[:2]):  # less than a host
        options["chips_per_host_bounds"] = [min(side, HOST_SIDE) for side in sides[:2]] + [1]
    return options


def require_libtpu(target: Target) -> ModuleType:
    hint = "estimate --no-compile gives the arithmetic without it"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise MissingExtra(
            f"compiling for {target.name} needs libtpu, which exists for x86-64 Linux only, not for "
            f"{platform.system()} on {platform.machine()}: compile on such a machine; {hint}"
        )
    return require("libtpu", f"compiling for {target.name} ({hint})")
