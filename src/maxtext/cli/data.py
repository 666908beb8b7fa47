"""`maxtext data`: see the batches of a configuration, prepare or index tokens, measure the
pipeline.
"""

import importlib
import math
import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from maxtext.cli import arguments
from maxtext.common import log
from maxtext.common.errors import ConfigError

TASKS = ("inspect", "prepare", "throughput", "index")
BATCH = "per_device_batch_size"
MOST_DEVICES = 4096  # that share a sequence, where a device has a fraction of one


def run(args: list[str]) -> int:
    if not args or args[0] not in TASKS:
        raise ConfigError(
            "say what to do: maxtext data inspect [FILE] [key=value ...], prepare --out DIR [FILE] [key=value ...], "
            "throughput [FILE] [key=value ...], or index --out INDEX.json --length N FILES ..."
        )
    log.configure()
    return importlib.import_module(f"maxtext.cli.data_{args[0]}").run(args[1:])


def settled(args: list[str]) -> Any:
    """The configuration of FILE and key=value words, for as few devices as it allows: no device is
    asked for.
    """
    from maxtext.configs import load, sources
    from maxtext.configs.derive import Devices
    from maxtext.configs.load import resolve

    path, overrides = arguments.split(args)
    chosen = sources.from_overrides(overrides)
    found, _ = resolve(path, chosen, os.environ, None)
    return load(
        path,
        chosen,
        devices=Devices(*fewest_devices({key: one.value for key, one in found.items()})),
    )


def fewest_devices(values: Mapping[str, Any]) -> tuple[int, int]:
    """(devices, slices) that the sizes of the mesh and a fractional batch need; whether they fit,
    loading judges.
    """

    def size(key: str) -> float:
        try:
            value = float(values[key])
        except (TypeError, ValueError):
            return 1
        return value if value > 0 and math.isfinite(value) else 1

    sizes = {key: int(size(key)) for key in values if key.endswith("_parallelism")}
    joined = math.prod(size for key, size in sizes.items() if key.startswith("dcn_"))
    slices = max(joined, int(size("num_slices")))
    count = slices * math.prod(size for key, size in sizes.items() if key.startswith("ici_"))
    return math.lcm(
        count, Fraction(size(BATCH)).limit_denominator(MOST_DEVICES).denominator
    ), slices


def take_number(args: list[str], option: str, least: int) -> int | None:
    value = arguments.take_value(args, option)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < least:
        raise ConfigError(f"{option} takes a whole number of {least} or more, not {value!r}")
    return int(value)
