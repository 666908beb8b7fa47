"""Quantized weights in fp8, int8, int4, nf4 and mxfp4, for inference and as the frozen weights
under adapters (QLoRA). `weight_matmul.py` multiplies by them, `decode/experts.py` by experts.

In int8 and int4, x ≈ qvalue · scale. Quantization is symmetric: the values of a group share a
scale, their largest magnitude over 127 (int8) or 7 (int4), and each value is rounded to the nearest
multiple of it: the error is at most half a scale.

In fp8 (e4m3), x ≈ qvalue · scale, and the scale is the least power of two with which the largest
magnitude is at most 448. Values above a 2^-15 of it have a relative error of at most 1/16.

In nf4 (QLoRA, arXiv 2305.14314), x ≈ level[qvalue] · scale with 16 levels in [-1, 1], which are
quantiles of a normal distribution, and the scale is the largest magnitude of the group.

In mxfp4 (OCP Microscaling Formats 1.0), x ≈ qvalue · 2^(scale - 127) with e2m1 values, for groups
of 32 inputs: gpt-oss has its experts in it. The scale is the least power of two with which the
largest magnitude rounds to at most 6. Weights that are in mxfp4 already keep their values.

An fp8 or int8 weight has one scale for each output. The matmul takes the codes, and its result is
scaled. Sixteen levels are too coarse for that, so in int4 and nf4 groups of neighbouring inputs
share a scale. Four-bit values are of JAX's int4 and uint4, which some devices store in a byte each;
a packed weight has two in a byte.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from maxtext.kernels.fp8.quantize import E4M3, scale_from_amax

FP8, INT8, INT4, NF4, MXFP4 = "fp8", "int8", "int4", "nf4", "mxfp4"  # formats
STORAGE = {FP8: E4M3, INT8: jnp.int8, INT4: jnp.int4, NF4: jnp.uint4}
MAX_QVALUE = {INT8: 127, INT4: 7}  # symmetric about zero
# Inputs that share a scale at most; None: all.
MAX_GROUP: dict[str, int | None] = {FP8: None, INT8: None, INT4: 128, NF4: 64}
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# By the three lower bits of a code; the highest is the sign.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_GROUP, MXFP4_BIAS = 32, 127
PACKED_OFFSET = 8  # packed int4 values are stored from 1 to 15
MIN_GROUP = 32  # with smaller groups, scales would take much of the memory that int4 saves


def quantize(x: jax.Array, axes: tuple[int, ...], dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """qvalue in `dtype`, e4m3, int8 or int4, and float32 scales: one for all values along `axes`,
    which keep size 1.
    """
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    if jnp.dtype(dtype) == E4M3:
        scale = scale_from_amax(amax, E4M3)
        return (x / scale).astype(E4M3), scale
    scale = amax / MAX_QVALUE[jnp.dtype(dtype).name]
    # Zeros, and values too small to divide by, round to zero with a scale of one.
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    return jnp.round(x / scale).astype(dtype), scale


def quantize_nf4(x: jax.Array, axes: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """uint4 indices of the nearest levels, and float32 scales, as `quantize` returns them."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=axes, keepdims=True)
    scale = jnp.where(scale < jnp.finfo(jnp.float32).tiny, 1.0, scale)
    levels = jnp.asarray(NF4_LEVELS, jnp.float32)
    boundaries = (levels[1:] + levels[:-1]) / 2
    return jnp.searchsorted(boundaries, x / scale).astype(jnp.uint4), scale


def quantize_mxfp4(x: jax.Array) -> "QuantizedWeight":
    """x [..., K, N] with K a multiple of 32. Ties between two codes go to the even one."""
    *outer, depth, columns = x.shape
    groups = x.astype(jnp.float32).swapaxes(-1, -2)
    groups = groups.reshape(*outer, columns, depth // MXFP4_GROUP, MXFP4_GROUP)
    amax = jnp.max(jnp.abs(groups), axis=-1)
    # The exponent field of amax / 7 · 4 is that of the power with which amax rounds to 6 at most.
    bits = jax.lax.bitcast_convert_type(amax * np.float32(4 / 7), jnp.int32)
    is_exact = bits << 9 == 0
    exponent = (bits >> 23) - 1 - is_exact
    exponent = jnp.clip(exponent, 1, 254)
    unit = jax.lax.bitcast_convert_type(exponent << 23, jnp.float32)
    magnitude = jnp.abs(groups / unit[..., None])
    # e2m1 values are multiples of 0.5 up to 2, of 1 up to 4, and of 2 beyond.
    step = jnp.where(magnitude < 2, 0.5, jnp.where(magnitude < 4, 1.0, 2.0))
    rounded = jnp.minimum(jnp.round(magnitude / step) * step, 6.0)
    codes = jnp.searchsorted(jnp.asarray(E2M1_MAGNITUDES), rounded).astype(jnp.uint8)
    codes |= jnp.signbit(groups).astype(jnp.uint8) << 3
    return QuantizedWeight(
        pack(codes.reshape(*outer, columns, depth)), exponent.astype(jnp.uint8), MXFP4
    )


def dequantize_mxfp4(qvalue: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """[..., K, N]."""
    magnitudes = jnp.asarray(E2M1_MAGNITUDES, jnp.float32)
    values = jnp.concatenate([magnitudes, -magnitudes])[unpack(jnp.asarray(qvalue))]
    groups = values.reshape(*scale.shape, MXFP4_GROUP)
    exponent = jnp.asarray(scale).astype(jnp.int32) << 23
    unit = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    return (groups * unit[..., None]).astype(dtype).reshape(values.shape).swapaxes(-1, -2)


def dequantize(qvalue: jax.Array, scale: jax.Array, dtype: DTypeLike) -> jax.Array:
    """qvalue · scale, which must broadcast, rounded once, to `dtype`."""
    return (qvalue.astype(jnp.float32) * scale).astype(dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["qvalue", "scale"], meta_fields=["packed"])
@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as codes and scales. It replaces an array in a tree of weights; `astype` dequantizes
    it.

    | format | qvalue | value of a code |
    |---|---|---|
    | fp8, int8, int4 | e4m3, int8 or int4 | itself |
    | nf4 | uint4 | NF4_LEVELS[code] |
    | int4 or nf4, `packed` | uint8, two codes | int4 codes have an offset of 8 |
    | mxfp4 | uint8, two codes | e2m1 |

    Along each dimension, `scale`, float32, has one entry for each group of neighbours that share a
    scale. If `packed` is int4 or nf4, qvalue has two neighbours along the last dimension in a byte,
    the first in the lower half. The last dimension is an output, each with a scale, or an even
    number of inputs: a transposed weight [N, K] has the bytes of GPTQ's and compressed-tensors'
    int4 weights.

    In mxfp4, a weight [..., K, N] has the bytes of gpt-oss' folders: qvalue is [..., N, K / 2], two
    neighbours among the inputs in a byte, and scale is uint8 [..., N, K / 32].
    """

    qvalue: Any
    scale: Any
    packed: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, last = self.qvalue.shape
        if not self.packed:
            return (*outer, last)
        if self.packed == MXFP4:
            return (*outer[:-1], 2 * last, outer[-1])
        scales = self.scale.shape[-1]
        return (*outer, scales if -(-scales // 2) == last else 2 * last)

    @property
    def format(self) -> str:
        if self.packed:
            return self.packed
        return next(name for name, dtype in STORAGE.items() if self.dtype == jnp.dtype(dtype))

    @property
    def ndim(self) -> int:
        return self.qvalue.ndim

    @property
    def dtype(self) -> DTypeLike:
        """The storage dtype."""
        return self.qvalue.dtype

    def __getitem__(self, index: EllipsisType) -> "QuantizedWeight":
        """Itself, for `weight[...]` of an nnx parameter."""
        if index is not Ellipsis:
            raise TypeError("a quantized weight cannot be sliced: use weight[...]")
        return self

    def astype(self, dtype: DTypeLike) -> jax.Array:
        if self.packed == MXFP4:
            return dequantize_mxfp4(self.qvalue, self.scale, dtype)
        num_groups = self.scale.shape
        values = unpack(self.qvalue)[..., : self.shape[-1]] if self.packed else self.qvalue
        if values.dtype == jnp.uint4 or self.packed == NF4:
            values = jnp.take(jnp.asarray(NF4_LEVELS, jnp.float32), values.astype(jnp.int32))
        elif self.packed:
            values = values.astype(jnp.int8) - PACKED_OFFSET
        qvalue = values.reshape(split_groups(self.shape, num_groups))
        scale = self.scale.reshape(split_groups(num_groups, num_groups))
        return dequantize(qvalue, scale, dtype).reshape(self.shape)

    def has_output_scale(self, contracted: Sequence[int]) -> bool:
        """Whether the scale is constant along the `contracted` dimensions, so that the result of
        the contraction can be scaled instead of the weight.
        """
        is_number = self.format != NF4 and not self.packed
        return is_number and all(self.scale.shape[axis] == 1 for axis in contracted)


def split_groups(shape: Sequence[int], num_groups: Sequence[int]) -> tuple[int, ...]:
    """Each dimension as two: the groups, and the values within a group."""
    return tuple(
        part for dim, count in zip(shape, num_groups, strict=True) for part in (count, dim // count)
    )


def quantize_weight(
    x: jax.Array,
    contracted: Sequence[int],
    dtype: DTypeLike,
    group: int | None = None,
    packed: bool = False,
) -> QuantizedWeight:
    """A weight whose matmul contracts the `contracted` dimensions, in `dtype` fp8, int8, int4 or
    nf4. At most `group` inputs share a scale, by default those of `MAX_GROUP`; in fp8 and int8 all
    do. `packed`: four-bit values are stored two in a byte; the last dimension must be an output."""
    if dtype == MXFP4:
        assert tuple(contracted) == (x.ndim - 2,), "mxfp4 is for weights [..., inputs, outputs]"
        return quantize_mxfp4(x)
    name = str(dtype) if dtype in (NF4, FP8) else jnp.dtype(dtype).name
    max_group = MAX_GROUP[name] and (group or MAX_GROUP[name])
    num_groups = tuple(groups_per_dim(x.shape, contracted, max_group))
    within_group = tuple(range(1, 2 * x.ndim, 2))
    groups = x.reshape(split_groups(x.shape, num_groups))
    if name == NF4:
        qvalue, scale = quantize_nf4(groups, within_group)
    else:
        qvalue, scale = quantize(groups, within_group, STORAGE[name])
    qvalue, scale = qvalue.reshape(x.shape), scale.reshape(num_groups)
    if not packed or name in (FP8, INT8):
        return QuantizedWeight(qvalue, scale)
    assert num_groups[-1] == x.shape[-1], "the last dimension is contracted"
    offset = 0 if name == NF4 else PACKED_OFFSET
    return QuantizedWeight(pack(qvalue.astype(jnp.int8) + offset), scale, name)


def pack(values: jax.Array) -> jax.Array:
    """uint8 [..., ceil(N / 2)] of values [..., N] from 0 to 15."""
    padding = [(0, 0)] * (values.ndim - 1) + [(0, values.shape[-1] % 2)]
    padded = jnp.pad(values.astype(jnp.uint8), padding)
    pairs = padded.reshape(*values.shape[:-1], -1, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def unpack(values: jax.Array) -> jax.Array:
    """The inverse of `pack`, in uint8; an odd last dimension has a padding of one value."""
    pairs = jnp.stack([values & 15, values >> 4], axis=-1)
    return pairs.reshape(*values.shape[:-1], -1)


def groups_per_dim(
    shape: Sequence[int], contracted: Sequence[int], max_group: int | None
) -> list[int]:
    """The number of groups of each dimension: as few as possible with `max_group` values in each,
    last dimensions first.
    """
    num_groups = [1 if axis in contracted else dim for axis, dim in enumerate(shape)]
    if max_group is None or math.prod(shape[axis] for axis in contracted) <= max_group:
        return num_groups
    budget = max_group
    for axis in sorted(contracted, reverse=True):
        group = max(part for part in range(1, budget + 1) if shape[axis] % part == 0)
        num_groups[axis] = shape[axis] // group
        budget = budget // group if group == shape[axis] else 1
    group_size = math.prod(shape[axis] // num_groups[axis] for axis in contracted)
    if group_size < MIN_GROUP:
        return groups_per_dim(shape, contracted, None)
    return num_groups
