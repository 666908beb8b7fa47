"""Quantized weights on disk and their loading: native folders, and Hugging Face checkpoints.

`load_model` and `load_base` quantize weights while a checkpoint is loaded, one at a time.

`QuantizedFolder` reads a native folder of quantized weights, and `PackedWeights` has the tensors of
one. It is a folder by layer (weights.safetensors …) with two tensors for each quantized weight.
NAME has its codes: F8_E4M3, I8, or for int4 U8 with two values in a byte, neighbours along the last
axis, the first in the lower half. NAME.scale has its scales, F32, as in `QuantizedWeight`. In mxfp4
both are U8 as `QuantizedWeight` has them. Its
config.yml sets quantization and checkpoint_is_quantized. Readers of plain tensors get float32.

`Dequantized` reads a quantized Hugging Face checkpoint as plain tensors: each in bfloat16 under its
plain name, without the scales. Memory holds one tensor, its codes, and a few of its blocks in
float32.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import jax
import ml_dtypes
import numpy as np

from maxtext.checkpoint.safetensors_reader import SafetensorsFolder
from maxtext.checkpoint.tensors import (
    DTYPE_NAMES,
    DTYPES,
    Progress,
    RenamedTensors,
    Shape,
    TensorInfo,
    TensorSource,
    raise_problems,
    shape_mismatch,
)
from maxtext.checkpoint.weights import (
    LoadLeaf,
    ModelWeights,
    ParamInfo,
    ParamPath,
    load_leaf,
    load_weights,
)
from maxtext.common.errors import ConfigError
from maxtext.common.trees import flatten_dict
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.hf.quantized import BF16, QuantizedFormat
from maxtext.kernels.weight_only import MXFP4, MXFP4_GROUP, QuantizedWeight, quantize_weight
from maxtext.layers.parameters import Template
from maxtext.layers.quantized import abstract_quantized
from maxtext.sharding import AxisRules

SCALE = ".scale"
F32, I8, U8 = DTYPES["F32"], DTYPES["I8"], DTYPES["U8"]
CODES = {"fp8": DTYPES["F8_E4M3"], "int8": I8, "int4": np.dtype(ml_dtypes.int4), "mxfp4": U8}
STORED = CODES | {"int4": U8}


def quantized_weight_dtype(config: MaxTextConfig) -> str | None:
    """The format of quantized weights, fp8, int8, int4 or mxfp4; None if all are floats."""
    dtype = config.quantization.value if config.quantization else None
    dtype = "fp8" if dtype == "fp8_gpu" else dtype
    if dtype not in (None, *CODES):
        raise ConfigError(
            f"quantization={dtype} ({config.source('quantization')}) is for training: use fp8, "
            "int8, int4 or mxfp4 to quantize weights for inference, or leave it out"
        )
    return dtype


@dataclass(frozen=True)
class QuantizedFolder:
    """A folder of quantized weights as a source of plain tensors. `integers` and `scales` are
    sources of the quantized weights' parts.
    """

    folder: TensorSource
    dtype: str  # fp8, int8, int4 or mxfp4

    @classmethod
    def of(cls, folder: SafetensorsFolder, dtype: str) -> "QuantizedFolder":
        """Pair integers with their scales. Raises UserError with all tensors that do not pair."""
        problems = []
        for name, tensor in folder.tensors.items():
            scale = folder.tensors.get(name + SCALE)
            if name.endswith(SCALE) and name.removesuffix(SCALE) not in folder.tensors:
                problems.append(f"{name} has no weight to scale")
            elif scale is None and not name.endswith(SCALE) and tensor.dtype in STORED.values():
                problems.append(f"{name} has codes and has no {name}{SCALE}")
            elif scale is not None and not is_weight_and_scale(tensor, scale, dtype):
                problems.append(
                    f"{name} {list(tensor.shape)} and {name}{SCALE} {list(scale.shape)} are not "
                    f"an {dtype} weight and its scales"
                )
        raise_problems(folder.title, problems)
        return cls(folder, dtype)

    @property
    def title(self) -> str:
        return self.folder.title

    @cached_property
    def scales(self) -> RenamedTensors:
        stored = self.folder.tensors
        return RenamedTensors(
            self.folder, {name: name + SCALE for name in stored if name + SCALE in stored}
        )

    @cached_property
    def integers(self) -> "IntegerTensors":
        return IntegerTensors(self.folder, self.dtype, self.scales.tensors)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """The dequantized tensors."""
        integers = self.integers.tensors
        return {
            name: TensorInfo(F32, plain_shape(integers[name].shape, self.dtype))
            if name in integers
            else tensor
            for name, tensor in self.folder.tensors.items()
            if not name.endswith(SCALE)
        }

    def read(self, name: str) -> np.ndarray:
        if name not in self.scales.tensors:
            return self.folder.read(name)
        packed = MXFP4 if self.dtype == MXFP4 else ""
        weight = QuantizedWeight(self.integers.read(name), self.scales.read(name), packed)
        return np.asarray(weight.astype(F32))

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


@dataclass(frozen=True)
class IntegerTensors:
    """The integers of a folder's quantized weights, unpacked to one value in an element but for
    mxfp4."""

    folder: TensorSource
    dtype: str
    scales: Mapping[str, TensorInfo]

    @property
    def title(self) -> str:
        return self.folder.title

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        if self.dtype == MXFP4:
            return {name: self.folder.tensors[name] for name in self.scales}
        # The last axis is an output axis, and each output has a scale of its own, so that the
        # scales have the unpacked length.
        return {
            name: TensorInfo(
                CODES[self.dtype], (*self.folder.tensors[name].shape[:-1], scale.shape[-1])
            )
            for name, scale in self.scales.items()
        }

    def read(self, name: str) -> np.ndarray:
        stored = self.folder.read(name)
        return stored if self.dtype != "int4" else unpack(stored, self.tensors[name].shape[-1])


def is_weight_and_scale(weight: TensorInfo, scale: TensorInfo, dtype: str) -> bool:
    """Whether two stored tensors can be the integers and the scales of one weight."""
    scale_dtype = U8 if dtype == MXFP4 else F32
    if weight.dtype != STORED[dtype] or scale.dtype != scale_dtype:
        return False
    if len(weight.shape) != len(scale.shape):
        return False
    *leading, last = weight.shape
    if dtype == MXFP4:
        return leading == [*scale.shape[:-1]] and 2 * last == MXFP4_GROUP * scale.shape[-1]
    divides = all(
        groups and size % groups == 0
        for size, groups in zip(leading, scale.shape[:-1], strict=True)
    )
    return divides and last == (-(-scale.shape[-1] // 2) if dtype == "int4" else scale.shape[-1])


def plain_shape(shape: Shape, dtype: str) -> Shape:
    """The shape of the weight with codes of this shape, unpacked but for mxfp4."""
    if dtype != MXFP4:
        return shape
    *outer, columns, half = shape
    return (*outer, 2 * half, columns)


def pack(values: np.ndarray) -> np.ndarray:
    """int4 [..., n] -> U8 [..., ⌈n / 2⌉]."""
    nibbles = values.astype(I8).view(U8) & 0xF
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.zeros_like(nibbles[..., :1])], axis=-1)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def unpack(stored: np.ndarray, length: int) -> np.ndarray:
    """U8 [..., ⌈n / 2⌉] -> int4 [..., n], where n is `length`."""
    nibbles = np.stack([stored & 0xF, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)[
        ..., :length
    ]
    return ((nibbles ^ 8).astype(I8) - 8).astype(CODES["int4"])  # the highest bit is the sign


@dataclass(frozen=True)
class PackedWeights:
    """A model's weights in the format of a `QuantizedFolder`, with int4 packed. Weights that are
    not quantized are plain tensors.
    """

    model: ModelWeights

    @property
    def title(self) -> str:
        return self.model.title

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        tensors = {}
        for name, info in self.model.param_infos.items():
            leaf = self.model.leaves[info.path]
            if not isinstance(leaf, QuantizedWeight):
                tensors[name] = self.model.tensors[name]
                continue
            dtype = leaf.format
            if dtype == MXFP4:
                tensors[name] = TensorInfo(U8, layer_shape(leaf.qvalue.shape, info))
                tensors[name + SCALE] = TensorInfo(U8, layer_shape(leaf.scale.shape, info))
                continue
            last = -(-info.shape[-1] // 2) if dtype == "int4" else info.shape[-1]
            tensors[name] = TensorInfo(STORED[dtype], (*info.shape[:-1], last))
            tensors[name + SCALE] = TensorInfo(F32, layer_shape(leaf.scale.shape, info))
        return tensors

    def read(self, name: str) -> np.ndarray:
        weight = self.model.get(name.removesuffix(SCALE))
        if not isinstance(weight, QuantizedWeight):
            return np.asarray(weight)
        if name.endswith(SCALE):
            return np.asarray(weight.scale)
        values = np.asarray(weight.qvalue)
        return pack(values) if weight.format == "int4" else values

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


def layer_shape(shape: Shape, info: ParamInfo) -> Shape:
    """The shape of one layer, without the stack axis."""
    if info.stack_index is None:
        return shape
    return shape[: info.stack_axis] + shape[info.stack_axis + 1 :]


def load_model(
    source: TensorSource,
    config: MaxTextConfig,
    param_infos: Mapping[str, ParamInfo],
    template: Template,
    rules: AxisRules,
    progress: Progress | None = None,
) -> Tree:
    """Load the weights of a model for inference, quantized as its configuration says, onto their
    devices.

    A weight is quantized as soon as it is loaded, so that one weight at a time is in floats.
    """
    dtype = quantized_weight_dtype(config)
    folder = source if isinstance(source, QuantizedFolder) else None
    if config.checkpoint_is_quantized and folder is None:
        raise ConfigError(
            f"checkpoint_is_quantized=true, but {source.title} has no quantized weights: leave the "
            "key out"
        )
    if folder is not None and dtype != folder.dtype:
        raise ConfigError(
            f"quantization={dtype or ''!r}, but {folder.title} has weights in {folder.dtype} "
            "already: leave the key out, or load the folder that they were made from"
        )
    axes, weights = abstract_quantized(template, dtype)
    quantized_leaves = {
        path: leaf
        for path, leaf in flatten_dict(weights).items()
        if isinstance(leaf, QuantizedWeight)
    }
    if folder is not None:
        raise_problems(folder.title, mismatches(folder, param_infos, quantized_leaves))

    load_floats = quantizing_loader(source, template, quantized_leaves, dtype)

    def load(
        path: ParamPath,
        params: Mapping[str, ParamInfo],
        leaf: TensorInfo,
        sharding: Tree,
        host_bytes: int,
    ) -> Tree:
        if path not in quantized_leaves or folder is None:
            return load_floats(path, params, leaf, sharding, host_bytes)
        values, scale = (
            TensorInfo(np.dtype(array.dtype), array.shape)
            for array in jax.tree.leaves(quantized_leaves[path])
        )
        return QuantizedWeight(
            load_leaf(folder.integers, params, values, sharding.qvalue, host_bytes),
            load_leaf(folder.scales, params, scale, sharding.scale, host_bytes),
            quantized_leaves[path].packed,
        )

    shardings = rules.shardings(axes, weights)
    return load_weights(source, param_infos, template, shardings, progress=progress, load=load)


def load_base(
    source: TensorSource,
    param_infos: Mapping[str, ParamInfo],
    template: Template,
    rules: AxisRules,
    dtype: str | None = None,
    group: int | None = None,
    progress: Progress | None = None,
) -> Tree:
    """Load the frozen weights under adapters. With a `dtype` (QLoRA), each is quantized to int8,
    int4 or nf4 as soon as it is loaded; see `quantize_base`. `template` is of the model without
    adapters."""
    axes, weights = abstract_quantized(template, dtype, group, head=False)
    quantized_leaves = {
        path: leaf
        for path, leaf in flatten_dict(weights).items()
        if isinstance(leaf, QuantizedWeight)
    }
    load = quantizing_loader(source, template, quantized_leaves, dtype, group)
    shardings = rules.shardings(axes, weights)
    return load_weights(source, param_infos, template, shardings, progress=progress, load=load)


def quantizing_loader(
    source: TensorSource,
    template: Template,
    quantized_leaves: Mapping[ParamPath, QuantizedWeight],
    dtype: str | None,
    group: int | None = None,
) -> LoadLeaf:
    """Loads leaves, and quantizes some of them."""
    contracted = flatten_dict(template.contracted)

    def load(
        path: ParamPath,
        params: Mapping[str, ParamInfo],
        leaf: TensorInfo,
        sharding: Tree,
        host_bytes: int,
    ) -> Tree:
        if path not in quantized_leaves:
            return load_leaf(source, params, leaf, sharding, host_bytes)
        assert dtype is not None  # some leaves are quantized
        floats = load_leaf(source, params, leaf, sharding.qvalue, host_bytes)
        packed = bool(quantized_leaves[path].packed)
        quantize = quantize_function(contracted[path], dtype, sharding, group, packed)
        return jax.block_until_ready(quantize(floats))

    return load


def mismatches(
    folder: QuantizedFolder,
    param_infos: Mapping[str, ParamInfo],
    quantized_leaves: Mapping[ParamPath, QuantizedWeight],
) -> list[str]:
    """The weights that are quantized in a folder otherwise than in the model."""
    problems = []
    for name, info in param_infos.items():
        scale, leaf = folder.scales.tensors.get(name), quantized_leaves.get(info.path)
        if (scale is None) != (leaf is None):
            problems.append(f"{name} is {'not ' if scale is None else ''}quantized in it")
        elif scale is not None and leaf is not None:
            expected = layer_shape(leaf.scale.shape, info)
            if scale.shape != expected:
                problems.append(shape_mismatch(name + SCALE, scale.shape, expected))
    return problems


@lru_cache
def quantize_function(
    contracted: tuple[int, ...],
    dtype: str,
    sharding: QuantizedWeight,
    group: int | None = None,
    packed: bool = False,
) -> Callable[[jax.Array], QuantizedWeight]:
    """Compiled once for all weights of the same kind."""
    return jax.jit(
        partial(quantize_weight, contracted=contracted, dtype=dtype, group=group, packed=packed),
        out_shardings=sharding,
    )


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
