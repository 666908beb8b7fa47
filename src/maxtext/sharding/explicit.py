"""shard_mode=explicit: weights, residuals, gradients and updates carry their sharding in their
types.

JAX then checks shardings wherever two of these arrays meet, and the compiler chooses nothing there.
Inside a layer, the embedding, and the head with its loss the compiler still chooses, guided by the
constraints there: `auto_sharded`. With shard_mode=auto these functions have no effect.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from maxtext.common.types import Tree
from maxtext.sharding.rules import Axes, AxisRules, active_rules, use_rules


def with_explicit_sharding(function: Callable[..., Tree], shardings: Tree) -> Callable[..., Tree]:
    """`function` with shardings in types; `shardings` are those of its arguments.

    To be traced under `jax.set_mesh`.
    """

    def is_sharding(leaf: object) -> bool:
        return isinstance(leaf, NamedSharding)

    specs = jax.tree.map(lambda sharding: sharding.spec, shardings, is_leaf=is_sharding)
    return jax.sharding.explicit_axes(function, in_sharding=specs)


def is_explicit() -> bool:
    """Whether the function being traced has shardings in its types."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.are_all_axes_explicit


def auto_sharded(
    function: Callable[..., Tree], *args: Tree, out_axes: Axes, has_aux: bool = False
) -> Tree:
    """function(*args), inside which the compiler chooses shardings.

    `out_axes` are the logical axes of all arrays of the result. With `has_aux` the function returns
    (result, aux), and aux is replicated.
    """
    rules = active_rules()
    if not is_explicit() or rules is None:
        return function(*args)
    shapes = result_shapes(rules, function, args)
    result, aux = shapes if has_aux else (shapes, None)
    specs: Tree = jax.tree.map(lambda leaf: rules.spec(out_axes, leaf.shape), result)
    if has_aux:
        specs = specs, jax.tree.map(lambda leaf: PartitionSpec(), aux)
    return jax.sharding.auto_axes(function, out_sharding=specs)(*args)


def result_shapes(rules: AxisRules, function: Callable[..., Tree], args: Tree) -> Tree:
    """Shapes and dtypes of function(*args), traced on a mesh without explicit axes."""
    with use_rules(None), jax.sharding.use_abstract_mesh(rules.mesh.abstract_mesh):
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)
        return jax.eval_shape(function, *abstract)


def auto_sharded_like_first(function: Callable[..., Tree], *args: Tree) -> Tree:
    """function(*args), inside which the compiler chooses shardings.

    The result is a tree of the structure and the shardings of the first argument.
    """
    if not is_explicit():
        return function(*args)
    specs = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding.spec, args[0])
    return jax.sharding.auto_axes(function, out_sharding=specs)(*args)


def zeros_like(tree: Tree) -> Tree:
    """Zeros with the shapes, dtypes and shardings of a tree of abstract arrays."""
    if not is_explicit():
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
    return jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec), tree
    )
