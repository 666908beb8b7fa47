"""Conversion between HF tensors and native weights, a rule at a time: memory holds what one rule
touches.

`from_hf` and `to_hf` choose the rules and check everything that can be known without data; all
problems are in one error. The result is itself a source of tensors: to iterate over (into a new
folder), or to read by name (into a model, without a folder in between).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

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
from maxtext.hf.rules import BoundRule, TensorRule


@dataclass(frozen=True)
class Conversion:
    """Checked steps over a source, and what they will give."""

    source: TensorSource
    steps: Sequence[BoundRule]
    exporting: bool  # to HF tensors, else to native weights
    dtype: np.dtype | None  # of floats; None: unchanged
    fixed: Mapping[str, np.dtype]  # native weights that keep their dtype whatever `dtype` is
    tensors: Mapping[str, TensorInfo]

    @property
    def title(self) -> str:
        return self.source.title

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for step in self.steps:
            yield from self.run(step)

    def read(self, name: str) -> np.ndarray:
        """One tensor. Reads all tensors of its rule, which belong to one layer."""
        return next(array for output, array in self.run(self.step_of[name]) if output == name)

    @cached_property
    def step_of(self) -> dict[str, BoundRule]:
        return {name: step for step in self.steps for name in outputs(step, self.exporting)}

    def run(self, step: BoundRule) -> Iterator[tuple[str, np.ndarray]]:
        dtype = step_dtype(step, self.dtype, self.fixed)
        inputs = (self.read_input(name, dtype) for name in outputs(step, not self.exporting))
        # No reference to a yielded array is held here, so that it can be freed before the next one
        # is created.
        arrays = step.to_hf(list(inputs)) if self.exporting else popped(step.to_native(inputs))
        for name in outputs(step, self.exporting):
            yield name, next(arrays)

    def read_input(self, name: str, dtype: np.dtype | None) -> np.ndarray:
        return cast(self.source.read(name), self.source.tensors[name].cast(dtype).dtype)


def step_dtype(
    step: BoundRule, dtype: np.dtype | None, fixed: Mapping[str, np.dtype]
) -> np.dtype | None:
    """The dtype to which a step casts its floats; None: it does not."""
    return None if dtype is None else fixed.get(step.native_names[0], dtype)


def outputs(step: BoundRule, exporting: bool) -> tuple[str, ...]:
    return step.hf_names if exporting else step.native_names


def popped(arrays: list[np.ndarray]) -> Iterator[np.ndarray]:
    arrays.reverse()
    while arrays:
        yield arrays.pop()


def from_hf(
    source: TensorSource,
    rules: Iterable[TensorRule],
    param_infos: Mapping[str, ParamInfo],
    ignored: Iterable[str] = (),
    dtype: np.dtype | None = None,
) -> Conversion:
    """HF tensors as native weights. Of several rules for a weight, the first whose tensors exist is
    used; tensors that no rule uses are an error unless one of the regular expressions in `ignored`
    matches their full name."""
    shapes = {name: info.shape for name, info in param_infos.items()}
    hf_tensors = source.tensors
    bounds = applicable(rules, shapes)

    def fits(bound: BoundRule) -> bool:
        tensors = [hf_tensors.get(name) for name in bound.hf_names]
        return all(
            tensor and tensor.shape == shape
            for tensor, shape in zip(tensors, bound.hf_shapes, strict=True)
        )

    steps = choose(
        bounds,
        [
            fits,
            lambda bound: all(name in hf_tensors for name in bound.hf_names),
            lambda bound: True,
        ],
    )
    problems = weights_without_rule(steps, shapes)
    for step in steps:
        for name, shape in zip(step.hf_names, step.hf_shapes, strict=True):
            if name not in hf_tensors:
                problems.append(f"{name} is missing")
            elif hf_tensors[name].shape != shape:
                problems.append(shape_mismatch(name, hf_tensors[name].shape, shape))
            elif problem := dtype_problem(name, hf_tensors[name]):
                problems.append(problem)
    used = {name for step in steps for name in step.hf_names}
    # A rule that was not chosen may still match a tensor, but its weights would exist twice.
    problems += [
        f"{name} is not a tensor of this model"
        for name in unexpected_names(hf_tensors, used, ignored)
    ]
    return conversion(source, steps, False, dtype, param_infos, problems)


def to_hf(
    source: TensorSource,
    rules: Iterable[TensorRule],
    param_infos: Mapping[str, ParamInfo],
    names: Collection[str] | None = None,
    dtype: np.dtype | None = None,
) -> Conversion:
    """Native weights as HF tensors. Of several rules for a weight, the first whose tensors are all
    among `names` is used (the tensors of the checkpoint that the weights came from), else the
    first."""
    shapes = {name: info.shape for name, info in param_infos.items()}
    check_names_and_shapes(source, shapes)
    original_names = set(names or ())
    steps = choose(
        applicable(rules, shapes),
        [lambda bound: original_names.issuperset(bound.hf_names), lambda bound: True],
    )
    problems = weights_without_rule(steps, shapes)
    writers: dict[str, BoundRule] = {}
    for step in steps:
        for name in step.hf_names:
            if writers.setdefault(name, step) is not step:
                problems.append(
                    f"{name} would have to hold both {writers[name].native_names[0]} and "
                    f"{step.native_names[0]}"
                )
    return conversion(source, steps, True, dtype, param_infos, problems)


def conversion(
    source: TensorSource,
    steps: list[BoundRule],
    exporting: bool,
    dtype: np.dtype | None,
    param_infos: Mapping[str, ParamInfo],
    problems: list[str],
) -> Conversion:
    """The steps in the order of the native weights. Raises UserError with all problems."""
    order = {name: index for index, name in enumerate(param_infos)}
    steps = sorted(steps, key=lambda step: min(order[name] for name in step.native_names))
    tensors: dict[str, TensorInfo] = {}
    fixed = {name: info.dtype for name, info in param_infos.items() if info.fixed_dtype}
    for step in steps:
        inputs, cast_dtype = outputs(step, not exporting), step_dtype(step, dtype, fixed)
        dtypes = {
            source.tensors[name].cast(cast_dtype).dtype for name in inputs if name in source.tensors
        }
        if len(dtypes) > 1:
            dtype_names = sorted(DTYPE_NAMES[item] for item in dtypes)
            problems.append(
                f"{inputs[0]} and {inputs[-1]} are one weight and have dtypes "
                f"{' and '.join(dtype_names)}"
            )
        if not problems:
            shapes = zip(
                outputs(step, exporting),
                step.hf_shapes if exporting else step.native_shapes,
                strict=True,
            )
            tensors |= {name: TensorInfo(next(iter(dtypes)), shape) for name, shape in shapes}
    raise_problems(source.title, list(dict.fromkeys(problems)))
    return Conversion(source, steps, exporting, dtype, fixed, tensors)


def applicable(rules: Iterable[TensorRule], shapes: Mapping[str, Shape]) -> list[BoundRule]:
    """Every rule for every layer that has its weights."""
    bounds = (rule.bind(shapes, layer) for rule in rules for layer in rule.layers(shapes))
    return [bound for bound in bounds if bound is not None]


def choose(
    bounds: Sequence[BoundRule], preferences: Sequence[Callable[[BoundRule], bool]]
) -> list[BoundRule]:
    """One rule a weight: the first that meets the first preference, else the second, and so on."""
    chosen: list[BoundRule] = []
    claimed: set[str] = set()
    for preferred in preferences:
        for bound in bounds:
            if claimed.isdisjoint(bound.native_names) and preferred(bound):
                claimed.update(bound.native_names)
                chosen.append(bound)
    return chosen


def weights_without_rule(steps: Iterable[BoundRule], shapes: Mapping[str, Shape]) -> list[str]:
    covered = {name for step in steps for name in step.native_names}
    return [
        f"no rule is known for the weight {name} {list(shape)}"
        for name, shape in shapes.items()
        if name not in covered
    ]
