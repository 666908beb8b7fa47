"""Bindings: what PEFT adapts in a Hugging Face model, the native linear layers that share its
elements, and the factors A and B of an adapter on both sides.

The tensor rules of a family say how the elements of a weight [out, in] are arranged natively, as
[*in_shape, *out_shape]. Applied to the numbers of rows, of a weight with one input, and to the
numbers of columns, of one with one output, they give for each native layer the row of B at each
output and the column of A at each input. Factors are indexed by these: values are copied, never
computed.

`ModuleBinding`: modules. A module of one side may be several of the other:
- one HF module, several native layers (qkv_proj -> query, key, value): each layer has a copy of A,
  and its rows of B. Layers with different A, of which some have no adapter, are written as one
  adapter of their total rank, in which B is zero outside the block of each layer.
- several HF modules, one native layer (q_proj, k_proj, v_proj -> qkv): the other way around.
- several HF modules, one for each expert: they are stacked.

`ParameterBinding`: a parameter with the weights of all experts (PEFT's target_parameters),
gate_up_proj or down_proj, [X, O, I] or [X, I, O] for X experts, I inputs and O outputs. Its factors
are A [X r, I], one expert after the other, and B [O, r X], whose columns count the experts fastest.
gate and up, which are two layers here, have a copy of A and their rows of B each. If they have
different A, the parameter has their total rank, and B is zero outside the block of each; such
blocks are read as they were written.
"""

import abc
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxtext.checkpoint.tensors import Shape
from maxtext.common.errors import ConfigError
from maxtext.hf.rules import BoundRule, TensorRule, placeholders

WEIGHT = "/weight"  # the end of a linear layer's weight in native names
Factors = tuple[np.ndarray, np.ndarray]  # A and B


@dataclass(frozen=True)
class LinearShape:
    """The shape of a native weight, [*batch, *inputs, *outputs]; experts are a batch."""

    batch: Shape
    inputs: Shape
    outputs: Shape

    def lora_a(self, rank: int) -> Shape:
        return (*self.batch, *self.inputs, rank)

    def lora_b(self, rank: int) -> Shape:
        return (*self.batch, rank, *self.outputs)


@dataclass(frozen=True, eq=False)
class Binding(abc.ABC):
    """A tensor rule of one layer: HF targets and the native layers with their elements.

    Factors of all targets are one pair of arrays, A [X, R, in] and B [rows, R], where X is 1 but
    for experts, and the rows are those of all targets (and of all experts of a parameter).
    """

    rule: TensorRule
    layer: int | None
    hf: tuple[str, ...]  # modules, or one parameter
    native: tuple[str, ...]
    shapes: Mapping[str, LinearShape]  # by native layer

    @abc.abstractmethod
    def hf_shapes(self, rank: int) -> list[tuple[Shape, Shape]]:
        """The shapes of PEFT's A and B of each target."""

    @abc.abstractmethod
    def rank(self, a: np.ndarray) -> int:
        """The rank of a target with this A."""

    @abc.abstractmethod
    def columns(self) -> np.ndarray:
        """The column of A at each input of a native layer, [*inputs]."""

    @abc.abstractmethod
    def to_native(self, factors: Sequence[Factors]) -> dict[str, Factors]:
        """(lora_a, lora_b) of each native layer, by path, from PEFT's factors of each target."""

    @abc.abstractmethod
    def to_hf(self, factors: Mapping[str, Factors]) -> list[Factors]:
        """PEFT's factors of each target from (lora_a, lora_b) of the native layers that have an
        adapter."""

    @property
    def shape(self) -> LinearShape:
        return self.shapes[self.native[0]]

    @property
    def inputs(self) -> int:
        return math.prod(self.shape.inputs)

    def bind(self, shapes: Mapping[str, Shape]) -> BoundRule:
        bound = self.rule.bind({path + WEIGHT: shape for path, shape in shapes.items()}, self.layer)
        assert bound is not None, "the rule was bound to the shapes of the model before"
        return bound

    def bind_rows(self) -> BoundRule:
        """The rule of weights with one input."""
        shapes = self.shapes.items()
        return self.bind({path: (*s.batch, *[1] * len(s.inputs), *s.outputs) for path, s in shapes})

    def rows(self) -> dict[str, np.ndarray]:
        """The row of B at each output of the native layers, [*batch, *outputs]."""
        bound = self.bind_rows()
        ends = list(itertools.accumulate(map(math.prod, bound.hf_shapes)))
        numbers = np.split(np.arange(ends[-1]), ends[:-1])
        arrays = bound.to_native(
            [part.reshape(shape) for part, shape in zip(numbers, bound.hf_shapes, strict=True)]
        )
        return {
            path: array.reshape(*self.shapes[path].batch, *self.shapes[path].outputs)
            for path, array in zip(self.native, arrays, strict=True)
        }

    def gather(self, a_XRI: np.ndarray, b_rows: np.ndarray) -> dict[str, Factors]:
        """lora_a and lora_b of the native layers from the factors of all targets."""
        rank, columns = a_XRI.shape[1], self.columns()
        factors = {}
        for path, rows in self.rows().items():
            shape = self.shapes[path]
            a = np.moveaxis(a_XRI[:, :, columns], 1, -1).reshape(shape.lora_a(rank))
            b = np.moveaxis(b_rows[rows], -1, len(shape.batch))
            factors[path] = np.ascontiguousarray(a), np.ascontiguousarray(b)
        return factors

    def scatter(self, factors: Mapping[str, Factors], blocks: Sequence[str]) -> Factors:
        """The factors of all targets. Layers with different A have a block of ranks each, in the
        order of `blocks`."""
        first, *others = (a for a, _ in factors.values())
        rank = max(a.shape[-1] for a, _ in factors.values())
        shares_a = all(np.array_equal(first, a) for a in others)
        num_ranks = rank if shares_a else rank * len(blocks)
        rows, columns, count = self.rows(), self.columns(), math.prod(self.shape.batch)
        num_rows = sum(array.size for array in rows.values())
        a_XRI = np.zeros((count, num_ranks, self.inputs), first.dtype)
        b_rows = np.zeros((num_rows, num_ranks), first.dtype)
        for path, (a, b) in factors.items():
            start = 0 if shares_a else rank * blocks.index(path)
            block = slice(start, start + a.shape[-1])
            a_block = np.moveaxis(a.reshape(count, *self.shape.inputs, -1), -1, 1)
            a_XRI[:, block][:, :, columns] = a_block
            b_rows[:, block][rows[path]] = np.moveaxis(b, len(self.shape.batch), -1)
        return a_XRI, b_rows


class ModuleBinding(Binding):
    """HF modules and native layers that share their elements."""

    @property
    def stacks_experts(self) -> bool:
        return self.rule.join is None and bool(placeholders(self.rule.hf_names[0]))

    @property
    def packs_modules(self) -> bool:
        """Whether several HF modules are one native layer."""
        return len(self.hf) > 1 and not self.stacks_experts

    def columns(self) -> np.ndarray:
        shapes, packed_axis = {}, None
        for path, shape in self.shapes.items():
            sizes = [*shape.inputs, *[1] * len(shape.outputs)]
            if self.packs_modules:  # the rule has copies of the columns along this axis
                packed_axis = self.rule.pairs[0].pattern.native.index(str(self.rule.join))
                sizes[packed_axis] = (*shape.inputs, *shape.outputs)[packed_axis]
            shapes[path] = (*shape.batch, *sizes)
        bound = self.bind(shapes)
        numbers = np.arange(self.inputs)
        tensors = [np.broadcast_to(numbers, shape) for shape in bound.hf_shapes]
        array = bound.to_native([np.ascontiguousarray(tensor) for tensor in tensors])[0]
        if packed_axis is not None:
            array = np.take(array, 0, axis=packed_axis)
        return array.reshape(-1, *self.shape.inputs)[0]

    def hf_shapes(self, rank: int) -> list[tuple[Shape, Shape]]:
        return [((rank, self.inputs), (rows, rank)) for rows, _ in self.bind_rows().hf_shapes]

    def rank(self, a: np.ndarray) -> int:
        return a.shape[0]

    def to_native(self, factors: Sequence[Factors]) -> dict[str, Factors]:
        a_tensors, b_tensors = zip(*factors, strict=True)
        if self.packs_modules:
            # Modules have an A each: B is zero outside the block of each.
            ranks = [0, *itertools.accumulate(b.shape[1] for b in b_tensors)]
            b_tensors = tuple(
                np.pad(b, [(0, 0), (start, ranks[-1] - stop)])
                for b, (start, stop) in zip(b_tensors, itertools.pairwise(ranks), strict=True)
            )
            a_tensors = (np.concatenate(a_tensors),)
        return self.gather(np.stack(a_tensors), np.concatenate(b_tensors))

    def to_hf(self, factors: Mapping[str, Factors]) -> list[Factors]:
        a_XRI, b_rows = self.scatter(factors, self.native)
        return [
            (a_XRI[index if self.stacks_experts else 0], b)
            for index, b in enumerate(self.split_rows(b_rows))
        ]

    def split_rows(self, array: np.ndarray) -> list[np.ndarray]:
        """The rows of each module."""
        ends = itertools.accumulate(shape[0] for shape in self.bind_rows().hf_shapes)
        return np.split(array, list(ends)[:-1])

    # DoRA's magnitudes [out] are arranged as the rows of B.

    def magnitudes_to_native(self, tensors: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        magnitudes = np.concatenate([tensor.reshape(-1) for tensor in tensors])
        return {path: magnitudes[rows] for path, rows in self.rows().items()}

    def magnitudes_to_hf(self, magnitudes: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        missing = [path for path in self.native if path not in magnitudes]
        if missing:
            raise ConfigError(
                f"DoRA of {self.hf[0]} needs adapters of all its parts, also of {missing[0]}"
            )
        all_rows = self.rows()
        dtype = magnitudes[self.native[0]].dtype
        array = np.empty(sum(rows.size for rows in all_rows.values()), dtype)
        for path, rows in all_rows.items():
            array[rows] = magnitudes[path]
        return self.split_rows(array)


@dataclass(frozen=True, eq=False)
class ParameterBinding(Binding):
    """A parameter of all experts of one layer, and the native layers that have its elements."""

    # PEFT takes the inputs of the parameter for its outputs: A and B are exchanged.
    swapped: bool

    @property
    def module(self) -> str:
        return self.hf[0].rpartition(".")[0]

    @property
    def last_name(self) -> str:
        return self.hf[0].rpartition(".")[2]

    @property
    def experts(self) -> int:
        return self.shape.batch[0]

    def columns(self) -> np.ndarray:
        return np.arange(self.inputs)

    def hf_shapes(self, rank: int, swapped: bool | None = None) -> list[tuple[Shape, Shape]]:
        """Exchanged as in this version of PEFT, unless `swapped` says otherwise."""
        inputs, outputs = self.inputs, self.shape.outputs[0] * len(self.native)
        if self.swapped if swapped is None else swapped:
            inputs, outputs = outputs, inputs
        return [((self.experts * rank, inputs), (outputs, rank * self.experts))]

    def is_swapped(self, a: Shape, b: Shape, rank: int) -> bool | None:
        """Whether tensors of these shapes are exchanged; None if they do not fit. Early versions
        of PEFT exchanged none, so that the shapes decide wherever they differ."""
        fits = [
            swapped
            for swapped in (self.swapped, not self.swapped)
            if self.hf_shapes(rank, swapped) == [(tuple(a), tuple(b))]
        ]
        return fits[0] if fits else None

    def rank(self, a: np.ndarray) -> int:
        return a.shape[0] // self.experts

    def to_native(self, factors: Sequence[Factors]) -> dict[str, Factors]:
        ((a, b),) = factors
        rank = self.rank(a)
        a_XrI = a.reshape(self.experts, rank, -1)
        b_XOr = b.reshape(-1, rank, self.experts).transpose(2, 0, 1)
        if self.is_swapped(a.shape, b.shape, rank):
            a_XrI, b_XOr = (factor.transpose(0, 2, 1) for factor in (b_XOr, a_XrI))
        native = self.gather(a_XrI, b_XOr.reshape(-1, rank))
        blocks = diagonal_blocks([b for _, b in native.values()])
        return {
            path: (np.ascontiguousarray(a[..., block]), np.ascontiguousarray(b[:, block]))
            for (path, (a, b)), block in zip(native.items(), blocks, strict=True)
        }

    def to_hf(self, factors: Mapping[str, Factors]) -> list[Factors]:
        present = [path for path in self.native if path in factors]
        a_XrI, b_rows = self.scatter(factors, present)
        rank = a_XrI.shape[1]
        b_XOr = b_rows.reshape(self.experts, -1, rank)
        if self.swapped:
            a_XrI, b_XOr = (factor.transpose(0, 2, 1) for factor in (b_XOr, a_XrI))
        a = a_XrI.reshape(self.experts * rank, -1)
        b = b_XOr.transpose(1, 2, 0).reshape(-1, rank * self.experts)
        return [(np.ascontiguousarray(a), np.ascontiguousarray(b))]


def diagonal_blocks(b_arrays: Sequence[np.ndarray]) -> list[slice]:
    """The ranks that each native layer uses: an equal block if B [X, r, O] of every layer is zero
    outside of its own, and not zero everywhere; else all."""
    count, rank = len(b_arrays), b_arrays[0].shape[1]
    size = rank // count
    blocks = [slice(index * size, (index + 1) * size) for index in range(count)]
    is_diagonal = rank % count == 0 and all(
        b[:, block].any() and not np.delete(b, block, axis=1).any()
        for b, block in zip(b_arrays, blocks, strict=True)
    )
    return blocks if is_diagonal else [slice(0, rank)] * count


def padded(array: np.ndarray, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """The array with zeros at the end of each dimension; all zeros for an empty one."""
    if array.shape == tuple(shape):
        return array
    full = np.zeros(shape, dtype)
    if array.size:
        full[tuple(slice(size) for size in array.shape)] = array
    return full
