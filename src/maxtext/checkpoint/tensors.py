"""Sources of named tensors, whatever they are stored in, and checks of their names, shapes and
dtypes.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import ml_dtypes
import numpy as np

from maxtext.common.errors import UserError

Shape = tuple[int, ...]
Progress = Callable[[int, int, str], None]  # (bytes done, total bytes, name of the last tensor)

# Dtypes by their names in safetensors files
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Dtypes that may be cast to one another. fp8 values are not among them: they need their scales.
FLOATS = tuple(DTYPES[name] for name in ("F64", "F32", "F16", "BF16"))


@dataclass(frozen=True)
class TensorInfo:
    dtype: np.dtype
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def cast(self, dtype: np.dtype | None) -> "TensorInfo":
        """The same tensor in another floating dtype. A tensor that is not a float is unchanged."""
        return TensorInfo(dtype, self.shape) if dtype is not None and self.dtype in FLOATS else self


class TensorSource(Protocol):
    """Tensors that can be read one at a time. Their dtypes and shapes are known before any is
    read.
    """

    @property
    def title(self) -> str:
        """The name of the source in messages."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> np.ndarray: ...


class TensorStream(TensorSource, Protocol):
    """A source that also yields every tensor once, in the order in which it reads them best."""

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]: ...


@dataclass(frozen=True)
class NamedArrays:
    """Arrays in memory as a stream of tensors."""

    arrays: Mapping[str, np.ndarray]
    title: str

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(array.dtype, array.shape) for name, array in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        return iter(self.arrays.items())


@dataclass(frozen=True)
class WithTensor:
    """The tensors `names` of a source, and one more."""

    source: TensorSource
    name: str
    array: np.ndarray
    names: frozenset[str]

    @property
    def title(self) -> str:
        return self.source.title

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        tensors = {name: info for name, info in self.source.tensors.items() if name in self.names}
        return tensors | {self.name: TensorInfo(self.array.dtype, self.array.shape)}

    def read(self, name: str) -> np.ndarray:
        return self.array if name == self.name else self.source.read(name)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


@dataclass(frozen=True)
class RenamedTensors:
    """A source under other names. Tensors without a new name are left out."""

    source: TensorSource
    names: Mapping[str, str]  # new -> old

    @property
    def title(self) -> str:
        return self.source.title

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        return {new: self.source.tensors[old] for new, old in self.names.items()}

    def read(self, name: str) -> np.ndarray:
        return self.source.read(self.names[name])

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.names:
            yield name, self.read(name)


def cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return array if array.dtype == dtype else array.astype(dtype)


@dataclass(frozen=True)
class CastTensors:
    """A source with some of its floating-point tensors cast to other dtypes."""

    source: TensorStream
    dtypes: Mapping[str, np.dtype]

    @property
    def title(self) -> str:
        return self.source.title

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {
            name: tensor.cast(self.dtypes.get(name)) for name, tensor in self.source.tensors.items()
        }

    def read(self, name: str) -> np.ndarray:
        return cast(self.source.read(name), self.tensors[name].dtype)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, array in self.source:
            yield name, cast(array, self.tensors[name].dtype)


def raise_problems(title: str, problems: Collection[str], max_listed: int = 5) -> None:
    """Raise one UserError for all problems, if there are any."""
    if problems:
        listed = "; ".join(list(problems)[:max_listed])
        rest = f"; and {len(problems) - max_listed} more" if len(problems) > max_listed else ""
        count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
        raise UserError(f"{title} does not fit the model ({count}): {listed}{rest}")


def unexpected_names(
    names: Iterable[str], expected: Collection[str], ignored: Iterable[str] = ()
) -> list[str]:
    """Names that are not expected and that no regular expression in `ignored` matches fully."""
    patterns = [re.compile(pattern) for pattern in ignored]
    return [
        name
        for name in names
        if name not in expected and not any(p.fullmatch(name) for p in patterns)
    ]


def shape_mismatch(name: str, shape: Shape, expected: Shape) -> str:
    return f"{name} has shape {list(shape)}, the model needs {list(expected)}"


def dtype_problem(name: str, tensor: TensorInfo) -> str | None:
    """A problem with the dtype of a weight, such as integers or fp8 without scales, or None."""
    if tensor.dtype in FLOATS:
        return None
    dtype = DTYPE_NAMES.get(tensor.dtype, tensor.dtype)
    return f"{name} is {dtype}, and a weight is F32, BF16, F16 or F64"


def check_names_and_shapes(source: TensorSource, shapes: Mapping[str, Shape]) -> None:
    """Raise UserError unless a source has exactly these names and shapes, all in floats."""
    problems = [f"{name} is missing" for name in shapes if name not in source.tensors]
    problems += [
        f"{name} is not a weight of this model" for name in unexpected_names(source.tensors, shapes)
    ]
    for name, shape in shapes.items():
        tensor = source.tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            problems.append(shape_mismatch(name, tensor.shape, shape))
        elif tensor is not None and (problem := dtype_problem(name, tensor)):
            problems.append(problem)
    raise_problems(source.title, problems)
