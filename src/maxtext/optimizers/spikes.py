"""Skips the updates of steps whose loss or gradient norm spikes.

Two windows hold the last skip_step_interval values of the loss and of the raw gradient norm (before
clipping). A step is a spike when either value exceeds

    mean + skip_step_scaling_factor * standard deviation (unbiased)

of the values recorded *before* it. The test starts when half a window, and at least two values,
have been recorded. A spike changes neither the weights nor the inner optimizer's state (so the
schedule does not advance), but it is recorded: a lasting change of level is accepted once it fills
the window.

A non-finite loss or norm is always a spike, from the first step on, and neither value is recorded,
since a NaN in the window would disable the protection until it leaves.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxtext.common.errors import ConfigError
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig


class SpikeState(NamedTuple):
    losses: jax.Array  # ring buffer, float32
    raw_grad_norms: jax.Array
    recorded: jax.Array  # number of values recorded so far, int32
    skipped: jax.Array  # whether the last update was skipped
    inner_state: Tree


def skip_spikes(
    config: MaxTextConfig, inner: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner`; `update` then requires the keyword arguments loss and raw_grad_norm."""
    interval, factor = config.skip_step_interval, config.skip_step_scaling_factor
    if interval < 2:
        raise ConfigError(
            f"skip_step_interval={interval} is too short for skip_step_on_spikes: "
            "a standard deviation needs at least 2 steps"
        )

    def init(params: Tree) -> SpikeState:
        window = jnp.zeros(interval, jnp.float32)
        return SpikeState(
            window, window, jnp.zeros([], jnp.int32), jnp.zeros([], jnp.bool_), inner.init(params)
        )

    def update(
        grads: Tree,
        state: SpikeState,
        params: Tree | None = None,
        *,
        loss: jax.Array,
        raw_grad_norm: jax.Array,
        **extra_args: Any,
    ) -> tuple[Tree, SpikeState]:
        loss, norm = jnp.asarray(loss, jnp.float32), jnp.asarray(raw_grad_norm, jnp.float32)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        is_ready = (2 * state.recorded >= interval) & (state.recorded >= 2)
        spike = _exceeds(loss, state.losses, state.recorded, factor)
        spike |= _exceeds(norm, state.raw_grad_norms, state.recorded, factor)
        skipped = ~finite | (is_ready & spike)

        updates, inner_state = inner.update(
            grads, state.inner_state, params, loss=loss, raw_grad_norm=norm, **extra_args
        )
        slot = state.recorded % interval
        return jax.tree.map(
            lambda new: jnp.where(skipped, jnp.zeros_like(new), new), updates
        ), SpikeState(
            losses=jnp.where(finite, state.losses.at[slot].set(loss), state.losses),
            raw_grad_norms=jnp.where(
                finite, state.raw_grad_norms.at[slot].set(norm), state.raw_grad_norms
            ),
            recorded=jnp.where(finite, optax.safe_increment(state.recorded), state.recorded),
            skipped=skipped,
            inner_state=jax.tree.map(
                lambda old, new: jnp.where(skipped, old, new), state.inner_state, inner_state
            ),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _exceeds(value: jax.Array, window: jax.Array, recorded: jax.Array, factor: float) -> jax.Array:
    filled = jnp.arange(window.size) < recorded
    count = jnp.minimum(recorded, window.size)
    # The lower bounds avoid a division by zero for an empty window, whose result is not used.
    mean = jnp.sum(window, where=filled) / jnp.maximum(count, 1)
    variance = jnp.sum(jnp.square(window - mean), where=filled) / jnp.maximum(count - 1, 1)
    return value > mean + factor * jnp.sqrt(variance)
