"""The quantized formats in which Hugging Face checkpoints are published.

The value of an element is that of its code times the scale of its block, computed in float32:

- fp8 (DeepSeek 3, Kimi K2): X is F8_E4M3 [..., O, I], X_scale_inv [..., ⌈O / rows⌉, ⌈I / columns⌉]
  has a scale for each block of a matrix. weight_block_size gives the rows and columns of a block;
  the last blocks may be smaller.
- mxfp4 (gpt-oss): X_blocks is U8 [X, O, G, 16], 32 codes of four bits for each of G groups, the
  lower half of a byte first; X_scales is U8 [X, O, G], exponents of 2 with a bias of 127. The plain
  X is [X, I, O], I = 32 G.

Shapes: X experts, O outputs, I inputs, G groups of 32 inputs.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import ml_dtypes
import numpy as np

from maxtext.common.errors import UserError
from maxtext.common.types import Json
from maxtext.hf.rules import Shape

BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
U8 = np.dtype(np.uint8)
FLOATS = (np.dtype(np.float64), np.dtype(np.float32), np.dtype(np.float16), BF16)
GROUP = 32  # inputs that share a scale in mxfp4
# The values of a byte: one in fp8; in mxfp4 two, each with a sign bit, two bits of exponent and one
# of mantissa.
FLOAT8_VALUES = np.arange(256, dtype=U8).view(E4M3).astype(np.float32)
FLOAT4_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
FLOAT4_PAIRS = np.stack(
    [FLOAT4_VALUES[np.arange(256) % 16], FLOAT4_VALUES[np.arange(256) // 16]], axis=-1
)
THREADS = min(8, os.cpu_count() or 1)  # NumPy releases the GIL in all operations below


class QuantizedFormat(Protocol):
    """The names and shapes of codes and scales, and the values that they encode."""

    code_suffix: ClassVar[str]  # of a quantized tensor's name, after the plain name
    scale_suffix: ClassVar[str]
    code_dtype: ClassVar[np.dtype]
    scale_dtypes: ClassVar[tuple[np.dtype, ...]]
    code_shape: ClassVar[str]  # for messages

    def shapes(self, codes: Shape) -> tuple[Shape, Shape] | None:
        """The shapes of the scales and of the plain tensor; None if codes cannot have this
        shape.
        """

    def dequantize(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray: ...


@dataclass(frozen=True)
class BlockFloat8:
    """A scale for each block of rows and columns."""

    rows: int
    columns: int

    code_suffix: ClassVar[str] = ""
    scale_suffix: ClassVar[str] = "_scale_inv"
    code_dtype: ClassVar[np.dtype] = E4M3
    scale_dtypes: ClassVar[tuple[np.dtype, ...]] = (*FLOATS, E8M0)
    code_shape: ClassVar[str] = "[..., outputs, inputs]"

    def shapes(self, codes: Shape) -> tuple[Shape, Shape] | None:
        if len(codes) < 2:
            return None
        *others, outputs, inputs = codes
        return (*others, -(-outputs // self.rows), -(-inputs // self.columns)), codes

    def dequantize(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        codes, scales = codes.view(U8), scales.astype(np.float32)
        values = np.empty(codes.shape, BF16)

        def dequantize_block_row(index: tuple[int, ...]) -> None:
            first = index[-1] * self.rows
            rows: tuple[Any, ...] = (*index[:-1], slice(first, first + self.rows))
            float32_values = np.take(FLOAT8_VALUES, codes[rows])
            float32_values *= np.repeat(scales[index], self.columns)[: codes.shape[-1]]
            values[rows] = float32_values

        run_in_threads(dequantize_block_row, np.ndindex(scales.shape[:-1]))
        return values


@dataclass(frozen=True)
class MicroscalingFloat4:
    """A power of two for each group of 32 inputs of an output."""

    code_suffix: ClassVar[str] = "_blocks"
    scale_suffix: ClassVar[str] = "_scales"
    code_dtype: ClassVar[np.dtype] = U8
    scale_dtypes: ClassVar[tuple[np.dtype, ...]] = (U8,)
    code_shape: ClassVar[str] = f"[experts, outputs, groups, {GROUP // 2}]"

    def shapes(self, codes: Shape) -> tuple[Shape, Shape] | None:
        if len(codes) != 4 or codes[-1] != GROUP // 2:
            return None
        experts, outputs, groups, _ = codes
        return (experts, outputs, groups), (experts, groups * GROUP, outputs)

    def dequantize(self, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
        experts, outputs, groups, _ = codes.shape
        values = np.empty((experts, groups * GROUP, outputs), BF16)

        def dequantize_expert(expert: int) -> None:
            pairs = np.take(FLOAT4_PAIRS, codes[expert], axis=0)
            float32_values = pairs.reshape(outputs, groups, GROUP)
            float32_values *= scales[expert].view(E8M0).astype(np.float32)[..., None]
            values[expert] = float32_values.astype(BF16).reshape(outputs, -1).T

        run_in_threads(dequantize_expert, range(experts))
        return values


def run_in_threads(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(function, items):
            pass  # an error in a thread is raised here


def quantized_format(hf_config: Json, source: str) -> QuantizedFormat | None:
    """The format of the weights that a config.json describes; None if they are not quantized.

    Raises UserError for a format that is not supported.
    """
    configs = (hf_config, hf_config.get("text_config"))
    stated = next(
        (
            entry
            for config in configs
            if isinstance(config, dict) and (entry := config.get("quantization_config"))
        ),
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
        supported = {"fmt": "e4m3", "activation_scheme": "dynamic", "expert_dtype": "fp8"}
        unsupported = [
            f"{key}={stated[key]}"
            for key, value in supported.items()
            if stated.get(key, value) != value
        ]
        if not (
            isinstance(block, list)
            and len(block) == 2
            and all(isinstance(n, int) and n > 0 for n in block)
        ):
            unsupported.append(f"weight_block_size={block}")
        if not unsupported:
            return BlockFloat8(*block)
        method = ", ".join([method, *unsupported])
    raise UserError(
        f"{source}: the weights are quantized ({method}): load the folder with transformers, "
        "dequantize it, save it with save_pretrained, and use that folder"
    )
