"""Weights with kernels of integers: made while a checkpoint is loaded, and folders of them.

Such a folder is one of ours (weights.safetensors …, by layer), with two tensors for a kernel: NAME
has its integers, I8, or for int4 U8 with two in a byte, neighbours along the last axis, the first
in the lower half; NAME.scale has its scales, F32, as `QuantizedWeight` keeps them. Its config.yml says
quantization and checkpoint_is_quantized. To whoever wants plain tensors it shows them in float32.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import ml_dtypes
import numpy as np

from maxtext.checkpoint.safetensors_reader import SafetensorsFolder
from maxtext.checkpoint.tensors import (
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
    ModelWeights,
    ParamInfo,
    Path,
    flatten,
    load_leaf,
    load_weights,
)
from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.kernels.weight_only import QuantizedWeight, quantize_weight
from maxtext.layers.parameters import Template, Tree
from maxtext.layers.quantized import described
from maxtext.sharding import AxisRules

SCALE = ".scale"
F32, I8, U8 = DTYPES["F32"], DTYPES["I8"], DTYPES["U8"]
INTEGERS = {"int8": I8, "int4": np.dtype(ml_dtypes.int4)}
STORED = {"int8": I8, "int4": U8}


def quantized_weight_dtype(config: MaxTextConfig) -> str | None:
    """What kernels are kept in; None: in floats, like all weights."""
    kind = config.quantization.value if config.quantization else None
    if kind not in (None, *INTEGERS):
        raise ConfigError(
            f"quantization={kind} ({config.source('quantization')}) is how a model is trained: use "
            f"{' or '.join(INTEGERS)} for the weights of one that is not, or leave it out"
        )
    return kind


@dataclass(frozen=True)
class QuantizedFolder:
    """A folder with kernels of integers, shown as plain tensors; `integers` and `scales` show the
    kernels' parts.
    """

    folder: TensorSource
    dtype: str  # int8 or int4

    @classmethod
    def of(cls, folder: SafetensorsFolder, dtype: str) -> "QuantizedFolder":
        """Pair integers with scales; all that does not pair is one error."""
        problems = []
        for name, tensor in folder.tensors.items():
            scale = folder.tensors.get(name + SCALE)
            if name.endswith(SCALE) and name.removesuffix(SCALE) not in folder.tensors:
                problems.append(f"{name} has nothing to scale")
            elif scale is None and tensor.dtype in (I8, U8):
                problems.append(f"{name} is of integers and has no {name}{SCALE}")
            elif scale is not None and not paired(tensor, scale, dtype):
                problems.append(
                    f"{name} {list(tensor.shape)} and {name}{SCALE} {list(scale.shape)} are no {dtype} kernel"
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
    def integers(self) -> "Integers":
        return Integers(self.folder, self.dtype, self.scales.tensors)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Of the plain weights."""
        kernels = self.integers.tensors
        return {
            name: TensorInfo(F32, kernels[name].shape) if name in kernels else tensor
            for name, tensor in self.folder.tensors.items()
            if not name.endswith(SCALE)
        }

    def read(self, name: str) -> np.ndarray:
        if name not in self.scales.tensors:
            return self.folder.read(name)
        return np.asarray(
            QuantizedWeight(self.integers.read(name), self.scales.read(name)).astype(F32)
        )

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


@dataclass(frozen=True)
class Integers:
    """The integers of a folder's kernels, one in each place of an array."""

    folder: TensorSource
    dtype: str
    scales: Mapping[str, TensorInfo]

    @property
    def title(self) -> str:
        return self.folder.title

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        # An output has a scale of its own, and the last axis is one of outputs: so it says how long
        # the axis is.
        return {
            name: TensorInfo(
                INTEGERS[self.dtype], (*self.folder.tensors[name].shape[:-1], scale.shape[-1])
            )
            for name, scale in self.scales.items()
        }

    def read(self, name: str) -> np.ndarray:
        stored = self.folder.read(name)
        return stored if self.dtype == "int8" else unpack(stored, self.tensors[name].shape[-1])


def paired(kernel: TensorInfo, scale: TensorInfo, dtype: str) -> bool:
    """Whether the stored parts of a kernel fit together."""
    if kernel.dtype != STORED[dtype] or scale.dtype != F32 or len(kernel.shape) != len(scale.shape):
        return False
    *others, last = kernel.shape
    whole = all(
        groups and size % groups == 0 for size, groups in zip(others, scale.shape[:-1], strict=True)
    )
    return whole and last == (scale.shape[-1] if dtype == "int8" else -(-scale.shape[-1] // 2))


def pack(values: np.ndarray) -> np.ndarray:
    """int4 [..., n] -> U8 [..., ⌈n / 2⌉]."""
    nibbles = values.astype(I8).view(U8) & 0xF
    if nibbles.shape[-1] % 2:
        nibbles = np.concatenate([nibbles, np.zeros_like(nibbles[..., :1])], axis=-1)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def unpack(stored: np.ndarray, length: int) -> np.ndarray:
    """The way back; `length` is n."""
    nibbles = np.stack([stored & 0xF, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)[
        ..., :length
    ]
    return ((nibbles ^ 8).astype(I8) - 8).astype(INTEGERS["int4"])  # the highest bit is the sign


@dataclass(frozen=True)
class PackedWeights:
    """A model's weights as such a folder holds them; a model without kernels of integers has plain
    weights only.
    """

    model: ModelWeights

    @property
    def title(self) -> str:
        return self.model.title

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        found = {}
        for name, place in self.model.param_infos.items():
            leaf = self.model.leaves[place.path]
            if not isinstance(leaf, QuantizedWeight):
                found[name] = self.model.tensors[name]
                continue
            dtype = np.dtype(leaf.dtype).name
            last = place.shape[-1] if dtype == "int8" else -(-place.shape[-1] // 2)
            found[name] = TensorInfo(STORED[dtype], (*place.shape[:-1], last))
            found[name + SCALE] = TensorInfo(F32, of_layer(leaf.scale.shape, place))
        return found

    def read(self, name: str) -> np.ndarray:
        weight = self.model.take(name.removesuffix(SCALE))
        if not isinstance(weight, QuantizedWeight):
            return np.asarray(weight)
        if name.endswith(SCALE):
            return np.asarray(weight.scale)
        values = np.asarray(weight.qvalue)
        return values if values.dtype == I8 else pack(values)

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in self.tensors:
            yield name, self.read(name)


def of_layer(shape: Shape, place: ParamInfo) -> Shape:
    """Without the axis of the stack."""
    return shape if place.layer is None else shape[: place.axis] + shape[place.axis + 1 :]


def load_model(
    source: TensorSource,
    config: MaxTextConfig,
    param_infos: Mapping[str, ParamInfo],
    template: Template,
    rules: AxisRules,
    progress: Progress | None = None,
) -> Tree:
    """The weights of a model as its configuration wants them for inference, on their devices.

    A kernel of floats becomes one of integers as soon as it is there, so that floats of one kernel
    are there at a time.
    """
    dtype = quantized_weight_dtype(config)
    stored = source if isinstance(source, QuantizedFolder) else None
    if config.checkpoint_is_quantized and stored is None:
        raise ConfigError(
            f"checkpoint_is_quantized=true, but {source.title} has no quantized weights: leave the key out"
        )
    if stored is not None and dtype != stored.dtype:
        raise ConfigError(
            f"quantization={dtype or ''!r}, but {stored.title} has weights in {stored.dtype} already: leave the key "
            "out, or load the folder that they were made from"
        )
    axes, weights = described(template, dtype)
    kernels = {
        path: leaf for path, leaf in flatten(weights).items() if isinstance(leaf, QuantizedWeight)
    }
    contracted = flatten(template.contracted)
    if stored is not None:
        raise_problems(stored.title, misfits(stored, param_infos, kernels))

    def load_one(
        path: Path,
        named: Mapping[str, ParamInfo],
        whole: TensorInfo,
        sharding: Any,
        host_bytes: int,
    ) -> Any:
        if path not in kernels:
            return load_leaf(source, named, whole, sharding, host_bytes)
        if stored is None:
            floats = load_leaf(source, named, whole, sharding.qvalue, host_bytes)
            return jax.block_until_ready(quantizer(contracted[path], dtype, sharding)(floats))
        values, scale = (
            TensorInfo(np.dtype(part.dtype), part.shape) for part in jax.tree.leaves(kernels[path])
        )
        return QuantizedWeight(
            load_leaf(stored.integers, named, values, sharding.qvalue, host_bytes),
            load_leaf(stored.scales, named, scale, sharding.scale, host_bytes),
        )

    return load_weights(
        source,
        param_infos,
        template,
        rules.shardings(axes, weights),
        progress=progress,
        load=load_one,
    )


def misfits(
    stored: QuantizedFolder,
    param_infos: Mapping[str, ParamInfo],
    kernels: Mapping[Path, QuantizedWeight],
) -> list[str]:
    """What a folder keeps otherwise than the model."""
    problems = []
    for name, place in param_infos.items():
        found, kernel = stored.scales.tensors.get(name), kernels.get(place.path)
        if (found is None) != (kernel is None):
            problems.append(f"{name} is {'not ' if found is None else ''}quantized in it")
        elif (
            found is not None
            and kernel is not None
            and found.shape != of_layer(kernel.scale.shape, place)
        ):
            problems.append(
                shape_mismatch(name + SCALE, found.shape, of_layer(kernel.scale.shape, place))
            )
    return problems


@lru_cache
def quantizer(
    contracted: tuple[int, ...], dtype: Any, sharding: QuantizedWeight
) -> Callable[[jax.Array], QuantizedWeight]:
    """Compiled once for kernels that are alike."""
    return jax.jit(
        partial(quantize_weight, contracted=contracted, dtype=dtype), out_shardings=sharding
    )
