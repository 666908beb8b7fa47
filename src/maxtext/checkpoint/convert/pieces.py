"""The mechanics under the rules: patterns of axes, and blocks of elements that are copied either
way as bits.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from maxtext.checkpoint.tensors import Shape

STRIP = 64  # elements: strips of this width keep both sides of a transposition in the cache
Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Pattern:
    """ "(h d) e -> e h d": their dimensions, each of one or several axes (a 1 has none), and our
    axes.
    """

    theirs: tuple[tuple[str, ...], ...]
    ours: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        sides = text.split("->")
        if len(sides) != 2:
            raise ValueError(f"a pattern is 'theirs -> ours', not {text!r}")
        theirs, ours = (parse_side(side) for side in sides)
        if any(len(group) != 1 for group in ours):
            raise ValueError(f"axes of ours stand alone in {text!r}")
        pattern = cls(theirs, tuple(axis for (axis,) in ours))
        if sorted(pattern.their_axes) != sorted(pattern.ours) or len(set(pattern.ours)) != len(
            pattern.ours
        ):
            raise ValueError(f"both sides of {text!r} must have the same axes, each once")
        return pattern

    @property
    def their_axes(self) -> tuple[str, ...]:
        return tuple(itertools.chain.from_iterable(self.theirs))


def parse_side(text: str) -> tuple[tuple[str, ...], ...]:
    if re.sub(r"\([\w\s]*\)|\w+|\s", "", text):
        raise ValueError(
            f"{text.strip()!r} is not a list of axes: write words, (flattened axes) and 1"
        )
    groups = [re.findall(r"\w+", group) for group in re.findall(r"\([^)]*\)|\w+", text)]
    return tuple(tuple(axis for axis in group if axis != "1") for group in groups)


@dataclass(frozen=True)
class Piece:
    """Where a block of elements lies in one of their tensors and in one of our weights."""

    ours: int  # which weight
    cut: Index  # of their tensor as it is
    split: Shape  # of that, unflattened
    their_index: Index
    our_index: Index
    order: tuple[int, ...]  # what is left of our axes, in their order

    def of_theirs(self, array: np.ndarray) -> np.ndarray:
        # Splitting dimensions needs no copy, so this is a window on the array; so is what an index
        # with ... gives.
        return array[(*self.cut, ...)].reshape(self.split)[(*self.their_index, ...)]

    def of_ours(self, array: np.ndarray) -> np.ndarray:
        return array[(*self.our_index, ...)].transpose(self.order)


@dataclass(frozen=True)
class Bound:
    """A rule for one layer of one model: names and shapes on both sides, and what moves where."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    their_shapes: tuple[Shape, ...]
    our_shapes: tuple[Shape, ...]
    pieces: tuple[tuple[Piece, ...], ...]  # of each of theirs

    def to_ours(self, theirs: Iterable[np.ndarray]) -> list[np.ndarray]:
        """Our weights from their tensors, which are taken one by one and let go."""
        weights: list[np.ndarray] = []
        tensors = iter(theirs)
        for name, shape, pieces in zip(self.theirs, self.their_shapes, self.pieces, strict=True):
            array = next(tensors)
            weights = weights or [np.empty(one, array.dtype) for one in self.our_shapes]
            if array.shape != shape or array.dtype != weights[0].dtype:
                raise ValueError(
                    f"{name} is {array.dtype}{array.shape}, not {weights[0].dtype}{shape}"
                )
            for piece in pieces:
                copy(piece.of_ours(weights[piece.ours]), piece.of_theirs(array))
            del array  # or it would be kept while the next one is read
        return weights

    def to_theirs(self, ours: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Their tensors, each made when it is asked for."""
        dtype = ours[0].dtype
        for name, array, shape in zip(self.ours, ours, self.our_shapes, strict=True):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(f"{name} is {array.dtype}{array.shape}, not {dtype}{shape}")
        for shape, pieces in zip(self.their_shapes, self.pieces, strict=True):
            array = np.empty(shape, dtype)
            for piece in pieces:
                copy(piece.of_theirs(array), piece.of_ours(ours[piece.ours]))
            yield array
            del array


def copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy elements as bits: no dtype is looked into."""
    target, source = (array.view(f"u{array.dtype.itemsize}") for array in (target, source))
    fastest = fastest_axis(target)
    if fastest is None or fastest == fastest_axis(source):
        target[...] = source
        return
    for start in range(0, target.shape[fastest], STRIP):
        strip = (*[slice(None)] * fastest, slice(start, start + STRIP))
        target[strip] = source[strip]


def fastest_axis(array: np.ndarray) -> int | None:
    """The axis along which neighbours are nearest in memory; None for an array of one element."""
    strides = [(stride, axis) for axis, stride in enumerate(array.strides) if array.shape[axis] > 1]
    return min(strides)[1] if strides else None
