"""The configuration of `maxtext data`, without a device."""

import math
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from maxtext.cli import positionals
from maxtext.configs.types import MaxTextConfig

BATCH = "per_device_batch_size"
MAX_DEVICES_PER_SEQUENCE = 4096


def load_config(args: list[str]) -> MaxTextConfig:
    """The configuration of FILE and overrides for the fewest devices that it allows.

    Does not start a device.
    """
    from maxtext.cli.train import open_model_checkpoint
    from maxtext.configs import sources
    from maxtext.configs.derive import Devices
    from maxtext.configs.load import resolve
    from maxtext.models.configuration import load

    path, overrides = positionals.split(args)
    layer = sources.from_overrides(overrides)
    checkpoint = open_model_checkpoint(path, layer)
    model = checkpoint.model_layer if checkpoint else None
    settings, _ = resolve(path, layer, os.environ, model)
    count, slices = fewest_devices({key: setting.value for key, setting in settings.items()})
    return load(path, layer, devices=Devices(count, slices), model=model)


def fewest_devices(values: Mapping[str, Any]) -> tuple[int, int]:
    """The (devices, slices) that the mesh sizes and a fractional batch size need. `load` checks
    whether they fit.
    """

    def size(key: str) -> float:
        try:
            value = float(values[key])
        except (TypeError, ValueError):
            return 1
        return value if value > 0 and math.isfinite(value) else 1

    sizes = {key: int(size(key)) for key in values if key.endswith("_parallelism")}
    dcn = math.prod(size for key, size in sizes.items() if key.startswith("dcn_"))
    slices = max(dcn, int(size("num_slices")))
    count = slices * math.prod(size for key, size in sizes.items() if key.startswith("ici_"))
    batch = Fraction(size(BATCH)).limit_denominator(MAX_DEVICES_PER_SEQUENCE)
    return math.lcm(count, batch.denominator), slices
