"""Axis patterns, and rules bound to the weights of one model: which elements move where.

Elements are copied as bits: nothing is computed, so every dtype survives in both directions.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

STRIP = 64  # elements: strips of this width keep both sides of a transposition in the CPU cache


@dataclass(frozen=True)
class Pattern:
    """ "(h d) e -> e h d": the HF dimensions, each of one or several axes (a 1 has none), and the
    native axes.
    """

    hf: tuple[tuple[str, ...], ...]
    native: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        sides = text.split("->")
        if len(sides) != 2:
            raise ValueError(f"a pattern is 'hf -> native', not {text!r}")
        hf, native = (parse_side(side) for side in sides)
        if any(len(group) != 1 for group in native):
            raise ValueError(f"native axes cannot be flattened in {text!r}")
        pattern = cls(hf, tuple(axis for (axis,) in native))
        if sorted(pattern.hf_axes) != sorted(pattern.native) or len(set(pattern.native)) != len(
            pattern.native
        ):
            raise ValueError(f"both sides of {text!r} must have the same axes, each once")
        return pattern

    @property
    def hf_axes(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.hf))


def parse_side(text: str) -> tuple[tuple[str, ...], ...]:
    if re.sub(r"\([\w\s]*\)|\w+|\s", "", text):
        raise ValueError(
            f"{text.strip()!r} is not a list of axes: write words, (flattened axes) and 1"
        )
    groups = [re.findall(r"\w+", group) for group in re.findall(r"\([^)]*\)|\w+", text)]
    return tuple(tuple(axis for axis in group if axis != "1") for group in groups)


@dataclass(frozen=True)
class SliceCopy:
    """A block of elements: its index in an HF tensor and in a native weight."""

    weight: int  # index of the native weight in its BoundRule
    hf_slice: Index  # of the HF tensor as stored
    hf_split_shape: Shape  # of that slice, one dimension an axis
    hf_index: Index
    native_index: Index
    order: tuple[int, ...]  # the native axes that remain, in HF order

    def hf_view(self, array: np.ndarray) -> np.ndarray:
        # Splitting dimensions copies nothing, so this is a view of the array; an index with ...
        # gives a view, too.
        return array[(*self.hf_slice, ...)].reshape(self.hf_split_shape)[(*self.hf_index, ...)]

    def native_view(self, array: np.ndarray) -> np.ndarray:
        return array[(*self.native_index, ...)].transpose(self.order)


@dataclass(frozen=True)
class BoundRule:
    """A rule for one layer of one model: names and shapes on both sides, and the copies between."""

    hf_names: tuple[str, ...]
    native_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    native_shapes: tuple[Shape, ...]
    copies: tuple[tuple[SliceCopy, ...], ...]  # of each HF tensor

    def to_native(self, hf_tensors: Iterable[np.ndarray]) -> list[np.ndarray]:
        """The native weights from HF tensors, which are consumed and released one at a time."""
        weights: list[np.ndarray] = []
        tensors = iter(hf_tensors)
        for name, shape, copies in zip(self.hf_names, self.hf_shapes, self.copies, strict=True):
            array = next(tensors)
            if not weights:
                weights = [np.empty(native, array.dtype) for native in self.native_shapes]
            if array.shape != shape or array.dtype != weights[0].dtype:
                raise ValueError(
                    f"{name} is {array.dtype}{array.shape}, not {weights[0].dtype}{shape}"
                )
            for item in copies:
                copy_bits(item.native_view(weights[item.weight]), item.hf_view(array))
            del array  # so that it is freed before the next tensor is read
        return weights

    def to_hf(self, weights: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """The HF tensors, each created when it is requested."""
        dtype = weights[0].dtype
        for name, array, shape in zip(self.native_names, weights, self.native_shapes, strict=True):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype}{array.shape}, not {dtype}{shape}")
        for shape, copies in zip(self.hf_shapes, self.copies, strict=True):
            array = np.empty(shape, dtype)
            for item in copies:
                copy_bits(item.hf_view(array), item.native_view(weights[item.weight]))
            yield array
            del array


def copy_bits(target: np.ndarray, source: np.ndarray) -> None:
    """Copy elements without interpreting their dtype."""
    target, source = (array.view(f"u{array.dtype.itemsize}") for array in (target, source))
    fastest = fastest_axis(target)
    if fastest is None or fastest == fastest_axis(source):
        target[...] = source
        return
    for start in range(0, target.shape[fastest], STRIP):
        strip = (*[slice(None)] * fastest, slice(start, start + STRIP))
        target[strip] = source[strip]


def fastest_axis(array: np.ndarray) -> int | None:
    """The axis of the smallest stride; None for an array of one element."""
    strides = [(stride, axis) for axis, stride in enumerate(array.strides) if array.shape[axis] > 1]
    return min(strides)[1] if strides else None
