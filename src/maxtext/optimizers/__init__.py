"""Level 2: learning-rate schedules, clipping, optimizers and spike protection, on Optax.

`build_optimizer(config, axis_names)` returns the optimizer of a run, `learning_rate_schedule` its
learning rate, for the log. The train step calls `clip_by_global_norm` itself, because it also
needs the raw norm.
"""

from maxtext.optimizers.build import (
    build_optimizer,
    match_patterns,
    parameter_paths,
    trainable_mask,
)
from maxtext.optimizers.clipping import clip_by_global_norm, clip_mla, global_norm
from maxtext.optimizers.schedules import learning_rate_schedule, schedule_steps

__all__ = [
    "build_optimizer",
    "clip_by_global_norm",
    "clip_mla",
    "global_norm",
    "learning_rate_schedule",
    "match_patterns",
    "parameter_paths",
    "schedule_steps",
    "trainable_mask",
]
