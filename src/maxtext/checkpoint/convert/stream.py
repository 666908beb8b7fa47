"""Conversion between their tensors and our weights, a rule at a time: memory holds what one rule
touches.

`from_hf` and `to_hf` choose the rules and check everything that can be known without data; all
problems come as one error. What they return is itself a source of tensors: to iterate over (into a
new folder), or to read by name (into a model, without a folder in between).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from maxtext.checkpoint.convert.pieces import Bound
from maxtext.checkpoint.convert.rules import Rule
from maxtext.checkpoint.tensors import (
    DTYPE_NAMES,
    Shape,
    TensorInfo,
    TensorSource,
    cast,
    check_names_and_shapes,
    dtype_problem,
    raise_problems,
    shape_mismatch,
    unexpected_names,
)
from maxtext.checkpoint.weights import ParamInfo


@dataclass(frozen=True)
class Conversion:
    """Checked steps over a source, and what they will give."""

    source: TensorSource
    steps: Sequence[Bound]
    outwards: bool  # to theirs, not to ours
    dtype: np.dtype | None  # of floats; None: as they come
    fixed: Mapping[str, np.dtype]  # the dtypes of our weights that keep theirs whatever `dtype` is
    tensors: Mapping[str, TensorInfo]

    @property
    def title(self) -> str:
        return self.source.title

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for step in self.steps:
            yield from self.run(step)

    def read(self, name: str) -> np.ndarray:
        """One tensor. Reads all that its rule needs; in a model of layers that is the layer's
        own.
        """
        return next(array for other, array in self.run(self.initializers[name]) if other == name)

    @cached_property
    def initializers(self) -> dict[str, Bound]:
        return {name: step for step in self.steps for name in outputs(step, self.outwards)}

    def run(self, step: Bound) -> Iterator[tuple[str, np.ndarray]]:
        dtype = step_dtype(step, self.dtype, self.fixed)
        given = (self.read_input(name, dtype) for name in outputs(step, not self.outwards))
        # Nothing here keeps an array that was handed over, so that it can be freed before the next
        # one is made.
        made = step.to_theirs(list(given)) if self.outwards else popped(step.to_ours(given))
        for name in outputs(step, self.outwards):
            yield name, next(made)

    def read_input(self, name: str, dtype: np.dtype | None) -> np.ndarray:
        return cast(self.source.read(name), self.source.tensors[name].cast(dtype).dtype)


def step_dtype(
    step: Bound, dtype: np.dtype | None, fixed: Mapping[str, np.dtype]
) -> np.dtype | None:
    """To which a step casts its floats, where all are to be `dtype`."""
    return None if dtype is None else fixed.get(step.ours[0], dtype)


def outputs(step: Bound, outwards: bool) -> tuple[str, ...]:
    return step.theirs if outwards else step.ours


def popped(arrays: list[np.ndarray]) -> Iterator[np.ndarray]:
    arrays.reverse()
    while arrays:
        yield arrays.pop()


def from_hf(
    source: TensorSource,
    rules: Iterable[Rule],
    param_infos: Mapping[str, ParamInfo],
    ignored: Iterable[str] = (),
    dtype: np.dtype | None = None,
) -> Conversion:
    """Their tensors as our weights. Of several rules for a weight, the first that finds its tensors
    is taken; tensors that no rule takes are an error unless one of the regular expressions in
    `ignored` matches their whole name."""
    shapes = {name: place.shape for name, place in param_infos.items()}
    there = source.tensors
    bounds = applicable(rules, shapes)

    def fits(bound: Bound) -> bool:
        found = [there.get(name) for name in bound.theirs]
        return all(
            one and one.shape == shape for one, shape in zip(found, bound.their_shapes, strict=True)
        )

    steps = choose(
        bounds,
        [fits, lambda bound: all(name in there for name in bound.theirs), lambda bound: True],
    )
    problems = unprovided(steps, shapes)
    for step in steps:
        for name, shape in zip(step.theirs, step.their_shapes, strict=True):
            if name not in there:
                problems.append(f"{name} is missing")
            elif there[name].shape != shape:
                problems.append(shape_mismatch(name, there[name].shape, shape))
            elif problem := dtype_problem(name, there[name]):
                problems.append(problem)
    used = {name for step in steps for name in step.theirs}
    # A rule passed over for another may still explain a tensor, but its weights would be there
    # twice.
    problems += [
        f"{name} is not a tensor of this model" for name in unexpected_names(there, used, ignored)
    ]
    return conversion(source, steps, False, dtype, param_infos, problems)


def to_hf(
    source: TensorSource,
    rules: Iterable[Rule],
    param_infos: Mapping[str, ParamInfo],
    names: Collection[str] | None = None,
    dtype: np.dtype | None = None,
) -> Conversion:
    """Our weights as their tensors. Of several rules for a weight, the first is taken, or the first
    whose tensors are all among `names`: those of a checkpoint to be written again."""
    shapes = {name: place.shape for name, place in param_infos.items()}
    check_names_and_shapes(source, shapes)
    wanted = set(names or ())
    steps = choose(
        applicable(rules, shapes),
        [lambda bound: wanted.issuperset(bound.theirs), lambda bound: True],
    )
    problems = unprovided(steps, shapes)
    writers: dict[str, Bound] = {}
    for step in steps:
        for name in step.theirs:
            if writers.setdefault(name, step) is not step:
                problems.append(
                    f"{name} would have to hold both {writers[name].ours[0]} and {step.ours[0]}"
                )
    return conversion(source, steps, True, dtype, param_infos, problems)


def conversion(
    source: TensorSource,
    steps: list[Bound],
    outwards: bool,
    dtype: np.dtype | None,
    param_infos: Mapping[str, ParamInfo],
    problems: list[str],
) -> Conversion:
    """The steps in the order of our weights, after the last check."""
    order = {name: place for place, name in enumerate(param_infos)}
    steps = sorted(steps, key=lambda step: min(order[name] for name in step.ours))
    tensors: dict[str, TensorInfo] = {}
    fixed = {name: place.dtype for name, place in param_infos.items() if place.fixed_dtype}
    for step in steps:
        inputs, wanted = outputs(step, not outwards), step_dtype(step, dtype, fixed)
        kinds = {
            source.tensors[name].cast(wanted).dtype for name in inputs if name in source.tensors
        }
        if len(kinds) > 1:
            kind_names = sorted(DTYPE_NAMES[kind] for kind in kinds)
            problems.append(
                f"{inputs[0]} and {inputs[-1]} belong together and have dtypes {' and '.join(kind_names)}"
            )
        if not problems:
            made = zip(
                outputs(step, outwards),
                step.their_shapes if outwards else step.our_shapes,
                strict=True,
            )
            tensors |= {name: TensorInfo(next(iter(kinds)), shape) for name, shape in made}
    raise_problems(source.title, list(dict.fromkeys(problems)))
    return Conversion(source, steps, outwards, dtype, fixed, tensors)


def applicable(rules: Iterable[Rule], shapes: Mapping[str, Shape]) -> list[Bound]:
    """Every rule for every layer that has its weights."""
    bounds = (rule.bind(shapes, layer) for rule in rules for layer in rule.layers(shapes))
    return [bound for bound in bounds if bound is not None]


def choose(bounds: Sequence[Bound], wishes: Sequence[Callable[[Bound], bool]]) -> list[Bound]:
    """One rule a weight: the first that fulfils the first wish, else the second, and so on."""
    chosen: list[Bound] = []
    claimed: set[str] = set()
    for wish in wishes:
        for bound in bounds:
            if claimed.isdisjoint(bound.ours) and wish(bound):
                claimed.update(bound.ours)
                chosen.append(bound)
    return chosen


def unprovided(steps: Iterable[Bound], shapes: Mapping[str, Shape]) -> list[str]:
    given = {name for step in steps for name in step.ours}
    return [
        f"no rule is known for our {name} {list(shape)}"
        for name, shape in shapes.items()
        if name not in given
    ]
