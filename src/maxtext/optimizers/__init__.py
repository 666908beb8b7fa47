"""Level 2: gradients in, updates out. Schedules, clipping, update rules and spike protection, on
Optax.

`make_optimizer(config, axis_names)` gives the one object that a trainer needs;
`learning_rate_schedule(config)` the rate that it uses, for the log; `clip_by_global_norm` comes
before it, in the train step, which needs the raw norm too.
"""

from maxtext.optimizers.build import make_optimizer, trainable_parameters
from maxtext.optimizers.clipping import clip_by_global_norm, global_norm
from maxtext.optimizers.paths import path_names
from maxtext.optimizers.schedules import learning_rate_schedule

__all__ = [
    "clip_by_global_norm", "global_norm", "learning_rate_schedule", "make_optimizer", "path_names",
    "trainable_parameters",
]  # fmt: skip
