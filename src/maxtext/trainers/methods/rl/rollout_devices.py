"""The engine of rollouts on its devices: those of the trainer, or others with their own mesh."""

import math
from typing import TYPE_CHECKING

import jax

from maxtext.common.log import LOGGER
from maxtext.configs.derive import visible_devices
from maxtext.configs.mesh_sizes import size_key
from maxtext.configs.types import MaxTextConfig
from maxtext.sharding import AxisRules, make_mesh
from maxtext.trainers.methods.rl.device_split import DeviceSplit, sampler_parallelism, split_devices
from maxtext.trainers.methods.rl.rollout import RolloutEngine
from maxtext.trainers.methods.rl.weight_sync import WeightSync

if TYPE_CHECKING:
    from maxtext.trainers.run_context import RunContext

ROLLOUT_KEYS = tuple(f"rollout_{axis}_parallelism" for axis in ("data", "tensor", "expert"))


def make_rollout_engine(context: "RunContext") -> RolloutEngine:
    """On the arrays of the trainer if both have the same devices and no rollout_*_parallelism is
    set; otherwise on copies. Raises ConfigError if the keys do not fit the devices."""
    config, template = context.config, context.objective.model_template
    visible = visible_devices()
    split = split_devices(config, visible.count, visible.slices)
    sets_layout = any(config.source(key).is_user for key in ROLLOUT_KEYS)
    if split.is_shared and not sets_layout:
        if visible.count > 1:
            LOGGER.info("%d devices train and sample in turn", visible.count)
        return RolloutEngine(config, template, context.rules)
    rollout_config = sampler_config(config, split)
    devices = [jax.devices()[index] for index in split.sampler]
    rules = AxisRules.from_config(rollout_config, make_mesh(rollout_config, devices))
    LOGGER.info(
        "devices %d to %d train, %d to %d sample",
        split.trainer.start,
        split.trainer.stop - 1,
        split.sampler.start,
        split.sampler.stop - 1,
    )
    axes, weights = context.weight_axes, context.abstract_weights
    sync = WeightSync(
        rules.shardings(axes, weights), context.trained, chunk_size=config.reshard_chunk_size
    )
    return RolloutEngine(rollout_config, template, rules, sync)


def sampler_config(config: MaxTextConfig, split: DeviceSplit) -> MaxTextConfig:
    """The configuration of the run with the mesh of the sampler: its slices are copies of the
    model."""
    sizes = sampler_parallelism(config, len(split.sampler))
    slices = math.gcd(split.sampler_slices, sizes["data"])
    ici = [sizes.get(axis, 1) // (slices if axis == "data" else 1) for axis in config.mesh_axes]
    dcn = [slices if axis == "data" else 1 for axis in config.mesh_axes]
    changed: dict[str, int | list[int]] = {"ici_parallelism": ici, "dcn_parallelism": dcn}
    for axis, inside, between in zip(config.mesh_axes, ici, dcn, strict=True):
        changed |= {size_key(axis, "ici"): inside, size_key(axis, "dcn"): between}
    return config.model_copy(update=changed)
