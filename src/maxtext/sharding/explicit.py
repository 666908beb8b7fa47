"""shard_mode=explicit: weights, what passes between layers, gradients and updates carry their
layout in their types.

JAX then checks that layouts fit wherever two of them meet, and nothing there is left to the
compiler. Inside a layer, the embedding, and the head with its loss the compiler chooses as ever, by
the constraints that stand there: `by_compiler`. In shard_mode=auto none of this does anything.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.sharding.rules import Axes, active_rules, use_rules


def explicitly(function: Callable[..., Any], shardings: Any) -> Callable[..., Any]:
    """`function` with layouts in its types; `shardings` are its arguments'. To be traced under
    `jax.set_mesh`.
    """

    def is_sharding(leaf: Any) -> bool:
        return isinstance(leaf, NamedSharding)

    specs = jax.tree.map(lambda sharding: sharding.spec, shardings, is_leaf=is_sharding)
    return jax.sharding.explicit_axes(function, in_sharding=specs)


def inside() -> bool:
    """Whether what is traced now has layouts in its types."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.are_all_axes_explicit


def by_compiler(function: Callable[..., Any], *arguments: Any, axes: Axes) -> Any:
    """function(*arguments) -> (x, rest): inside, the compiler lays out. x leaves by logical `axes`,
    the rest whole.
    """
    rules = active_rules()
    if not inside() or rules is None:
        return function(*arguments)
    automatic = rules.mesh.abstract_mesh  # whose axes have no place in types
    with (
        use_rules(None),
        jax.sharding.use_abstract_mesh(automatic),
    ):  # shapes alone: nothing is laid out
        plain = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
        x, rest = jax.eval_shape(function, *plain)
    specs = rules.spec(axes, x.shape), jax.tree.map(lambda leaf: PartitionSpec(), rest)
    return jax.sharding.auto_axes(function, out_sharding=specs)(*arguments)


def as_first(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), a tree like the first argument and laid out like it; inside, the
    compiler lays out.
    """
    if not inside():
        return function(*arguments)
    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, arguments[0])
    return jax.sharding.auto_axes(function, out_sharding=specs)(*arguments)


def zeros_like(tree: Any) -> Any:
    """Zeros for a tree of abstract arrays, laid out like them."""
    if not inside():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec), tree
    )
