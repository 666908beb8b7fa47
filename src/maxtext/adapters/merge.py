"""Adapters merged into the weights of their base, one tensor at a time.

W' = W + scale · B A is computed in float32 and rounded once, to the dtype of W; DoRA's is
m ⊙ W' / ‖W'‖. A module that the adapter saved in full replaces that of the base. If the adapter
changes the embedding or the head of a tied model, the merged model is not tied: the one that it
does not change keeps the weight of the base.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from maxtext.adapters.binding import WEIGHT, LinearShape
from maxtext.adapters.modules import EMBEDDING, HEAD_WEIGHT, ModelModules
from maxtext.adapters.peft_folder import read_adapter
from maxtext.adapters.spec import MAGNITUDE, Adapter
from maxtext.checkpoint.convert.command import SHARD_BYTES, unrolled_model
from maxtext.checkpoint.open import (
    model_param_infos,
    open_checkpoint,
    save_hf_folder,
    save_native,
)
from maxtext.checkpoint.tensors import Progress, TensorInfo, TensorStream
from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.adapters import EMBEDDER
from maxtext.models.transformer import make_template


@dataclass(frozen=True)
class MergedTensors:
    """A source of native weights with an adapter merged into them."""

    source: TensorStream
    adapter: Adapter
    config: MaxTextConfig  # of the base

    @property
    def title(self) -> str:
        return self.source.title

    @cached_property
    def linears(self) -> Mapping[str, LinearShape]:
        return ModelModules.of(self.config).linears

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        dtype = self.source.tensors[EMBEDDING].dtype
        own = {name: TensorInfo(dtype, array.shape) for name, array in self.adapter.saved.items()}
        if HEAD_WEIGHT in self.new_names:
            vocab_size, embed_dim = self.source.tensors[EMBEDDING].shape
            own[HEAD_WEIGHT] = TensorInfo(dtype, (embed_dim, vocab_size))
        return own | dict(self.source.tensors)

    @property
    def new_names(self) -> list[str]:
        """Weights that the base lacks: the head of a tied model."""
        return [HEAD_WEIGHT] if unties(self.config, self.adapter) else []

    def read(self, name: str) -> np.ndarray:
        if name in self.new_names:
            return self.new_head()
        if name in self.adapter.saved:
            return self.adapter.saved[name].astype(self.tensors[name].dtype)
        return self.merge(name, self.source.read(name))

    def new_head(self) -> np.ndarray:
        """The weight [E, V] of a head that was the embedding, from the adapter or the base."""
        head = self.adapter.saved.get(HEAD_WEIGHT)
        if head is None:
            head = self.source.read(EMBEDDING).T
        if self.config.normalize_embedding_logits:  # which acts on tied heads alone
            head = head.astype(np.float32) / np.float32(np.sqrt(self.config.emb_dim))
        return np.ascontiguousarray(head.astype(self.tensors[HEAD_WEIGHT].dtype))

    def __iter__(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, array in self.source:
            yield name, self.merge(name, array)
        for name in self.new_names:
            yield name, self.read(name)

    def merge(self, name: str, weight: np.ndarray) -> np.ndarray:
        if name in self.adapter.saved:
            return self.read(name)
        path = EMBEDDER if name == EMBEDDING else name.removesuffix(WEIGHT)
        if path not in self.adapter.spec.by_path:
            return weight
        merged = merged_weight(self.adapter, path, weight, self.linears.get(path))
        return merged.astype(weight.dtype)


def unties(config: MaxTextConfig, adapter: Adapter) -> bool:
    """Whether an adapter changes the embedding or the head of a model in which they are one."""
    return config.logits_via_embedding and (bool(adapter.saved) or EMBEDDER in adapter.spec.by_path)


def merged_config(config: MaxTextConfig, adapter: Adapter) -> MaxTextConfig:
    """The configuration of the merged model: its head has a weight of its own if the adapter
    changes it or the embedding."""
    if not unties(config, adapter):
        return config
    return config.model_copy(update={"logits_via_embedding": False})


def merged_weight(
    adapter: Adapter, path: str, weight: np.ndarray, shape: LinearShape | None
) -> np.ndarray:
    """The weight of a layer with its adapter, in float32."""
    merged = weight.astype(np.float32) + delta_weight(adapter, path, shape).reshape(weight.shape)
    if not adapter.spec.dora:
        return merged
    return merged * magnitude_factor(adapter, path, merged, shape)


def delta_weight(adapter: Adapter, path: str, shape: LinearShape | None) -> np.ndarray:
    """ΔW = scale · B A of a layer in float32; `shape` is None for the embedding.

    Native weights are [in, out], the transpose of PEFT's, and so are the factors a [in, rank] and
    b [rank, out]: ΔW is `a @ b` here.
    """
    a, b = (factor.astype(np.float32) for factor in adapter.factors(path))
    batch = shape.batch if shape else ()
    rank = a.shape[-1]
    product = a.reshape(*batch, -1, rank) @ b.reshape(*batch, rank, -1)
    return np.float32(adapter.spec.scale(adapter.spec.by_path[path])) * product


def magnitude_factor(
    adapter: Adapter, path: str, merged: np.ndarray, shape: LinearShape | None
) -> np.ndarray:
    """DoRA's m / ‖W'‖, [*outputs]."""
    assert shape is not None
    magnitude = adapter.tensors[f"{path}/{MAGNITUDE}"].astype(np.float32)
    norms = np.sqrt(np.square(merged).sum(axis=tuple(range(len(shape.inputs)))))
    return magnitude / norms


def merge_folder(
    base: str | os.PathLike,
    folder: str | os.PathLike,
    out: str | os.PathLike,
    progress: Progress | None = None,
) -> None:
    """Write the base with an adapter merged into it, as a folder of the base's kind."""
    checkpoint = open_checkpoint(base)
    config, param_infos = unrolled_model(checkpoint)
    weights = checkpoint.weights(config, param_infos)
    if config.checkpoint_is_quantized:
        raise ConfigError(
            f"{base} has integer weights, which an adapter cannot be merged into: merge it into "
            "the folder that they were made from"
        )
    adapter = read_adapter(folder, config)
    merged = MergedTensors(weights, adapter, config)
    config = merged_config(config, adapter)
    param_infos = model_param_infos(make_template(config), config)
    assets, names = checkpoint.hf_assets, checkpoint.hf_tensor_names
    if checkpoint.mapping is None:
        save_native(out, config, merged, assets, names, progress, SHARD_BYTES)
        return
    save_hf_folder(out, config, param_infos, merged, assets, names, progress=progress)
