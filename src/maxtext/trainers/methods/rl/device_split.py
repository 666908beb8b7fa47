"""Which devices train and which sample in reinforcement learning.

The trainer has the first devices and the sampler the last: whole slices by num_trainer_slices and
num_samplers_slices, else shares of hosts of chips_per_vm devices. With one host, and with both
fractions 1, they share all devices. Fractions of more than 1 in sum overlap.
"""

import os
from dataclasses import dataclass, replace

from maxtext.common.errors import ConfigError
from maxtext.configs import fields
from maxtext.configs.derive import Devices
from maxtext.configs.load import base_values, peek_setting
from maxtext.configs.provenance import Layer
from maxtext.configs.types.rl import RLHardware


@dataclass(frozen=True)
class DeviceSplit:
    """Indices of devices, and the slices over which they are spread."""

    trainer: range
    sampler: range
    trainer_slices: int = 1
    sampler_slices: int = 1

    @property
    def is_shared(self) -> bool:
        return self.trainer == self.sampler


def trainer_devices(path: str | os.PathLike | None, overrides: Layer, devices: Devices) -> Devices:
    """The devices that the mesh of a run has. Raises ConfigError if the keys that divide them
    between trainer and sampler do not fit."""
    values = {}
    for key in ("use_grpo", *RLHardware.model_fields):
        value = fields.normalise(key, peek_setting(key, path, overrides, os.environ))
        values[key] = getattr(base_values(), key) if value is None else value
    if not values.pop("use_grpo"):
        return devices
    split = split_devices(RLHardware(**values), devices.count, devices.slices)
    if split.is_shared:
        return devices
    return replace(devices, count=len(split.trainer), slices=split.trainer_slices)


def split_devices(config: RLHardware, count: int, slices: int = 1) -> DeviceSplit:
    """The split of `count` devices in `slices` slices.

    Raises ConfigError if the keys do not divide the devices.
    """
    if config.num_trainer_slices > 0 and config.num_samplers_slices > 0:
        return split_slices(config, count, slices)
    chips = config.chips_per_vm
    if count <= chips:
        return DeviceSplit(range(count), range(count), slices, slices)
    if count % chips:
        raise ConfigError(
            f"chips_per_vm={chips} does not divide {count} devices into hosts, which trainer and "
            "sampler share: set it to the devices of a host"
        )
    hosts = count // chips
    sizes = []
    fractions = {
        "trainer_devices_fraction": config.trainer_devices_fraction,
        "sampler_devices_fraction": config.sampler_devices_fraction,
    }
    for key, fraction in fractions.items():
        share = hosts * fraction
        if share < 1 or abs(share - round(share)) > 1e-6:
            raise ConfigError(
                f"{key}={fraction:g} of {hosts} hosts with chips_per_vm={chips} devices is "
                f"{share:g} hosts: choose a fraction that gives whole hosts, or set chips_per_vm"
            )
        sizes.append(round(share) * chips)
    return DeviceSplit(range(sizes[0]), range(count - sizes[1], count))


def split_slices(config: RLHardware, count: int, slices: int) -> DeviceSplit:
    trainer, sampler = config.num_trainer_slices, config.num_samplers_slices
    if trainer + sampler > slices:
        raise ConfigError(
            f"num_trainer_slices={trainer} and num_samplers_slices={sampler} need "
            f"{trainer + sampler} slices, and there are {slices}"
        )
    size = count // slices
    return DeviceSplit(
        range(trainer * size),
        range(count - sampler * size, count),
        trainer_slices=trainer,
        sampler_slices=sampler,
    )


def sampler_parallelism(config: RLHardware, devices: int) -> dict[str, int]:
    """The sizes of the axes data, tensor and expert of the sampler's mesh. One -1 is inferred; if
    data and tensor both are, tensor is 1. Raises ConfigError if they do not make `devices`."""
    sizes = {
        "data": config.rollout_data_parallelism,
        "tensor": config.rollout_tensor_parallelism,
        "expert": config.rollout_expert_parallelism,
    }
    if sizes["data"] == sizes["tensor"] == -1:
        sizes["tensor"] = 1
    inferred = [axis for axis, size in sizes.items() if size == -1]
    known = 1
    for size in sizes.values():
        known *= 1 if size == -1 else size
    if len(inferred) == 1 and devices % known == 0:
        sizes[inferred[0]] = devices // known
    elif inferred or known != devices:
        named = ", ".join(f"rollout_{axis}_parallelism={size}" for axis, size in sizes.items())
        raise ConfigError(f"{named} do not make the {devices} devices of the sampler")
    return sizes
