"""Adam and the dtypes of its state.

- adamw: Optax's Adam. m and v decay by b1 and b2 and are bias-corrected when they are used.
- adam_pax: the correction is part of the decay, decay_t = b (1 - b^(t-1)) / (1 - b^t), so that the
  stored moments are unbiased (at t = 1 the decay is 0 and m = g).

Both return m / (sqrt(v + eps_root) + eps). The caller applies weight decay and learning rate.
"""

import jax
import jax.numpy as jnp
import optax

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig


def scale_by_adamw(config: MaxTextConfig) -> optax.GradientTransformation:
    rule = optax.scale_by_adam(
        config.adam_b1, config.adam_b2, config.adam_eps, config.adam_eps_root
    )
    return in_float32(per_leaf(rule), config)


def per_leaf(rule: optax.GradientTransformation) -> optax.GradientTransformation:
    """Adam whose update is traced once per shape: a model has hundreds of leaves."""

    @jax.jit
    def update_leaf(
        grad: jax.Array, mu: jax.Array, nu: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, ...]:
        update, state = rule.update(grad, optax.ScaleByAdamState(count, mu, nu))
        return update, state.mu, state.nu

    def update(
        grads: Tree, state: optax.ScaleByAdamState, params: Tree | None = None
    ) -> tuple[Tree, optax.ScaleByAdamState]:
        results = jax.tree.map(
            lambda *leaves: update_leaf(*leaves, state.count), grads, state.mu, state.nu
        )
        structure: jax.tree_util.PyTreeDef = jax.tree.structure(grads)
        updates, mu, nu = (
            structure.unflatten(leaves)
            for leaves in zip(*structure.flatten_up_to(results), strict=True)
        )
        return updates, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(rule.init, update)


def scale_by_adam_pax(config: MaxTextConfig) -> optax.GradientTransformation:
    def init(params: Tree) -> optax.ScaleByAdamState:
        count = jnp.zeros([], jnp.int32)
        return optax.ScaleByAdamState(
            count, optax.tree.zeros_like(params), optax.tree.zeros_like(params)
        )

    def update(
        grads: Tree, state: optax.ScaleByAdamState, params: Tree | None = None
    ) -> tuple[Tree, optax.ScaleByAdamState]:
        count = optax.safe_increment(state.count)
        squares = jax.tree.map(jnp.square, grads)
        mu = _unbiased_average(grads, state.mu, config.adam_b1, count)
        nu = _unbiased_average(squares, state.nu, config.adam_b2, count)
        updates = jax.tree.map(
            lambda m, v: m / (jnp.sqrt(v + config.adam_eps_root) + config.adam_eps), mu, nu
        )
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return in_float32(optax.GradientTransformation(init, update), config)


def _unbiased_average(values: Tree, average: Tree, decay: float, count: jax.Array) -> Tree:
    corrected = decay * (1 - decay ** (count - 1)) / (1 - decay**count)
    return jax.tree.map(
        lambda value, old: corrected * old + (1 - corrected) * value, values, average
    )


def cast_to_float32() -> optax.GradientTransformation:
    """SGD without momentum: the gradient, in float32 like the other updates."""
    return optax.stateless(lambda grads, params: optax.tree.cast(grads, jnp.float32))


def in_float32(
    rule: optax.GradientTransformation, config: MaxTextConfig
) -> optax.GradientTransformation:
    """Compute a rule with a first moment `mu` in float32, and store `mu` in mu_dtype.

    In Optax the state takes the dtype of the gradients at the first update, so that bfloat16
    weights with float32 gradients would change the dtypes of the state, and a compiled step would
    not accept it. Here `mu` always has mu_dtype (default: the parameter's dtype) and all else is
    float32, since a second moment with b2 near 1 never decays in bfloat16: a step changes it by
    less than its resolution.
    """
    mu_dtype = jnp.dtype(config.mu_dtype) if config.mu_dtype else None

    def init(params: Tree) -> Tree:
        state = rule.init(optax.tree.cast(params, jnp.float32))
        return state._replace(
            mu=jax.tree.map(lambda mu, param: mu.astype(mu_dtype or param.dtype), state.mu, params)
        )

    def update(grads: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Tree]:
        float_state = state._replace(mu=optax.tree.cast(state.mu, jnp.float32))
        float_grads = optax.tree.cast(grads, jnp.float32)
        updates, new = rule.update(float_grads, float_state, params)
        return updates, new._replace(
            mu=jax.tree.map(lambda mu, old: mu.astype(old.dtype), new.mu, state.mu)
        )

    return optax.GradientTransformation(init, update)
