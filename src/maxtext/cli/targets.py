"""A configuration for the devices of a named target, which need not be this machine's."""

import os
from typing import Any

from maxtext.cli.train import checkpoint_model
from maxtext.common.errors import ConfigError
from maxtext.configs import ledger, sources
from maxtext.configs.derive import Devices
from maxtext.configs.load import base_values, peek_setting
from maxtext.models.configuration import load
from maxtext.sharding.topology import Target, disable_tpu_discovery, find_target


def load_for_target(
    path: str | None, overrides: list[str], name: str = "", slices: int = 0
) -> tuple[Any, Target]:
    """The target is that of `name`, else of compile_topology, else this machine."""
    layer = sources.from_overrides(overrides)
    topology = peek_setting("compile_topology", path, layer, os.environ) or ""
    if name and topology and name != topology:
        raise ConfigError(
            f"--target {name} and compile_topology={topology} name two targets: leave one out"
        )
    named = (
        str(peek_setting("compile_topology_num_slices", path, layer, os.environ))
        if topology
        else ""
    )
    target = find_target(
        name or str(topology), slices or (int(named) if named.isdigit() else 1) or 1
    )
    if target.topology:
        disable_tpu_discovery()
    try:
        devices = Devices(target.count, target.slices, platform=target.platform)
        config = load(path, layer, devices=devices, model=checkpoint_model(path, layer))
    except ConfigError as error:
        about_devices = any(
            "devices" in problem or "slices" in problem for problem in error.problems
        )
        raise ConfigError(
            *error.problems, *([f"the target is {target}"] if about_devices else [])
        ) from error
    ledger.refuse_unsupported_model(config, base_values())
    if topology and config.compile_topology_num_slices != target.slices:
        chosen = config.compile_topology_num_slices
        raise ConfigError(
            f"--slices {slices} and compile_topology_num_slices={chosen} differ: leave one out"
        )
    return config, target
