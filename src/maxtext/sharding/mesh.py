"""The device mesh of a configuration.

Along each axis, its size is the ICI size inside a slice times the DCN size between slices.
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
    """The mesh of a configuration over the first of `devices` (default: all), as many as it
    needs: in reinforcement learning, others may sample."""
    needed = math.prod(config.ici_parallelism) * math.prod(config.dcn_parallelism)
    devices = (jax.devices() if devices is None else devices)[:needed]
    if config.using_pipeline_parallelism:
        raise ConfigError(
            "pipeline parallelism is not implemented: leave the pipeline sizes of the mesh at 1"
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
        grid = hybrid_mesh_by_order(config.ici_parallelism, config.dcn_parallelism, devices)
    return Mesh(grid, config.mesh_axes)


def hybrid_mesh_by_order(
    ici: Sequence[int], dcn: Sequence[int], devices: Sequence[jax.Device]
) -> np.ndarray:
    """A mesh of devices without slice_index: consecutive runs of devices count as slices."""
    grid = np.asarray(devices).reshape(*dcn, *ici)
    rank = len(ici)
    interleaved = [
        axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair
    ]
    return grid.transpose(interleaved).reshape([d * i for d, i in zip(dcn, ici, strict=True)])
