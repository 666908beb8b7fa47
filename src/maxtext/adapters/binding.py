"""Bindings: what PEFT adapts in a Hugging Face model, the native linear layers that share its
elements, and the factors A and B of an adapter on both sides.

The tensor rules of a family say how the elements of a weight [out, in] are arranged natively, as
[*in_shape, *out_shape]. The same rule, bound to a model whose outputs (or inputs) are replaced by
the rank, arranges A [r, in] (or B [out, r]): rows and columns are copied, never computed.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxtext.checkpoint.tensors import Shape
from maxtext.common.errors import ConfigError
from maxtext.hf.bound_rule import BoundRule
from maxtext.hf.rules import Rule, placeholders

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

    def a_weight(self, rank: int) -> Shape:
        """The shape of A as a weight whose outputs are the rank."""
        return (*self.batch, *self.inputs, *[1] * (len(self.outputs) - 1), rank)

    def b_weight(self, rank: int) -> Shape:
        """The shape of B as a weight whose inputs are the rank."""
        return (*self.batch, *[1] * (len(self.inputs) - 1), rank, *self.outputs)


@dataclass(frozen=True, eq=False)
class Binding(abc.ABC):
    """A tensor rule of one layer: HF targets and the native layers with their elements."""

    rule: Rule
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
    def to_native(self, factors: Sequence[Factors]) -> dict[str, Factors]:
        """(lora_a, lora_b) of each native layer, by path, from PEFT's factors of each target."""

    @abc.abstractmethod
    def to_hf(self, factors: Mapping[str, Factors]) -> list[Factors]:
        """PEFT's factors of each target from (lora_a, lora_b) of the native layers that have an
        adapter."""

    def bind(self, shapes: Mapping[str, Shape]) -> BoundRule:
        bound = self.rule.bind({path + WEIGHT: shape for path, shape in shapes.items()}, self.layer)
        assert bound is not None, "the rule was bound to the shapes of the model before"
        return bound

    def bind_b(self, rank: int) -> BoundRule:
        return self.bind({path: self.shapes[path].b_weight(rank) for path in self.native})

    def pad(self, factors: Mapping[str, Factors]) -> tuple[dict[str, Factors], bool]:
        """lora_a and lora_b of all native layers at their largest rank, zeros for layers without;
        and whether all layers with an adapter have the same A."""
        rank = max(a.shape[-1] for a, _ in factors.values())
        dtype = next(iter(factors.values()))[0].dtype
        nothing = np.zeros(0, dtype), np.zeros(0, dtype)
        all_factors = {}
        for path in self.native:
            a, b = factors.get(path, nothing)
            shape = self.shapes[path]
            all_factors[path] = (
                padded(a, shape.lora_a(rank), dtype),
                padded(b, shape.lora_b(rank), dtype),
            )
        first, *others = (all_factors[path][0] for path in self.native if path in factors)
        return all_factors, all(np.array_equal(first, a) for a in others)


class ModuleBinding(Binding):
    """HF modules and native layers that share their elements."""

    @property
    def stacks_experts(self) -> bool:
        return self.rule.join is None and bool(placeholders(self.rule.hf_names[0]))

    @property
    def packs_modules(self) -> bool:
        """Whether several HF modules are one native layer."""
        return len(self.hf) > 1 and not self.stacks_experts

    @property
    def packed_axis(self) -> int:
        """The axis of the native weight along which HF modules are concatenated."""
        axis = self.rule.pairs[0].pattern.native.index(str(self.rule.join))
        shape = self.shapes[self.native[0]]
        if axis == len(shape.inputs) + len(shape.outputs) - 1:
            raise ConfigError(
                f"{self.native[0]} has no layout for the adapters of {', '.join(self.hf)}: unset "
                "the key that fuses them"
            )
        return axis

    def a_shape(self, path: str, rank: int) -> Shape:
        shape = list(self.shapes[path].a_weight(rank))
        if self.packs_modules:
            full = self.shapes[path]
            shape[self.packed_axis] = (*full.inputs, *full.outputs)[self.packed_axis]
        return tuple(shape)

    def bind_a(self, rank: int) -> BoundRule:
        return self.bind({path: self.a_shape(path, rank) for path in self.native})

    def rows_of_a(self, rank: int) -> np.ndarray:
        """For each row of the HF tensor that A of all native layers form: layer · rank + row."""
        arrays = [
            np.broadcast_to(
                np.arange(index * rank, (index + 1) * rank, dtype=np.int32),
                self.shapes[path].a_weight(rank),
            )
            for index, path in enumerate(self.native)
        ]
        (rows,) = self.bind_a(rank).to_hf([np.ascontiguousarray(array) for array in arrays])
        return rows[:, 0]

    def hf_shapes(self, rank: int) -> list[tuple[Shape, Shape]]:
        a_shapes, b_shapes = self.bind_a(1).hf_shapes, self.bind_b(1).hf_shapes
        return [
            ((rank, a_shape[1]), (b_shape[0], rank))
            for a_shape, b_shape in zip(a_shapes, b_shapes, strict=True)
        ]

    def rank(self, a: np.ndarray) -> int:
        return a.shape[0]

    def to_native(self, factors: Sequence[Factors]) -> dict[str, Factors]:
        a_arrays = self.a_to_native([a for a, _ in factors])
        b_tensors = [b for _, b in factors]
        rank = a_arrays[0].shape[-1]
        if self.packs_modules:
            b_tensors = in_blocks(b_tensors, axis=1)
        b_arrays = self.bind_b(rank).to_native(b_tensors)
        return {
            path: (a, b.reshape(self.shapes[path].lora_b(rank)))
            for path, a, b in zip(self.native, a_arrays, b_arrays, strict=True)
        }

    def a_to_native(self, tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """A [r, in] of each HF module -> lora_a [*batch, *inputs, R] of each native layer."""
        if self.packs_modules:
            return [self.pack_a(tensors)]
        rank = tensors[0].shape[0]
        if not self.stacks_experts:
            tensors = [tensors[0][self.rows_of_a(rank) % rank]]
        arrays = self.bind_a(rank).to_native(tensors)
        return [
            array.reshape(self.shapes[path].lora_a(rank))
            for path, array in zip(self.native, arrays, strict=True)
        ]

    def pack_a(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """[*inputs, total rank] of a native layer that is several HF modules. The rule has copies
        of A along the packed axis; one of each module is taken."""
        rank, inputs = tensors[0].shape[0], self.shapes[self.native[0]].inputs
        bound = self.bind_a(rank)
        counts = [shape[0] // rank for shape in bound.hf_shapes]
        copies = [np.tile(a, (count, 1)) for a, count in zip(tensors, counts, strict=True)]
        (array,) = bound.to_native(copies)
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        parts = [np.take(array, first, axis=self.packed_axis) for first in firsts]
        return np.concatenate([part.reshape(*inputs, rank) for part in parts], axis=-1)

    def to_hf(self, factors: Mapping[str, Factors]) -> list[Factors]:
        all_factors, shares_a = self.pad(factors)
        a_arrays, b_arrays = ([*arrays] for arrays in zip(*all_factors.values(), strict=True))
        rank = a_arrays[0].shape[-1]
        if shares_a:
            a_arrays = [all_factors[next(iter(factors))][0]] * len(a_arrays)
        spread = [self.spread_a(path, a) for path, a in zip(self.native, a_arrays, strict=True)]
        a_tensors = list(self.bind_a(rank).to_hf(spread))
        if self.packs_modules:
            a_tensors = [tensor[:rank] for tensor in a_tensors]
        elif len(self.native) > 1:
            rows = np.argsort(self.rows_of_a(rank), kind="stable")
            a_tensors = [a_tensors[0][rows[:rank] if shares_a else rows]]
        if not shares_a:
            b_arrays = in_blocks(b_arrays, axis=0)
            rank *= len(b_arrays)
        b_weights = [
            b.reshape(self.shapes[path].b_weight(rank))
            for path, b in zip(self.native, b_arrays, strict=True)
        ]
        return list(zip(a_tensors, self.bind_b(rank).to_hf(b_weights), strict=True))

    def spread_a(self, path: str, a: np.ndarray) -> np.ndarray:
        """lora_a in the shape that the rule of A has, with copies along a packed axis."""
        rank = a.shape[-1]
        return np.ascontiguousarray(
            np.broadcast_to(a.reshape(self.shapes[path].a_weight(rank)), self.a_shape(path, rank))
        )

    # DoRA's magnitudes [out] are B of rank 1.

    def magnitudes_to_native(self, tensors: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        arrays = self.bind_b(1).to_native([tensor.reshape(-1, 1) for tensor in tensors])
        return {
            path: array.reshape(self.shapes[path].outputs)
            for path, array in zip(self.native, arrays, strict=True)
        }

    def magnitudes_to_hf(self, magnitudes: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        missing = [path for path in self.native if path not in magnitudes]
        if missing:
            raise ConfigError(
                f"DoRA of {self.hf[0]} needs adapters of all its parts, also of {missing[0]}"
            )
        arrays = [magnitudes[path].reshape(self.shapes[path].b_weight(1)) for path in self.native]
        return [tensor.reshape(-1) for tensor in self.bind_b(1).to_hf(arrays)]


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
    def shape(self) -> LinearShape:
        return self.shapes[self.native[0]]

    @property
    def experts(self) -> int:
        return self.shape.batch[0]

    @property
    def is_transposed(self) -> bool:
        """Whether the parameter is [X, I, O]."""
        pattern = self.rule.pairs[0].pattern
        return pattern.hf[1] == (pattern.native[-2],)

    def hf_shapes(self, rank: int, swapped: bool | None = None) -> list[tuple[Shape, Shape]]:
        """Exchanged as in this version of PEFT, unless `swapped` says otherwise."""
        inputs, outputs = self.shape.inputs[0], self.shape.outputs[0] * len(self.native)
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
        b_hf = b_XOr.transpose(0, 2, 1) if self.is_transposed else b_XOr
        b_arrays = self.bind_b(rank).to_native([np.ascontiguousarray(b_hf)])
        a_XIr = a_XrI.transpose(0, 2, 1)
        return {
            path: (np.ascontiguousarray(a_XIr[..., block]), np.ascontiguousarray(b_array[:, block]))
            for path, b_array, block in zip(
                self.native, b_arrays, diagonal_blocks(b_arrays), strict=True
            )
        }

    def to_hf(self, factors: Mapping[str, Factors]) -> list[Factors]:
        all_factors, shares_a = self.pad(factors)
        present = [path for path in self.native if path in factors]
        a_XIr = all_factors[present[0]][0]
        b_arrays = {path: b for path, (_, b) in all_factors.items()}
        if not shares_a:
            a_XIr = np.concatenate([all_factors[path][0] for path in present], axis=-1)
            blocks = in_blocks([b_arrays[path] for path in present], axis=1)
            b_arrays = dict(zip(present, blocks, strict=True))
        rank = a_XIr.shape[-1]
        zeros = np.zeros(self.shape.lora_b(rank), a_XIr.dtype)
        (b_hf,) = self.bind_b(rank).to_hf([b_arrays.get(path, zeros) for path in self.native])
        a_XrI = a_XIr.transpose(0, 2, 1)
        b_XOr = b_hf.transpose(0, 2, 1) if self.is_transposed else b_hf
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


def in_blocks(arrays: Sequence[np.ndarray], axis: int) -> list[np.ndarray]:
    """The arrays with zeros before and after them along an axis, so that no two overlap."""
    total, start, blocks = sum(array.shape[axis] for array in arrays), 0, []
    for array in arrays:
        shape = (*array.shape[:axis], total, *array.shape[axis + 1 :])
        block = np.zeros(shape, array.dtype)
        stop = start + array.shape[axis]
        block[(slice(None),) * axis + (slice(start, stop),)] = array
        blocks.append(block)
        start = stop
    return blocks


def padded(array: np.ndarray, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """The array with zeros at the end of each dimension; all zeros for an empty one."""
    if array.shape == tuple(shape):
        return array
    full = np.zeros(shape, dtype)
    if array.size:
        full[tuple(slice(size) for size in array.shape)] = array
    return full
