"""Modules of Hugging Face models and the native linear layers that they correspond to, and the
factors A and B of an adapter on both sides.

The tensor rules of a family say how the elements of a weight [out, in] are arranged natively, as
[*in_shape, *out_shape]. The same rule, bound to a model whose outputs (or inputs) are replaced by
the rank, arranges A [r, in] (or B [out, r]): rows and columns are copied, never computed.

A module of one side may be several of the other:
- one HF module, several native layers (qkv_proj -> query, key, value): each layer has a copy of A,
  and its rows of B. Layers with different A, of which some have no adapter, are written as one
  adapter of their total rank, in which B is zero outside the block of each layer.
- several HF modules, one native layer (q_proj, k_proj, v_proj -> qkv): the other way around.
- several HF modules, one for each expert: they are stacked.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxtext.checkpoint.tensors import Shape
from maxtext.common.errors import ConfigError
from maxtext.hf.bound_rule import BoundRule
from maxtext.hf.rules import Rule, placeholders

WEIGHT = "/weight"  # the end of a linear layer's weight in native names


@dataclass(frozen=True)
class LinearShape:
    """The shape of a native weight, [*batch, *inputs, *outputs]; experts are a batch."""

    batch: Shape
    inputs: Shape
    outputs: Shape

    def a(self, rank: int) -> Shape:
        """Of A as a weight whose outputs are the rank."""
        return (*self.batch, *self.inputs, *[1] * (len(self.outputs) - 1), rank)

    def b(self, rank: int) -> Shape:
        """Of B as a weight whose inputs are the rank."""
        return (*self.batch, *[1] * (len(self.inputs) - 1), rank, *self.outputs)


@dataclass(frozen=True)
class ModuleRule:
    """A rule of one layer: HF modules and native layers that share their elements."""

    rule: Rule
    layer: int | None
    hf: tuple[str, ...]
    native: tuple[str, ...]
    shapes: Mapping[str, LinearShape]  # by native layer

    @property
    def stacks_experts(self) -> bool:
        return self.rule.join is None and bool(placeholders(self.rule.hf_names[0]))

    def bind(self, shapes: Mapping[str, Shape]) -> BoundRule:
        bound = self.rule.bind({path + WEIGHT: shape for path, shape in shapes.items()}, self.layer)
        assert bound is not None, "the rule was bound to the shapes of the model before"
        return bound

    @property
    def merges_modules(self) -> bool:
        """Whether several HF modules are one native layer."""
        return len(self.hf) > 1 and not self.stacks_experts

    @property
    def merged_axis(self) -> int:
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
        shape = list(self.shapes[path].a(rank))
        if self.merges_modules:
            full = self.shapes[path]
            shape[self.merged_axis] = (*full.inputs, *full.outputs)[self.merged_axis]
        return tuple(shape)

    def bind_a(self, rank: int) -> BoundRule:
        return self.bind({path: self.a_shape(path, rank) for path in self.native})

    def bind_b(self, rank: int) -> BoundRule:
        return self.bind({path: self.shapes[path].b(rank) for path in self.native})

    def rows_of_a(self, rank: int) -> np.ndarray:
        """For each row of the HF tensor that A of all native layers form: layer · rank + row."""
        arrays = [
            np.broadcast_to(
                np.arange(index * rank, (index + 1) * rank, dtype=np.int32),
                self.shapes[path].a(rank),
            )
            for index, path in enumerate(self.native)
        ]
        (rows,) = self.bind_a(rank).to_hf([np.ascontiguousarray(array) for array in arrays])
        return rows[:, 0]

    # From HF to native.

    def a_to_native(self, tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """A [r, in] of each HF module -> lora_a [*batch, *inputs, R] of each native layer."""
        rank = tensors[0].shape[0]
        if self.stacks_experts:
            arrays = self.bind_a(rank).to_native(tensors)
        elif len(self.hf) == 1:
            arrays = self.bind_a(rank).to_native([tensors[0][self.rows_of_a(rank) % rank]])
        else:
            return [self.merge_a(tensors)]
        return [
            array.reshape(*self.shapes[path].batch, *self.shapes[path].inputs, rank)
            for array, path in zip(arrays, self.native, strict=True)
        ]

    def merge_a(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """[*inputs, total rank] of a native layer that is several HF modules. The rule has copies
        of A along the merged axis; one of each module is taken."""
        rank, inputs = tensors[0].shape[0], self.shapes[self.native[0]].inputs
        bound = self.bind_a(rank)
        counts = [shape[0] // rank for shape in bound.hf_shapes]
        copies = [np.tile(a, (count, 1)) for a, count in zip(tensors, counts, strict=True)]
        (array,) = bound.to_native(copies)
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        parts = [np.take(array, first, axis=self.merged_axis) for first in firsts]
        return np.concatenate([part.reshape(*inputs, rank) for part in parts], axis=-1)

    def b_to_native(self, tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        """B [out, r] of each HF module -> lora_b [*batch, R, *outputs] of each native layer."""
        rank = tensors[0].shape[1]
        if self.merges_modules:
            rank *= len(self.hf)
            tensors = [
                in_columns(tensor, index * tensor.shape[1], rank)
                for index, tensor in enumerate(tensors)
            ]
        arrays = self.bind_b(rank).to_native(tensors)
        return [
            array.reshape(*self.shapes[path].batch, rank, *self.shapes[path].outputs)
            for array, path in zip(arrays, self.native, strict=True)
        ]

    # From native to HF.

    def to_hf(
        self, factors: Mapping[str, tuple[np.ndarray, np.ndarray]]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """(A [R, in], B [out, R]) of each HF module from (lora_a, lora_b) of the native layers that
        have an adapter."""
        rank = max(a.shape[-1] for a, _ in factors.values())
        a_arrays, b_arrays = self.padded_factors(factors, rank)
        present = [a for a, path in zip(a_arrays, self.native, strict=True) if path in factors]
        shared = all(np.array_equal(present[0], a) for a in present)
        if shared:
            a_arrays = [present[0]] * len(a_arrays)
        a_tensors = list(self.bind_a(rank).to_hf([*map(self.spread_a, self.native, a_arrays)]))
        if self.merges_modules:
            a_tensors = [tensor[:rank] for tensor in a_tensors]
        elif len(self.native) > 1:
            rows = np.argsort(self.rows_of_a(rank), kind="stable")
            a_tensors = [a_tensors[0][rows[:rank] if shared else rows]]
        total = rank
        if not shared:
            total = rank * len(self.native)
            b_arrays = [in_rows(b, index * rank, total) for index, b in enumerate(b_arrays)]
        shapes = [self.shapes[path].b(total) for path in self.native]
        b_tensors = self.bind_b(total).to_hf(
            [b.reshape(shape) for b, shape in zip(b_arrays, shapes, strict=True)]
        )
        return list(zip(a_tensors, b_tensors, strict=True))

    def padded_factors(
        self, factors: Mapping[str, tuple[np.ndarray, np.ndarray]], rank: int
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """lora_a and lora_b of all native layers at one rank; zeros for layers without."""
        dtype = next(iter(factors.values()))[0].dtype
        nothing = np.zeros(0, dtype), np.zeros(0, dtype)
        a_arrays, b_arrays = [], []
        for path in self.native:
            shape = self.shapes[path]
            a, b = factors.get(path, nothing)
            a_arrays.append(padded(a, (*shape.batch, *shape.inputs, rank), dtype))
            b_arrays.append(padded(b, (*shape.batch, rank, *shape.outputs), dtype))
        return a_arrays, b_arrays

    def spread_a(self, path: str, a: np.ndarray) -> np.ndarray:
        """lora_a in the shape that the rule of A has, with copies along a merged axis."""
        rank = a.shape[-1]
        return np.ascontiguousarray(
            np.broadcast_to(a.reshape(self.shapes[path].a(rank)), self.a_shape(path, rank))
        )

    # DoRA's magnitudes [out] are B of rank 1.

    def magnitude_to_native(self, tensors: Sequence[np.ndarray]) -> list[np.ndarray]:
        arrays = self.bind_b(1).to_native([tensor.reshape(-1, 1) for tensor in tensors])
        return [
            array.reshape(self.shapes[path].outputs)
            for array, path in zip(arrays, self.native, strict=True)
        ]

    def magnitude_to_hf(self, magnitudes: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        missing = [path for path in self.native if path not in magnitudes]
        if missing:
            raise ConfigError(
                f"DoRA of {self.hf[0]} needs adapters of all its parts, also of {missing[0]}"
            )
        arrays = [magnitudes[path].reshape(self.shapes[path].b(1)) for path in self.native]
        return [tensor.reshape(-1) for tensor in self.bind_b(1).to_hf(arrays)]


def in_columns(tensor: np.ndarray, start: int, total: int) -> np.ndarray:
    """[out, total]: zeros but for the tensor from column `start` on."""
    wide = np.zeros((tensor.shape[0], total), tensor.dtype)
    wide[:, start : start + tensor.shape[1]] = tensor
    return wide


def in_rows(b: np.ndarray, start: int, total: int) -> np.ndarray:
    """[total, *outputs]: zeros but for b from row `start` on."""
    tall = np.zeros((total, *b.shape[1:]), b.dtype)
    tall[start : start + b.shape[0]] = b
    return tall


def padded(array: np.ndarray, shape: Shape, dtype: np.dtype) -> np.ndarray:
    """The array with zeros at the end of each dimension; all zeros for an empty one."""
    if array.shape == tuple(shape):
        return array
    full = np.zeros(shape, dtype)
    if array.size:
        full[tuple(slice(size) for size in array.shape)] = array
    return full
