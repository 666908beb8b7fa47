"""What a layer keeps of the tokens before, so that a new token runs alone.

A mixer that is called with its cache (`LayerInputs.cache`) reads it, and reports it extended as "cache". Keys and the
like are kept in rings: the token at position p is at place p mod places, with its position beside it, so a window needs
no more places than it sees, and who is visible follows from positions alone, whatever order they lie in. Position -1 is
no token: such queries are padding, and such places are empty.

Shapes: B batch, S new tokens, T places, and what one token has.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.kernels.attention import Visibility
from maxtext.layers.inputs import Cache, LayerInputs
from maxtext.sharding import constrain

POSITION = "position"
# Logical axes by the number of dimensions: [B, T], [B, T, D] of what all heads share, [B, T, K, D].
AXES: dict[int, tuple[str | None, ...]] = {
    2: ("cache_batch", "cache_sequence"),
    3: ("cache_batch", "cache_sequence", "cache_kv"),
    4: ("cache_batch", "cache_sequence", "cache_heads", "cache_kv"),
}


def ring(batch: int, places: int, dtype: Any, **sizes: tuple[int, ...]) -> Cache:
    """An empty ring for named arrays, of which one token has so much."""
    arrays = {name: jnp.zeros((batch, places, *size), dtype) for name, size in sizes.items()}
    return arrays | {POSITION: jnp.full((batch, places), -1, jnp.int32)}


def extended(inputs: LayerInputs, new: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], Cache]:
    """What the queries of new tokens may look at, with its positions, and the ring with the new tokens in it.

    A single token is written first and looks at the ring itself, which costs no copy; it takes the place of the one
    that just left the window. Several look at the ring as it was and at each other. Those of a `fresh` row, which has
    nothing before them, look at each other alone.
    """
    assert inputs.cache is not None
    cache, positions = inputs.cache, inputs.positions
    places = cache[POSITION].shape[1]
    # Of more tokens than places, the last are kept; out of bounds means not written.
    kept = (positions >= 0) & (positions > positions.max(axis=1, keepdims=True) - places)
    place = jnp.where(kept, positions % places, places)
    rows = jnp.arange(positions.shape[0])[:, None]
    new = new | {POSITION: positions}
    written = {name: laid_out(cache[name].at[rows, place].set(new[name].astype(cache[name].dtype), mode="drop"))
               for name in new}  # fmt: skip
    if inputs.fresh:
        return new, written
    if positions.shape[1] == 1:
        return {name: array.astype(new[name].dtype) for name, array in written.items()}, written
    joined = {name: jnp.concatenate([cache[name].astype(new[name].dtype), new[name]], axis=1) for name in new}
    return joined, written


def laid_out(array: jax.Array) -> jax.Array:
    return constrain(array, *AXES[array.ndim])


def places(visibility: Visibility, length: int) -> int:
    """How many tokens a query of a sequence up to `length` may see at most."""
    return min(length, visibility.window or length, visibility.chunk or length)


def sight(visibility: Visibility, inputs: LayerInputs, seen: dict[str, jax.Array]) -> dict[str, Any]:
    """Who sees whom, as attention is told: by the order of the row, or by positions where a cache holds the keys."""
    if inputs.cache is not None and not inputs.fresh:
        return {
            "visibility": visibility,
            "q_positions": inputs.positions,
            "k_positions": seen[POSITION],
            "q_segments": (inputs.positions >= 0).astype(jnp.int32),
            "k_segments": (seen[POSITION] >= 0).astype(jnp.int32),
        }
    # Windows may be measured in the row; chunks start anew with each document.
    by_chunk = inputs.positions if visibility.chunk else None
    return {
        "visibility": replace(visibility, order=inputs.order),
        "q_positions": by_chunk,
        "k_positions": by_chunk,
        "q_segments": inputs.segments,
        "k_segments": inputs.segments,
    }


def backend_of(backend: str, inputs: LayerInputs) -> str:
    """Keys in a cache lie in any order, which only one back end takes."""
    return backend if inputs.cache is None or inputs.fresh else "dot_product"
