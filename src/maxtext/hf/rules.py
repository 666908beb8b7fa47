"""Rules between HF tensors and native weights: data that is read in both directions.

    TensorRule("model.layers.{i}.self_attn.q_proj.weight", "layers/{i}/attention/query/weight",
         "(h d) e -> e h d")

`{i}` is the number of a layer. The pattern goes from HF to native: words are axes, parentheses
flatten several into one, and a 1 is an HF dimension that the native weight lacks; read backwards
it is the inverse. Sizes come from the native weights, so native axes are never flattened.

- A placeholder that is an axis counts tensors: "….experts.{x}.w1.weight" with "x m e -> x e m"
  stacks one tensor an expert; the native name "…/wi_{b}/weight" with "x e (m b) -> b x e m" splits
  one tensor into wi_0 and wi_1.
- Several native weights in one HF tensor, join="w": they are concatenated along the axis w, inside
  whatever w is flattened with; join=0: each is brought to the HF layout first, and the results are
  concatenated along HF dimension 0.
- Several HF tensors in one native weight, join="w": they are concatenated along the native axis w;
  `sizes` gives the part of each (None: the rest; omitted: equal parts).

With several names there may be one pattern for all or one for each. Errors in a rule itself are
ValueErrors. A BoundRule, which has the shapes of a model, copies elements as bits: it computes
nothing, so every dtype survives in both directions.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]

LAYER = "{i}"
# Names without placeholders, each with its number along every counted axis.
ExpandedNames = list[tuple[str, dict[str, int]]]
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
        # also gives a view.
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


@dataclass(frozen=True)
class TensorRule:
    hf: str | tuple[str, ...]
    native: str | tuple[str, ...]
    pattern: str | tuple[str, ...]
    join: str | int | None = None
    sizes: tuple[int | None, ...] | None = None

    @cached_property
    def hf_names(self) -> tuple[str, ...]:
        return (self.hf,) if isinstance(self.hf, str) else self.hf

    @cached_property
    def native_names(self) -> tuple[str, ...]:
        return (self.native,) if isinstance(self.native, str) else self.native

    @cached_property
    def pairs(self) -> tuple["NamePair", ...]:
        """One for each HF or native name, whichever are several; not bound to a model yet."""
        count = max(len(self.hf_names), len(self.native_names))
        patterns = (self.pattern,) * count if isinstance(self.pattern, str) else self.pattern
        if len(patterns) != count or min(len(self.hf_names), len(self.native_names)) != 1:
            raise ValueError(
                f"{self}: give one HF name or one native name, and one pattern or {count}"
            )
        hf_names, native_names = (
            names * (count // len(names)) for names in (self.hf_names, self.native_names)
        )
        return tuple(
            NamePair(hf_name, native_name, Pattern.parse(text))
            for hf_name, native_name, text in zip(hf_names, native_names, patterns, strict=True)
        )

    def __post_init__(self) -> None:
        several = len(self.hf_names) > 1
        if (self.join is None) == (len(self.pairs) > 1):
            raise ValueError(f"{self}: several names need a join, and a join several names")
        if self.sizes and (
            not several or len(self.sizes) != len(self.pairs) or self.sizes.count(None) > 1
        ):
            raise ValueError(
                f"{self}: give a size for each HF tensor, and leave at most one of them None"
            )
        if len({LAYER in name for name in (*self.hf_names, *self.native_names)}) != 1:
            raise ValueError(f"{self}: all names have {LAYER}, or none has")
        for pair in self.pairs:
            counted = {*pair.hf_counted, *pair.native_counted}
            unflattened = {axis for group in pair.pattern.hf if len(group) == 1 for axis in group}
            if not set(pair.hf_counted) <= unflattened or not counted <= set(pair.pattern.native):
                raise ValueError(
                    f"{self}: a placeholder is {LAYER}, or an axis that is not flattened"
                )
            if isinstance(self.join, str) and self.join not in set(pair.pattern.native) - counted:
                raise ValueError(
                    f"{self}: the join {self.join!r} is not an axis, or one that a name counts"
                )
            rank = len(pair.pattern.hf) - len(pair.hf_counted)
            if isinstance(self.join, int) and (several or not 0 <= self.join < rank):
                raise ValueError(f"{self}: a number as join is a dimension of the one HF tensor")

    def layers(self, names: Iterable[str]) -> Sequence[int | None]:
        """The layers that have the first native weight; [None] for a rule outside the layers."""
        first = self.native_names[0]
        if LAYER not in first:
            return [None]
        parts = re.split(r"\{(\w+)\}", first)
        groups = (
            re.escape(part) if index % 2 == 0 else rf"(?P<{part}>\d+)"
            for index, part in enumerate(parts)
        )
        expression = re.compile("".join(groups))
        matches = (expression.fullmatch(name) for name in names)
        return sorted({int(match["i"]) for match in matches if match})

    def bind(self, shapes: Mapping[str, Shape], layer: int | None = None) -> BoundRule | None:
        """The rule for a layer of the model that has weights of these shapes; None if the model
        lacks some of the rule's weights, or has them with another rank.
        """
        pairs = []
        for pair in self.pairs:
            hf, native = (name.replace(LAYER, str(layer)) for name in (pair.hf, pair.native))
            sizes = axis_sizes(native, pair.pattern.native, shapes)
            if sizes is None:
                return None
            pairs.append(replace(pair, hf=hf, native=native, sizes=sizes))
        if len(self.hf_names) > 1:
            pairs = self.split_native_axis(pairs)
        elif len(self.native_names) > 1:
            pairs = self.split_hf_axis(pairs)
        return bound_rule(pairs, shapes)

    def split_native_axis(self, pairs: Sequence["NamePair"]) -> list["NamePair"]:
        """Give each HF tensor its span of the native axis along which they are concatenated."""
        axis = str(self.join)
        total = pairs[0].sizes[axis]
        sizes = self.sizes or (total // len(pairs),) * len(pairs)
        rest = total - sum(size or 0 for size in sizes)
        lengths = [rest if size is None else size for size in sizes]
        if sum(lengths) != total or min(lengths) < 1:
            raise ValueError(
                f"{self}: sizes {sizes} do not add up to {total}, the size of the native axis "
                f"{axis!r}"
            )
        return [
            replace(pair, sizes={**pair.sizes, axis: length}, native_spans={axis: span})
            for pair, length, span in zip(pairs, lengths, spans(lengths), strict=True)
        ]

    def split_hf_axis(self, pairs: Sequence["NamePair"]) -> list["NamePair"]:
        """Give each native weight its span of the HF axis or dimension of the concatenation."""
        join = self.join
        if isinstance(join, int):
            lengths = [pair.hf_shape[join] for pair in pairs]
            slices = [(*[slice(None)] * join, span) for span in spans(lengths)]
            split = [
                replace(pair, hf_slice=hf_slice, joined=sum(lengths))
                for pair, hf_slice in zip(pairs, slices, strict=True)
            ]
            shapes = {pair.hf_shape for pair in split}
        else:
            axis = str(join)
            lengths = [pair.sizes[axis] for pair in pairs]
            split = [
                replace(pair, hf_sizes={**pair.sizes, axis: sum(lengths)}, hf_spans={axis: span})
                for pair, span in zip(pairs, spans(lengths), strict=True)
            ]
            shapes = {pair.hf_split_shape for pair in split}
        if len(shapes) != 1:
            raise ValueError(
                f"{self}: weights of sizes {[pair.sizes for pair in pairs]} cannot be concatenated"
            )
        return split


@dataclass(frozen=True)
class NamePair:
    """One HF name and one native name with common elements; the sizes of its axes, once bound."""

    hf: str
    native: str
    pattern: Pattern
    sizes: Mapping[str, int] = field(default_factory=dict)
    # The spans of axes of which the pair has only a part.
    native_spans: Mapping[str, slice] = field(default_factory=dict)
    hf_spans: Mapping[str, slice] = field(default_factory=dict)
    hf_sizes: Mapping[str, int] | None = None  # of the HF tensor, if the pair has a part of it
    hf_slice: Index = ()  # the pair's part of the HF tensor as stored, before axes are split
    joined: int = 0  # size of the dimension that hf_slice cuts

    @property
    def hf_counted(self) -> tuple[str, ...]:
        return placeholders(self.hf)

    @property
    def native_counted(self) -> tuple[str, ...]:
        return placeholders(self.native)

    @property
    def hf_split_shape(self) -> Shape:
        """The HF tensor (or hf_slice of it) with one dimension an axis."""
        sizes = self.hf_sizes or self.sizes
        return tuple(sizes[axis] for axis in self.pattern.hf_axes if axis not in self.hf_counted)

    @property
    def hf_shape(self) -> Shape:
        sizes = self.hf_sizes or self.sizes
        groups = [group for group in self.pattern.hf if not set(group) & set(self.hf_counted)]
        shape = [math.prod(sizes[axis] for axis in group) for group in groups]
        if self.hf_slice:
            shape[len(self.hf_slice) - 1] = self.joined
        return tuple(shape)

    def copies(self, weight_indices: Mapping[str, int]) -> Iterator[tuple[str, SliceCopy]]:
        """(HF name, copy) for every pair of expanded names that share elements."""
        everything, split_shape = slice(None), self.hf_split_shape
        names = itertools.product(
            expand_placeholders(self.hf, self.sizes), expand_placeholders(self.native, self.sizes)
        )
        for (hf_name, hf_at), (native_name, native_at) in names:
            if any(hf_at.get(axis, number) != number for axis, number in native_at.items()):
                continue
            hf_axes = [axis for axis in self.pattern.hf_axes if axis not in hf_at]
            native_axes = [axis for axis in self.pattern.native if axis not in native_at]
            remaining = [axis for axis in native_axes if axis not in hf_at]
            item = SliceCopy(
                weight=weight_indices[native_name],
                hf_slice=self.hf_slice,
                hf_split_shape=split_shape,
                hf_index=tuple(
                    native_at.get(axis, self.hf_spans.get(axis, everything)) for axis in hf_axes
                ),
                native_index=tuple(
                    hf_at.get(axis, self.native_spans.get(axis, everything)) for axis in native_axes
                ),
                order=tuple(remaining.index(axis) for axis in hf_axes if axis not in native_at),
            )
            yield hf_name, item


def bound_rule(pairs: Sequence[NamePair], shapes: Mapping[str, Shape]) -> BoundRule:
    native_names = list(
        dict.fromkeys(
            name for pair in pairs for name, _ in expand_placeholders(pair.native, pair.sizes)
        )
    )
    weight_indices = {name: index for index, name in enumerate(native_names)}
    hf_tensors: dict[str, tuple[Shape, list[SliceCopy]]] = {}
    for pair in pairs:
        shape = pair.hf_shape
        for name, item in pair.copies(weight_indices):
            hf_tensors.setdefault(name, (shape, []))[1].append(item)
    return BoundRule(
        hf_names=tuple(hf_tensors),
        native_names=tuple(native_names),
        hf_shapes=tuple(shape for shape, _ in hf_tensors.values()),
        native_shapes=tuple(shapes[name] for name in native_names),
        copies=tuple(tuple(copies) for _, copies in hf_tensors.values()),
    )


def placeholders(name: str) -> tuple[str, ...]:
    """The axes that a name counts."""
    return tuple(axis for axis in re.findall(r"\{(\w+)\}", name) if f"{{{axis}}}" != LAYER)


def expand_placeholders(name: str, sizes: Mapping[str, int]) -> ExpandedNames:
    """The names that a name with placeholders stands for."""
    axes = placeholders(name)
    numbers = [
        dict(zip(axes, at, strict=True))
        for at in itertools.product(*(range(sizes[axis]) for axis in axes))
    ]
    return [(name.format(**at), at) for at in numbers]


def axis_sizes(
    name: str, axes: Sequence[str], shapes: Mapping[str, Shape]
) -> dict[str, int] | None:
    """The size of every axis of the weights that a name stands for; None if the model lacks
    them.
    """
    counted = placeholders(name)
    sizes = {}
    for axis in counted:
        zeros = dict.fromkeys(counted, 0)
        sizes[axis] = next(
            n for n in itertools.count() if name.format(**{**zeros, axis: n}) not in shapes
        )
    weight_shapes = {shapes.get(weight) for weight, _ in expand_placeholders(name, sizes)}
    shape = weight_shapes.pop() if len(weight_shapes) == 1 else None
    dimensions = [axis for axis in axes if axis not in counted]
    if shape is None or len(shape) != len(dimensions):
        return None
    return {**sizes, **dict(zip(dimensions, shape, strict=True))}


def spans(lengths: Iterable[int]) -> list[slice]:
    """Consecutive slices of these lengths."""
    ends = list(itertools.accumulate(lengths))
    return [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
