"""Update rules of the Adam kind, and the number formats of their state.

adamw     Optax's Adam: m and v decay by b1 and b2 and are bias-corrected when used. adam_pax  the
correction is in the decay itself, decay_t = b (1 - b^(t-1)) / (1 - b^t), so the stored moments are
always
          unbiased (at t = 1 the decay is 0 and m = g) and are used as they are.

Both give m / (sqrt(v + eps_root) + eps). Weight decay and learning rate are applied by the caller.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxtext.configs.types import MaxTextConfig


def scale_by_adamw(config: MaxTextConfig) -> optax.GradientTransformation:
    rule = optax.scale_by_adam(
        config.adam_b1, config.adam_b2, config.adam_eps, config.adam_eps_root
    )
    return computed_in_float32(leaf_by_leaf(rule), config)


def leaf_by_leaf(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """An Adam whose update is traced once for weights of one shape, and called: a model has
    hundreds.
    """

    @jax.jit
    def one(
        grad: jax.Array, mu: jax.Array, nu: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, ...]:
        update, state = rule.update(grad, optax.ScaleByAdamState(count, mu, nu))
        return update, state.mu, state.nu

    def update(
        grads: Any, state: optax.ScaleByAdamState, params: Any = None
    ) -> tuple[Any, optax.ScaleByAdamState]:
        found = jax.tree.map(lambda *leaves: one(*leaves, state.count), grads, state.mu, state.nu)
        tree: Any = jax.tree.structure(grads)
        updates, mu, nu = (
            tree.unflatten(part) for part in zip(*tree.flatten_up_to(found), strict=True)
        )
        return updates, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(rule.init, update)


def scale_by_adam_pax(config: MaxTextConfig) -> optax.GradientTransformation:
    def init(params: Any) -> optax.ScaleByAdamState:
        count = jnp.zeros([], jnp.int32)
        return optax.ScaleByAdamState(
            count, optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        )

    def update(
        grads: Any, state: optax.ScaleByAdamState, params: Any = None
    ) -> tuple[Any, optax.ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        squares = jax.tree.map(jnp.square, grads)
        mu = _unbiased_average(grads, state.mu, config.adam_b1, count)
        nu = _unbiased_average(squares, state.nu, config.adam_b2, count)
        updates = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v + config.adam_eps_root) + config.adam_eps), mu, nu
        )
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return computed_in_float32(optax.GradientTransformation(init, update), config)


def _unbiased_average(values: Any, average: Any, decay: float, count: jax.Array) -> Any:
    decay_now = decay * (1 - decay ** (count - 1)) / (1 - decay**count)
    return jax.tree.map(
        lambda value, old: decay_now * old + (1 - decay_now) * value, values, average
    )


def scale_by_nothing() -> optax.GradientTransformation:
    """Plain gradient descent, whose updates are float32 like those of the other rules."""
    return optax.stateless(lambda grads, params: optax.tree.cast(grads, jnp.float32))


def computed_in_float32(
    rule: optax.GradientTransformation, config: MaxTextConfig
) -> optax.GradientTransformation:
    """A rule whose state has a first moment `mu`: arithmetic in float32, `mu` stored in mu_dtype.

    Optax lets the state take the gradients' type at the first update, so bfloat16 weights with
    float32 gradients would change the state's types, and a compiled step would no longer fit. Here
    they stay as they are at the start: `mu` in mu_dtype (empty: the parameter's own), all else
    float32, since a second moment with b2 near 1 never falls in bfloat16 (each step changes it by
    less than it can resolve).
    """
    mu_dtype = jnp.dtype(config.mu_dtype) if config.mu_dtype else None

    def init(params: Any) -> Any:
        state = rule.init(optax.tree.cast(params, jnp.float32))
        return state._replace(
            mu=jax.tree.map(lambda mu, param: mu.astype(mu_dtype or param.dtype), state.mu, params)
        )

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        wide = state._replace(mu=optax.tree.cast(state.mu, jnp.float32))
        updates, new = rule.update(optax.tree.cast(grads, jnp.float32), wide, params)
        return updates, new._replace(
            mu=jax.tree.map(lambda mu, old: mu.astype(old.dtype), new.mu, state.mu)
        )

    return optax.GradientTransformation(init, update)
