"""Quantized Hugging Face checkpoints as sources of plain tensors: each in bfloat16 under its plain
name, without the scales. Memory holds one tensor, its codes, and a few of its blocks in float32.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from maxtext.checkpoint.tensors import DTYPE_NAMES, DTYPES, TensorInfo, TensorSource, raise_problems
from maxtext.hf.quantized import BF16, QuantizedFormat

FLOAT8_DTYPES = tuple(dtype for name, dtype in DTYPES.items() if name.startswith("F8_"))


@dataclass(frozen=True)
class QuantizedTensor:
    """The names of a quantized tensor's codes and scales, and the plain tensor that they encode."""

    codes: str
    scales: str
    plain: TensorInfo


@dataclass(frozen=True)
class Dequantized:
    """A source of quantized tensors as a source of plain ones."""

    source: TensorSource
    quantized_format: QuantizedFormat
    quantized: Mapping[str, QuantizedTensor]  # by plain names

    @classmethod
    def of(cls, source: TensorSource, quantized_format: QuantizedFormat) -> "Dequantized":
        """Match codes with scales. Raises UserError with every tensor that has no match."""
        quantized, problems = match_scales(source.tensors, quantized_format)
        raise_problems(source.title, problems)
        return cls(source, quantized_format, quantized)

    @property
    def title(self) -> str:
        return self.source.title

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        by_codes = {item.codes: (name, item.plain) for name, item in self.quantized.items()}
        scales = {item.scales for item in self.quantized.values()}
        return dict(
            by_codes.get(name, (name, tensor))
            for name, tensor in self.source.tensors.items()
            if name not in scales
        )

    def read(self, name: str) -> np.ndarray:
        item = self.quantized.get(name)
        if item is None:
            return self.source.read(name)
        codes, scales = self.source.read(item.codes), self.source.read(item.scales)
        return self.quantized_format.dequantize(codes, scales)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


def match_scales(
    tensors: Mapping[str, TensorInfo], fmt: QuantizedFormat
) -> tuple[dict[str, QuantizedTensor], list[str]]:
    """The quantized tensors by plain names, and what is wrong with them."""
    quantized: dict[str, QuantizedTensor] = {}
    problems: list[str] = []
    for name, tensor in tensors.items():
        if name.endswith(fmt.scale_suffix):
            codes = name.removesuffix(fmt.scale_suffix) + fmt.code_suffix
            if codes not in tensors:
                problems.append(f"{name} has no {codes} to scale")
            elif tensors[codes].dtype != fmt.code_dtype:
                problems.append(
                    f"{name} scales {codes}, which is {DTYPE_NAMES[tensors[codes].dtype]}"
                )
        elif name.endswith(fmt.code_suffix) and tensor.dtype == fmt.code_dtype:
            plain = name.removesuffix(fmt.code_suffix)
            scales = plain + fmt.scale_suffix
            shapes = fmt.shapes(tensor.shape)
            if shapes is None:
                problems.append(f"{name} has shape {list(tensor.shape)}, not {fmt.code_shape}")
            elif scales not in tensors:
                problems.append(f"{name} is {DTYPE_NAMES[tensor.dtype]} and has no {scales}")
            elif tensors[scales].dtype not in fmt.scale_dtypes:
                problems.append(
                    f"{scales} is {DTYPE_NAMES[tensors[scales].dtype]}, which is no dtype of scales"
                )
            elif tensors[scales].shape != shapes[0]:
                shape, needed = list(tensors[scales].shape), list(shapes[0])
                problems.append(
                    f"{scales} has shape {shape}, {name} {list(tensor.shape)} needs {needed}"
                )
            elif plain != name and plain in tensors:
                problems.append(f"{plain} and {name} are the same weight")
            else:
                quantized[plain] = QuantizedTensor(name, scales, TensorInfo(BF16, shapes[1]))
        elif tensor.dtype in FLOAT8_DTYPES:
            problems.append(
                f"{name} is {DTYPE_NAMES[tensor.dtype]}, which means nothing in this format"
            )
    return quantized, problems
