"""The device mesh: ICI sizes inside a slice times DCN sizes between slices, one mesh axis a
name.
"""

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig


def make_mesh(config: MaxTextConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a configuration over this run's devices (all of them unless given)."""
    devices = jax.devices() if devices is None else devices
    if config.using_pipeline_parallelism:
        raise ConfigError(
            "pipeline parallelism is not in this version yet: leave the pipeline sizes of the mesh at 1"
        )
    split = config.allow_split_physical_axes
    if math.prod(config.dcn_parallelism) == 1:
        grid = mesh_utils.create_device_mesh(
            config.ici_parallelism, devices=devices, allow_split_physical_axes=split
        )
    elif all(hasattr(device, "slice_index") for device in devices):
        grid = mesh_utils.create_hybrid_device_mesh(
            config.ici_parallelism,
            config.dcn_parallelism,
            devices=devices,
            allow_split_physical_axes=split,
        )
    else:
        grid = by_order(config.ici_parallelism, config.dcn_parallelism, devices)
    return Mesh(grid, config.mesh_axes)


def by_order(ici: Sequence[int], dcn: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Devices that know no slices, cut into consecutive runs as if each were one."""
    grid = np.asarray(devices).reshape(*dcn, *ici)
    rank = len(ici)
    interleaved = [
        axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair
    ]
    return grid.transpose(interleaved).reshape([d * i for d, i in zip(dcn, ici, strict=True)])
