"""The learning rate as a function of the step.

Over S = learning_rate_schedule_steps (-1: steps), with L = learning_rate and F = L *
learning_rate_final_fraction:

    warmup    W = int(S * warmup_steps_fraction) steps     L * t / W, so the first step has rate 0
    cosine    the other S - W steps, u = (t - W)/(S - W)   F + (L - F) * (1 + cos(pi * u)) / 2
    wsd       constant L until the last D = int(S * wsd_decay_steps_fraction) steps, then from L to
              F with u = (t-(S-D))/D: linear L + (F - L) * u, or the cosine above
    after     t >= S                                       0

Steps count from 0. F is reached at step S, when training by this schedule is over. Phases without
steps are omitted. The schedule takes Python numbers, or tracers under jit.
"""

from collections.abc import Callable
from itertools import accumulate

import jax
import optax
from jax.typing import ArrayLike

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig

Schedule = Callable[[ArrayLike], jax.Array]


def schedule_steps(config: MaxTextConfig) -> int:
    """The length of the schedules of a run: learning_rate_schedule_steps, or steps."""
    steps = config.learning_rate_schedule_steps
    return config.steps if steps == -1 else steps


def learning_rate_schedule(config: MaxTextConfig) -> Schedule:
    """The learning rate as a function of the step, counted from 0."""
    total = schedule_steps(config)
    if total < 1:
        raise ConfigError(
            f"the learning-rate schedule has {total} steps: "
            "set steps or learning_rate_schedule_steps"
        )
    warmup = int(total * config.warmup_steps_fraction)
    ramp = optax.linear_schedule(0.0, config.learning_rate, max(warmup, 1))
    phases = [(warmup, ramp), *_after_warmup(config, total, warmup)]
    # Optax has no schedules of length 0: they are built with length 1 and dropped here.
    phases = [(length, schedule) for length, schedule in phases if length > 0]
    ends = list(accumulate(length for length, _ in phases))
    return optax.join_schedules(
        [*(schedule for _, schedule in phases), optax.constant_schedule(0.0)], ends
    )


def _after_warmup(
    config: MaxTextConfig, total: int, warmup: int
) -> list[tuple[int, optax.Schedule]]:
    """(length, schedule) of each phase; a schedule counts steps from its own start."""
    if config.lr_schedule_type == "cosine":
        return [(total - warmup, _decay(config, "cosine", total - warmup))]
    decay = int(total * config.wsd_decay_steps_fraction)
    if warmup + decay > total:
        raise ConfigError(
            f"warm-up ({warmup} steps) and decay ({decay} steps) do not fit in a schedule of "
            f"{total} steps: lower warmup_steps_fraction or wsd_decay_steps_fraction"
        )
    return [
        (total - warmup - decay, optax.constant_schedule(config.learning_rate)),
        (decay, _decay(config, config.wsd_decay_style, decay)),
    ]


def _decay(config: MaxTextConfig, style: str, length: int) -> optax.Schedule:
    length = max(length, 1)
    if style == "cosine":
        return optax.cosine_decay_schedule(
            config.learning_rate, length, config.learning_rate_final_fraction
        )
    final = config.learning_rate * config.learning_rate_final_fraction
    return optax.linear_schedule(config.learning_rate, final, length)
