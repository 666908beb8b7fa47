"""Quantized checkpoints, read as if they were plain: every tensor in bfloat16 under its plain name,
the scales unseen.

Two schemes are published. A value is what its code stands for times the scale of its block,
computed in float32:

- fp8 (DeepSeek 3, Kimi K2): X is F8_E4M3 [..., O, I], X_scale_inv [..., ⌈O / rows⌉, ⌈I / columns⌉]
  has a scale for each block of a matrix. weight_block_size says how many rows and columns it has;
  the last ones may have fewer.
- mxfp4 (gpt-oss): X_blocks is U8 [X, O, G, 16], 32 codes of four bits for each of G groups, the
  lower half of a byte first; X_scales is U8 [X, O, G], exponents of 2 with a bias of 127. The plain
  X is [X, I, O], I = 32 G.

Tensors that are not quantized pass as they are. Memory holds one tensor, its codes, and a few of
its blocks in float32.

Shapes: X experts, O outputs, I inputs, G groups of 32 inputs.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np

from maxtext.checkpoint.tensors import (
    DTYPE_NAMES,
    DTYPES,
    FLOATS,
    Shape,
    TensorInfo,
    TensorSource,
    raise_problems,
)
from maxtext.common.errors import UserError

Json = dict[str, Any]

BF16, E4M3, E8M0, U8 = (DTYPES[name] for name in ("BF16", "F8_E4M3", "F8_E8M0", "U8"))
EIGHT_BIT_FLOATS = tuple(dtype for name, dtype in DTYPES.items() if name.startswith("F8_"))
GROUP = 32  # inputs that share a scale in mxfp4
# What a byte stands for: one value in fp8; in mxfp4 two, of one sign bit, two of exponent and one
# of mantissa each.
FLOAT8_VALUES = np.arange(256, dtype=U8).view(E4M3).astype(np.float32)
FLOAT4_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
FLOAT4_PAIRS = np.stack(
    [FLOAT4_VALUES[np.arange(256) % 16], FLOAT4_VALUES[np.arange(256) // 16]], axis=-1
)
THREADS = min(8, os.cpu_count() or 1)  # numpy lets go of the interpreter in all that is done here


class Scheme(Protocol):
    """How codes and scales are named, what shapes they have, and what values they make."""

    code_ending: ClassVar[str]  # of a quantized tensor's name, after the plain name
    scale_ending: ClassVar[str]
    code_dtype: ClassVar[np.dtype]
    scale_dtypes: ClassVar[tuple[np.dtype, ...]]
    code_shape: ClassVar[str]  # for messages

    def shapes(self, codes: Shape) -> tuple[Shape, Shape] | None:
        """Of the scales and of the plain tensor; None if codes cannot have this shape."""

    def values(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class BlockFloat8:
    """A scale for each block of rows and columns."""

    rows: int
    columns: int

    code_ending: ClassVar[str] = ""
    scale_ending: ClassVar[str] = "_scale_inv"
    code_dtype: ClassVar[np.dtype] = E4M3
    scale_dtypes: ClassVar[tuple[np.dtype, ...]] = (*FLOATS, E8M0)
    code_shape: ClassVar[str] = "[..., outputs, inputs]"

    def shapes(self, codes: Shape) -> tuple[Shape, Shape] | None:
        if len(codes) < 2:
            return None
        *others, outputs, inputs = codes
        return (*others, -(-outputs // self.rows), -(-inputs // self.columns)), codes

    def values(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        codes, scales = codes.view(U8), scales.astype(np.float32)
        values = np.empty(codes.shape, BF16)

        def fill(at: tuple[int, ...]) -> None:
            first = at[-1] * self.rows
            here: tuple[Any, ...] = (*at[:-1], slice(first, first + self.rows))
            wide = np.take(FLOAT8_VALUES, codes[here])
            wide *= np.repeat(scales[at], self.columns)[: codes.shape[-1]]
            values[here] = wide

        in_threads(fill, np.ndindex(scales.shape[:-1]))
        return values


@dataclass(frozen=True)
class MicroscalingFloat4:
    """A power of two for each group of 32 inputs of an output."""

    code_ending: ClassVar[str] = "_blocks"
    scale_ending: ClassVar[str] = "_scales"
    code_dtype: ClassVar[np.dtype] = U8
    scale_dtypes: ClassVar[tuple[np.dtype, ...]] = (U8,)
    code_shape: ClassVar[str] = f"[experts, outputs, groups, {GROUP // 2}]"

    def shapes(self, codes: Shape) -> tuple[Shape, Shape] | None:
        if len(codes) != 4 or codes[-1] != GROUP // 2:
            return None
        experts, outputs, groups, _ = codes
        return (experts, outputs, groups), (experts, groups * GROUP, outputs)

    def values(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        experts, outputs, groups, _ = codes.shape
        values = np.empty((experts, groups * GROUP, outputs), BF16)

        def fill(expert: int) -> None:
            wide = np.take(FLOAT4_PAIRS, codes[expert], axis=0).reshape(outputs, groups, GROUP)
            wide *= scales[expert].view(E8M0).astype(np.float32)[..., None]
            values[expert] = wide.astype(BF16).reshape(outputs, -1).T

        in_threads(fill, range(experts))
        return values


def in_threads(work: Callable[[Any], None], items: Iterable[Any]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(work, items):
            pass  # an error in a thread is raised here


def scheme_of(hf: Json, place: str) -> Scheme | None:
    """How the weights that a config.json describes are quantized; None: they are not."""
    places = (hf, hf.get("text_config"))
    stated = next(
        (one for it in places if isinstance(it, dict) and (one := it.get("quantization_config"))),
        None,
    )
    if stated is None:
        return None
    stated = stated if isinstance(stated, dict) else {}
    method = stated.get("quant_method", "unknown")
    if method == "mxfp4":
        return MicroscalingFloat4()
    if method == "fp8":
        block: Any = stated.get("weight_block_size")
        known = {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"}
        other = [
            f"{key}={stated[key]}"
            for key, value in known.items()
            if stated.get(key, value) != value
        ]
        if not (
            isinstance(block, list)
            and len(block) == 2
            and all(isinstance(n, int) and n > 0 for n in block)
        ):
            other.append(f"weight_block_size={block}")
        if not other:
            return BlockFloat8(*block)
        method = ", ".join([method, *other])
    raise UserError(
        f"{place}: the weights are quantized ({method}): load the folder with transformers, dequantize it, save it "
        "with save_pretrained, and use that folder"
    )


@dataclass(frozen=True)
class Packed:
    """A quantized tensor: where its two parts are, and what it will be."""

    codes: str
    scales: str
    plain: TensorInfo


@dataclass(frozen=True)
class Dequantized:
    """A source of quantized tensors as a source of plain ones."""

    source: TensorSource
    scheme: Scheme
    packed: Mapping[str, Packed]  # by plain names

    @classmethod
    def of(cls, source: TensorSource, scheme: Scheme) -> "Dequantized":
        """Pair codes with scales; all that does not pair is one error."""
        packed, problems = pair(source.tensors, scheme)
        raise_problems(source.title, problems)
        return cls(source, scheme, packed)

    @property
    def title(self) -> str:
        return self.source.title

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        by_codes = {one.codes: (name, one.plain) for name, one in self.packed.items()}
        scales = {one.scales for one in self.packed.values()}
        return dict(
            by_codes.get(name, (name, it))
            for name, it in self.source.tensors.items()
            if name not in scales
        )

    def read(self, name: str) -> np.ndarray:
        one = self.packed.get(name)
        if one is None:
            return self.source.read(name)
        return self.scheme.values(self.source.read(one.codes), self.source.read(one.scales))

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


def pair(tensors: Mapping[str, TensorInfo], scheme: Scheme) -> tuple[dict[str, Packed], list[str]]:
    """The quantized tensors by plain names, and what is wrong with them."""
    packed: dict[str, Packed] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        if name.endswith(scheme.scale_ending):
            codes = name.removesuffix(scheme.scale_ending) + scheme.code_ending
            if codes not in tensors:
                problems.append(f"{name} has no {codes} to scale")
            elif tensors[codes].dtype != scheme.code_dtype:
                problems.append(
                    f"{name} scales {codes}, which is {DTYPE_NAMES[tensors[codes].dtype]}"
                )
        elif name.endswith(scheme.code_ending) and tensor.dtype == scheme.code_dtype:
            plain = name.removesuffix(scheme.code_ending)
            scales = plain + scheme.scale_ending
            shapes = scheme.shapes(tensor.shape)
            if shapes is None:
                problems.append(f"{name} has shape {list(tensor.shape)}, not {scheme.code_shape}")
            elif scales not in tensors:
                problems.append(f"{name} is {DTYPE_NAMES[tensor.dtype]} and has no {scales}")
            elif tensors[scales].dtype not in scheme.scale_dtypes:
                problems.append(
                    f"{scales} is {DTYPE_NAMES[tensors[scales].dtype]}, which is no dtype of scales"
                )
            elif tensors[scales].shape != shapes[0]:
                found, needed = list(tensors[scales].shape), list(shapes[0])
                problems.append(
                    f"{scales} has shape {found}, {name} {list(tensor.shape)} needs {needed}"
                )
            elif plain != name and plain in tensors:
                problems.append(f"{plain} and {name} are the same weight")
            else:
                packed[plain] = Packed(name, scales, TensorInfo(BF16, shapes[1]))
        elif tensor.dtype in EIGHT_BIT_FLOATS:
            problems.append(
                f"{name} is {DTYPE_NAMES[tensor.dtype]}, which means nothing in this scheme"
            )
    return packed, problems
