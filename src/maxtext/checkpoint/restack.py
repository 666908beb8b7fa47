"""The same state with its layers stacked otherwise: scanned, unrolled, or stacked along another
axis.

Every weight of a layer has one name whatever the layout (weights.py), and what an optimizer keeps
for a weight lies at the weight's path behind a prefix of its own. Arrays are cut and stacked on
their devices, a few at a time; an array of the old layout is let go as soon as all its layers are
taken.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.checkpoint.state import Name, join_path
from maxtext.checkpoint.weights import ParamInfo, Path
from maxtext.common.errors import UserError

Piece = tuple[Name, ParamInfo]  # the array of the old layout, and where in it


def restack_layers(
    arrays: dict[Name, jax.Array],
    old: Mapping[str, ParamInfo],
    new: Mapping[str, ParamInfo],
    wanted: Mapping[Name, jax.ShapeDtypeStruct],
) -> dict[Name, jax.Array]:
    """The arrays of one layout as those `wanted` in another, with their shardings. Takes the arrays
    out of `arrays`.
    """
    recipes = plan(arrays, old, new, wanted)
    uses: dict[Name, int] = {}
    for pieces in recipes.values():
        for source, _ in pieces:
            uses[source] = uses.get(source, 0) + 1
    stacks = {words(place.path): place.axis for place in new.values() if place.layer is not None}
    made: dict[Name, jax.Array] = {}
    # Those of one old array after each other, so that it can go.
    for name in sorted(recipes, key=lambda name: recipes[name][0][0]):
        leaf, pieces = wanted[name], recipes[name]
        parts = [cut(arrays[source], place) for source, place in pieces]
        _, stacked = split(name, stacks)
        made[name] = put(parts, None if stacked is None else stacks[stacked], leaf.sharding)
        for source, _ in pieces:
            uses[source] -= 1
            if not uses[source]:
                del arrays[source]
    return {name: made[name] for name in wanted}


def plan(
    arrays: Mapping[Name, Any],
    old: Mapping[str, ParamInfo],
    new: Mapping[str, ParamInfo],
    wanted: Mapping[Name, Any],
) -> dict[Name, list[Piece]]:
    """For each wanted array the pieces that it consists of, in order."""
    by_path: dict[Name, list[str]] = {}
    for weight, place in new.items():
        by_path.setdefault(words(place.path), []).append(weight)
    recipes: dict[Name, list[Piece]] = {}
    for name in wanted:
        prefix, path = split(name, by_path)
        if path is None:  # nothing of a weight's: a count, the step
            pieces = [(name, ParamInfo((), None, 0, (), wanted[name].dtype))]
        else:
            in_stack = sorted(by_path[path], key=lambda weight: new[weight].layer or 0)
            pieces = [((*prefix, *words(old[weight].path)), old[weight]) for weight in in_stack]
        missing = [source for source, _ in pieces if source not in arrays]
        if missing:
            raise UserError(
                f"the checkpoint has no {join_path(missing[0])}, which {join_path(name)} needs"
            )
        recipes[name] = pieces
    return recipes


def words(path: Path) -> Name:
    return tuple(map(str, path))


def split(name: Name, paths: Mapping[Name, Any]) -> tuple[Name, Name | None]:
    """(prefix, path of the weight that the name ends with or None)."""
    for start in range(len(name)):
        if name[start:] in paths:
            return name[:start], name[start:]
    return name, None


def cut(array: jax.Array, place: ParamInfo) -> jax.Array:
    # The number is an argument of the compiled slice, so that one serves all layers.
    return array if place.layer is None else take(array, place.layer, place.axis)


@partial(jax.jit, static_argnums=2)
def take(array: jax.Array, layer: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, layer, axis, keepdims=False)


def put(parts: list[jax.Array], axis: int | None, sharding: Any) -> jax.Array:
    if axis is None:
        (part,) = parts
        return jax.device_put(part, sharding)
    return stacker(axis, sharding)(*parts)


@lru_cache
def stacker(axis: int, sharding: Any) -> Callable[..., jax.Array]:
    return jax.jit(lambda *layers: jnp.stack(layers, axis), out_shardings=sharding)
