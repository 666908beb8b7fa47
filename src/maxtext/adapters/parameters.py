"""Adapters of experts that are one parameter of a Hugging Face model (PEFT's target_parameters).

Shapes: X experts, r rank, I inputs, O outputs.

transformers holds the weights of all experts in the parameters gate_up_proj and down_proj, which
are [X, O, I] or [X, I, O]. PEFT's factors of such a parameter are A [X r, I], one expert after the
other, and B [O, r X], whose columns count the experts fastest. gate and up, which are two layers
here, have a copy of A and their rows of B each. If they have different A, the parameter has their
total rank, and B is zero outside the block of each; such blocks are read as they were written.

The tensors have the name of the module with the parameters. The last parameter with an adapter has
`experts.lora_A`, the one before `experts.base_layer.lora_A`: PEFT wraps the module once for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from maxtext.adapters import peft
from maxtext.adapters.binding import WEIGHT, LinearShape, padded
from maxtext.checkpoint.tensors import Shape
from maxtext.hf.bound_rule import BoundRule
from maxtext.hf.rules import Rule

Factors = tuple[np.ndarray, np.ndarray]  # A and B


@dataclass(frozen=True)
class ParameterRule:
    """A parameter of all experts of one layer, and the native layers that have its elements."""

    rule: Rule
    layer: int | None
    name: str  # of the HF parameter
    native: tuple[str, ...]
    shape: LinearShape  # of each native layer
    # PEFT takes the inputs of the parameter for its outputs: A and B are exchanged.
    swapped: bool

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def experts(self) -> int:
        return self.shape.batch[0]

    @property
    def inputs(self) -> int:
        return self.shape.inputs[0]

    @property
    def outputs(self) -> int:
        return self.shape.outputs[0] * len(self.native)

    @property
    def is_transposed(self) -> bool:
        """Whether the parameter is [X, I, O]."""
        pattern = self.rule.pairs[0].pattern
        return pattern.hf[1] == (pattern.native[-2],)

    def factor_shapes(self, rank: int, swapped: bool | None = None) -> tuple[Shape, Shape]:
        """Those of PEFT's A and B, exchanged as in this version of PEFT by default."""
        inputs, outputs = self.inputs, self.outputs
        if self.swapped if swapped is None else swapped:
            inputs, outputs = outputs, inputs
        return (self.experts * rank, inputs), (outputs, rank * self.experts)

    def is_swapped(self, a: Shape, b: Shape, rank: int) -> bool | None:
        """Whether tensors of these shapes are exchanged; None if they do not fit. Early versions
        of PEFT exchanged none, so that the shapes decide wherever they differ."""
        fits = [
            swapped
            for swapped in (self.swapped, not self.swapped)
            if self.factor_shapes(rank, swapped) == (tuple(a), tuple(b))
        ]
        return fits[0] if fits else None

    def bind_b(self, rank: int) -> BoundRule:
        """The rule of a parameter whose inputs are the rank."""
        shapes = {path + WEIGHT: self.shape.b(rank) for path in self.native}
        bound = self.rule.bind(shapes, self.layer)
        assert bound is not None, "the rule was bound to the shapes of the model before"
        return bound

    def to_native(self, a: np.ndarray, b: np.ndarray, swapped: bool) -> dict[str, Factors]:
        """(lora_a [X, I, r], lora_b [X, r, O]) of each native layer, by path."""
        rank = a.shape[0] // self.experts
        a_XrI = a.reshape(self.experts, rank, -1)
        b_XOr = b.reshape(-1, rank, self.experts).transpose(2, 0, 1)
        if swapped:
            a_XrI, b_XOr = (factor.transpose(0, 2, 1) for factor in (b_XOr, a_XrI))
        b_hf = b_XOr.transpose(0, 2, 1) if self.is_transposed else b_XOr
        b_arrays = self.bind_b(rank).to_native([np.ascontiguousarray(b_hf)])
        a_array = np.ascontiguousarray(a_XrI.transpose(0, 2, 1))
        blocks = diagonal_blocks(b_arrays)
        return {
            path: (
                np.ascontiguousarray(a_array[..., block]),
                np.ascontiguousarray(b_array[:, block]),
            )
            for path, b_array, block in zip(self.native, b_arrays, blocks, strict=True)
        }

    def to_hf(self, factors: Mapping[str, Factors]) -> Factors:
        """PEFT's (A, B) from (lora_a, lora_b) of the native layers that have an adapter."""
        present = [path for path in self.native if path in factors]
        rank = max(a.shape[-1] for a, _ in factors.values())
        dtype = factors[present[0]][0].dtype
        a_shape, b_shape = self.shape.a(rank), self.shape.b(rank)
        a_arrays = [padded(factors[path][0], a_shape, dtype) for path in present]
        b_arrays = {path: padded(factors[path][1], b_shape, dtype) for path in present}
        if not all(np.array_equal(a_arrays[0], a) for a in a_arrays):
            total = rank * len(present)
            b_arrays = {
                path: in_block(b, index * rank, total)
                for index, (path, b) in enumerate(b_arrays.items())
            }
            a_arrays = [np.concatenate(a_arrays, axis=-1)]
            rank = total
        zeros = np.zeros(self.shape.b(rank), dtype)
        (b_hf,) = self.bind_b(rank).to_hf([b_arrays.get(path, zeros) for path in self.native])
        a_XrI = a_arrays[0].transpose(0, 2, 1)
        b_XOr = b_hf.transpose(0, 2, 1) if self.is_transposed else b_hf
        if self.swapped:
            a_XrI, b_XOr = (factor.transpose(0, 2, 1) for factor in (b_XOr, a_XrI))
        a = a_XrI.reshape(self.experts * rank, -1)
        b = b_XOr.transpose(1, 2, 0).reshape(-1, rank * self.experts)
        return np.ascontiguousarray(a), np.ascontiguousarray(b)


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


def in_block(b: np.ndarray, start: int, total: int) -> np.ndarray:
    """[X, total, O]: zeros but for b from rank `start` on."""
    wide = np.zeros((b.shape[0], total, b.shape[2]), b.dtype)
    wide[:, start : start + b.shape[1]] = b
    return wide


def nested_name(module: str, depth: int) -> str:
    """The name under which a folder has a parameter of a module that PEFT wrapped `depth` more
    times."""
    return module + peft.BASE_LAYER * depth


def owner(name: str) -> str:
    """The module of such a name."""
    while name.endswith(peft.BASE_LAYER):
        name = name.removesuffix(peft.BASE_LAYER)
    return name
