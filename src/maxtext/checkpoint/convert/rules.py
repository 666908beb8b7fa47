"""Rules between their tensors and our weights: data that is read both ways.

    Rule("model.layers.{i}.self_attn.q_proj.weight", "layers/{i}/attention/query/kernel", "(h d) e -> e h d")

`{i}` is the number of a layer. The pattern goes from theirs to ours: words are axes, parentheses
flatten several into one, a 1 is a dimension of theirs that ours lacks; read backwards it is the
inverse. Sizes come from our weights, so on our side every axis stands alone.

- A placeholder that is an axis counts tensors: "….experts.{x}.w1.weight" with "x m e -> x e m"
  stacks one tensor an expert; ours "…/wi_{b}/kernel" with "x e (m b) -> b x e m" deals one tensor
  out to wi_0 and wi_1.
- Several of ours in one of theirs, join="w": ours lie side by side along the axis w, inside
  whatever w is flattened with; join=0: each is brought to their layout first, and those lie side by
  side along their dimension 0.
- Several of theirs in one of ours, join="w": theirs lie side by side along our axis w; `sizes` says
  how much of it each takes (None: the rest; left out: equal parts).

With several names there may be one pattern for all or one for each. A rule bound to a layer only
moves elements: nothing is computed, and the bits of any dtype survive. Errors in a rule itself are
ValueErrors.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from maxtext.checkpoint.convert.pieces import Bound, Index, Pattern, Piece
from maxtext.checkpoint.tensors import Shape

LAYER = "{i}"
Counted = list[tuple[str, dict[str, int]]]  # names, each with its number along every counted axis


@dataclass(frozen=True)
class Rule:
    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    pattern: str | tuple[str, ...]
    join: str | int | None = None
    sizes: tuple[int | None, ...] | None = None

    @cached_property
    def their_names(self) -> tuple[str, ...]:
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @cached_property
    def our_names(self) -> tuple[str, ...]:
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    @cached_property
    def parts(self) -> tuple["Part", ...]:
        """One for each of theirs or of ours, whichever are several; of no model yet."""
        count = max(len(self.their_names), len(self.our_names))
        patterns = (self.pattern,) * count if isinstance(self.pattern, str) else self.pattern
        if len(patterns) != count or min(len(self.their_names), len(self.our_names)) != 1:
            raise ValueError(
                f"{self}: give one of theirs, or one of ours, and one pattern or {count}"
            )
        theirs, ours = (
            names * (count // len(names)) for names in (self.their_names, self.our_names)
        )
        return tuple(
            Part(their_name, our_name, Pattern.parse(text))
            for their_name, our_name, text in zip(theirs, ours, patterns, strict=True)
        )

    def __post_init__(self) -> None:
        several = len(self.their_names) > 1
        if (self.join is None) == (len(self.parts) > 1):
            raise ValueError(f"{self}: several names need a join, and a join several names")
        if self.sizes and (
            not several or len(self.sizes) != len(self.parts) or self.sizes.count(None) > 1
        ):
            raise ValueError(
                f"{self}: give a size for each of theirs, and leave at most one of them None"
            )
        if len({LAYER in name for name in (*self.their_names, *self.our_names)}) != 1:
            raise ValueError(f"{self}: all names have {LAYER}, or none has")
        for part in self.parts:
            counted = {*part.their_counted, *part.our_counted}
            alone = {axis for group in part.pattern.theirs if len(group) == 1 for axis in group}
            if not set(part.their_counted) <= alone or not counted <= set(part.pattern.ours):
                raise ValueError(
                    f"{self}: a placeholder is {LAYER}, or an axis that stands alone on its side"
                )
            if isinstance(self.join, str) and self.join not in set(part.pattern.ours) - counted:
                raise ValueError(
                    f"{self}: the join {self.join!r} is not an axis, or one that a name counts"
                )
            rank = len(part.pattern.theirs) - len(part.their_counted)
            if isinstance(self.join, int) and (several or not 0 <= self.join < rank):
                raise ValueError(f"{self}: a number as join is a dimension of their one tensor")

    def layers(self, names: Iterable[str]) -> Sequence[int | None]:
        """The layers that have the first of our weights; [None] for a rule outside the layers."""
        first = self.our_names[0]
        if LAYER not in first:
            return [None]
        parts = re.split(r"\{(\w+)\}", first)
        groups = (
            re.escape(part) if place % 2 == 0 else rf"(?P<{part}>\d+)"
            for place, part in enumerate(parts)
        )
        expression = re.compile("".join(groups))
        matches = (expression.fullmatch(name) for name in names)
        return sorted({int(match["i"]) for match in matches if match})

    def bind(self, shapes: Mapping[str, Shape], layer: int | None = None) -> Bound | None:
        """The rule for a layer of the model that has these weights; None where it lacks some, or
        has them otherwise.
        """
        found = []
        for part in self.parts:
            theirs, ours = (name.replace(LAYER, str(layer)) for name in (part.theirs, part.ours))
            sizes = axis_sizes(ours, part.pattern.ours, shapes)
            if sizes is None:
                return None
            found.append(replace(part, theirs=theirs, ours=ours, sizes=sizes))
        if len(self.their_names) > 1:
            found = self.share_ours(found)
        elif len(self.our_names) > 1:
            found = self.share_theirs(found)
        return collect(found, shapes)

    def share_ours(self, parts: Sequence["Part"]) -> list["Part"]:
        """Give each of theirs its span of our joined axis."""
        axis = str(self.join)
        total = parts[0].sizes[axis]
        sizes = self.sizes or (total // len(parts),) * len(parts)
        rest = total - sum(size or 0 for size in sizes)
        widths = [rest if size is None else size for size in sizes]
        if sum(widths) != total or min(widths) < 1:
            raise ValueError(
                f"{self}: sizes {sizes} do not make {total}, the size of our axis {axis!r}"
            )
        return [
            replace(part, sizes={**part.sizes, axis: width}, our_spans={axis: span})
            for part, width, span in zip(parts, widths, spans(widths), strict=True)
        ]

    def share_theirs(self, parts: Sequence["Part"]) -> list["Part"]:
        """Give each of ours its span of their joined axis or dimension."""
        join = self.join
        if isinstance(join, int):
            widths = [part.their_shape[join] for part in parts]
            cuts = [(*[slice(None)] * join, span) for span in spans(widths)]
            shared = [
                replace(part, cut=cut, joined=sum(widths))
                for part, cut in zip(parts, cuts, strict=True)
            ]
            layouts = {part.their_shape for part in shared}
        else:
            axis = str(join)
            widths = [part.sizes[axis] for part in parts]
            shared = [
                replace(part, whole={**part.sizes, axis: sum(widths)}, their_spans={axis: span})
                for part, span in zip(parts, spans(widths), strict=True)
            ]
            layouts = {part.split for part in shared}
        if len(layouts) != 1:
            raise ValueError(
                f"{self}: weights of sizes {[part.sizes for part in parts]} do not join"
            )
        return shared


@dataclass(frozen=True)
class Part:
    """What one name of theirs and one of ours have in common; the sizes of its axes, once bound."""

    theirs: str
    ours: str
    pattern: Pattern
    sizes: Mapping[str, int] = field(default_factory=dict)
    our_spans: Mapping[str, slice] = field(
        default_factory=dict
    )  # where it takes only a part of an axis
    their_spans: Mapping[str, slice] = field(default_factory=dict)
    whole: Mapping[str, int] | None = None  # sizes of their tensor, where it takes only a part
    cut: Index = ()  # its part of their tensor as that is, before any axis is split off
    joined: int = 0  # size of the dimension that is cut

    @property
    def their_counted(self) -> tuple[str, ...]:
        return placeholders(self.theirs)

    @property
    def our_counted(self) -> tuple[str, ...]:
        return placeholders(self.ours)

    @property
    def split(self) -> Shape:
        """Their tensor (or what is cut from it) with an axis a dimension."""
        sizes = self.whole or self.sizes
        return tuple(
            sizes[axis] for axis in self.pattern.their_axes if axis not in self.their_counted
        )

    @property
    def their_shape(self) -> Shape:
        sizes = self.whole or self.sizes
        groups = [
            group for group in self.pattern.theirs if not set(group) & set(self.their_counted)
        ]
        shape = [math.prod(sizes[axis] for axis in group) for group in groups]
        if self.cut:
            shape[len(self.cut) - 1] = self.joined
        return tuple(shape)

    def pieces(self, our_places: Mapping[str, int]) -> Iterator[tuple[str, Piece]]:
        """A piece for every pair of names that share elements, with the name of theirs."""
        everything, split = slice(None), self.split
        pairs = itertools.product(
            count_out(self.theirs, self.sizes), count_out(self.ours, self.sizes)
        )
        for (theirs, at), (ours, our_at) in pairs:
            if any(at.get(axis, number) != number for axis, number in our_at.items()):
                continue
            their_axes = [axis for axis in self.pattern.their_axes if axis not in at]
            our_axes = [axis for axis in self.pattern.ours if axis not in our_at]
            left = [axis for axis in our_axes if axis not in at]
            yield (
                theirs,
                Piece(
                    ours=our_places[ours],
                    cut=self.cut,
                    split=split,
                    their_index=tuple(
                        our_at.get(axis, self.their_spans.get(axis, everything))
                        for axis in their_axes
                    ),
                    our_index=tuple(
                        at.get(axis, self.our_spans.get(axis, everything)) for axis in our_axes
                    ),
                    order=tuple(left.index(axis) for axis in their_axes if axis not in our_at),
                ),
            )


def collect(parts: Sequence[Part], shapes: Mapping[str, Shape]) -> Bound:
    ours = list(
        dict.fromkeys(name for part in parts for name, _ in count_out(part.ours, part.sizes))
    )
    places = {name: place for place, name in enumerate(ours)}
    theirs: dict[str, tuple[Shape, list[Piece]]] = {}
    for part in parts:
        shape = part.their_shape
        for name, piece in part.pieces(places):
            theirs.setdefault(name, (shape, []))[1].append(piece)
    return Bound(
        theirs=tuple(theirs),
        ours=tuple(ours),
        their_shapes=tuple(shape for shape, _ in theirs.values()),
        our_shapes=tuple(shapes[name] for name in ours),
        pieces=tuple(tuple(pieces) for _, pieces in theirs.values()),
    )


def placeholders(name: str) -> tuple[str, ...]:
    """The axes that a name counts."""
    return tuple(axis for axis in re.findall(r"\{(\w+)\}", name) if f"{{{axis}}}" != LAYER)


def count_out(name: str, sizes: Mapping[str, int]) -> Counted:
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
    """The size of every axis of the weights that a name stands for; None where the model lacks
    them.
    """
    counted = placeholders(name)
    sizes = {}
    for axis in counted:
        others = dict.fromkeys(counted, 0)
        sizes[axis] = next(
            n for n in itertools.count() if name.format(**{**others, axis: n}) not in shapes
        )
    found = {shapes.get(one) for one, _ in count_out(name, sizes)}
    shape = found.pop() if len(found) == 1 else None
    lone = [axis for axis in axes if axis not in counted]
    if shape is None or len(shape) != len(lone):
        return None
    return {**sizes, **dict(zip(lone, shape, strict=True))}


def spans(widths: Iterable[int]) -> list[slice]:
    """Consecutive slices of these widths."""
    ends = list(itertools.accumulate(widths))
    return [slice(start, end) for start, end in itertools.pairwise([0, *ends])]
