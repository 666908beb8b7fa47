"""Arrays kept as small integers with scales, and products with them: x is about values · scale.

Quantization is symmetric: a group of numbers shares a scale, its largest magnitude over 127 (int8)
or 7 (int4), and each number is rounded to the nearest multiple of it; so it moves by half a scale
at most.

A kernel has one scale in int8 for all that a product adds up into one output: the product takes the
integers, and its result is scaled. Fifteen steps are too coarse for that, so in int4 neighbouring
numbers among them share a scale in groups of up to 128; then the product takes the kernel in
floats, made when it is used.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.gpu import is_nvidia, target_capability
from maxtext.kernels.decode import small_batch_matmul as decode_matmul

LARGEST = {"int8": 127, "int4": 7}  # the same on both sides of zero
GROUP = {"int8": None, "int4": 128}  # how many numbers of a sum share a scale at most; None: all
SMALLEST_GROUP = 32  # with less, scales would take much of the room that int4 saves


def quantize(x: jax.Array, axes: tuple[int, ...], dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Values of `dtype`, int8 or int4, and float32 scales: one for all numbers along `axes`, which
    stay with size 1.
    """
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True) / LARGEST[jnp.dtype(dtype).name]
    # Zeros, and what is too small to divide by: with a scale of one, they round to zero.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    return jnp.round(x / scale).astype(dtype), scale


def dequantize(values: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """The numbers that integers and their scales, which must broadcast, stand for; rounded once, to
    `dtype`.
    """
    return (values.astype(jnp.float32) * scale).astype(dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclass(frozen=True)
class Quantized:
    """A kernel as integers. It stands where an array stood: `astype` gives the array.

    Along each dimension, `scale` has as many entries as there are groups of neighbours that share
    one.
    """

    values: Any
    scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """In which it is kept."""
        return self.values.dtype

    def __getitem__(self, index: EllipsisType) -> "Quantized":
        """Itself, as a parameter's `kernel[...]` asks for it."""
        if index is not Ellipsis:
            raise TypeError("a quantized kernel is used as a whole: kernel[...]")
        return self

    def astype(self, dtype: Any) -> jax.Array:
        groups = self.scale.shape
        apart = self.values.reshape(in_groups(self.shape, groups))
        return dequantize(apart, self.scale.reshape(in_groups(groups, groups)), dtype).reshape(
            self.shape
        )

    def scaled_after(self, contracted: Sequence[int]) -> bool:
        """Whether all that a product over these dimensions adds up has one scale, so that its
        result can be scaled.
        """
        return all(self.scale.shape[axis] == 1 for axis in contracted)


def in_groups(shape: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    """Each dimension as two: groups, and what is in a group."""
    return tuple(
        part for size, count in zip(shape, groups, strict=True) for part in (count, size // count)
    )


def quantized(x: jax.Array, contracted: Sequence[int], dtype: Any) -> Quantized:
    """A kernel whose product adds up over the `contracted` dimensions."""
    groups = tuple(groups_of(x.shape, contracted, GROUP[jnp.dtype(dtype).name]))
    inner = tuple(range(1, 2 * x.ndim, 2))
    values, scale = quantize(x.reshape(in_groups(x.shape, groups)), inner, dtype)
    return Quantized(values.reshape(x.shape), scale.reshape(groups))


def groups_of(shape: Sequence[int], contracted: Sequence[int], most: int | None) -> list[int]:
    """How many groups each dimension has: as few as possible with `most` numbers in each, last
    dimensions first.
    """
    groups = [1 if axis in contracted else size for axis, size in enumerate(shape)]
    if most is None or math.prod(shape[axis] for axis in contracted) <= most:
        return groups
    room = most
    for axis in sorted(contracted, reverse=True):
        size = max(part for part in range(1, room + 1) if shape[axis] % part == 0)
        groups[axis], room = shape[axis] // size, room // size if size == shape[axis] else 1
    in_one = math.prod(shape[axis] // groups[axis] for axis in contracted)
    if in_one < SMALLEST_GROUP:
        return groups_of(shape, contracted, None)
    return groups


def products(
    x: jax.Array, kernels: Sequence[Any], rank: int, dtype: Any, platform: str | None = None
) -> list[jax.Array]:
    """x [..., inputs] times each kernel [inputs, outputs], an array or Quantized; `rank`: how many
    dims inputs have.

    `platform`: of the one device that computes it; None: there are several, or any will do.
    """
    outer, inputs = x.shape[: x.ndim - rank], tuple(range(rank))
    rows, depth = math.prod(outer), math.prod(x.shape[x.ndim - rank :])
    if (
        platform == "gpu"
        and is_nvidia(target_capability())
        and all(
            isinstance(kernel, Quantized)
            and kernel.dtype == jnp.int8
            and kernel.scaled_after(inputs)
            and decode_matmul.supports(rows, depth, math.prod(kernel.shape[rank:]), dtype)
            for kernel in kernels
        )
    ):
        flat = [kernel.values.reshape(depth, -1).T for kernel in kernels]
        found = decode_matmul.small_batch_matmul(x.astype(dtype).reshape(rows, depth), flat)
        sums = [
            y.reshape(*outer, *kernel.shape[rank:])
            for y, kernel in zip(found, kernels, strict=True)
        ]
        return [scaled(y, kernel, rank, dtype) for y, kernel in zip(sums, kernels, strict=True)]
    return [product(x, kernel, rank, dtype) for kernel in kernels]


def product(x: jax.Array, kernel: Any, rank: int, dtype: Any) -> jax.Array:
    inputs = tuple(range(rank))
    dimensions = ((tuple(range(x.ndim - rank, x.ndim)), inputs), ((), ()))
    if not (isinstance(kernel, Quantized) and kernel.scaled_after(inputs)):
        return jax.lax.dot_general(x, kernel.astype(dtype), dimensions)
    # Sums of integers can be too large for float16, and are rounded once only if they are scaled in
    # float32.
    y = jax.lax.dot_general(
        x, kernel.values.astype(dtype), dimensions, preferred_element_type=jnp.float32
    )
    return scaled(y, kernel, rank, dtype)


def scaled(y: jax.Array, kernel: Quantized, rank: int, dtype: Any) -> jax.Array:
    return (y * kernel.scale.reshape(kernel.scale.shape[rank:])).astype(dtype)
