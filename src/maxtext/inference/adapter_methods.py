"""The methods of `LLM` for adapters: building the model for them, loading, dropping, saving and
merging."""

import os
import weakref
from dataclasses import replace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.adapters.peft_folder import read_adapter, write_adapter
from maxtext.adapters.serving import AdapterSlots, serves
from maxtext.adapters.spec import Adapter
from maxtext.checkpoint.open import Checkpoint
from maxtext.checkpoint.quantized import quantized_weight_dtype
from maxtext.checkpoint.weights import ModelWeights, ParamInfo
from maxtext.common.errors import ConfigError, UserError
from maxtext.common.files import local_path
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.drafting import Proposer
from maxtext.inference.engine.engine import InferenceEngine
from maxtext.inference.engine.model import InferenceModel
from maxtext.inference.loading import merge_model
from maxtext.layers.context import BuildContext
from maxtext.layers.lora import split_adapter
from maxtext.layers.parameters import Template
from maxtext.sharding import AxisRules


class AdapterMethods:
    """For `LLM`, which sets these attributes."""

    config: MaxTextConfig
    template: Template
    checkpoint: Checkpoint | None
    rules: AxisRules
    context: BuildContext  # without adapters
    adapters: AdapterSlots
    proposer: Proposer | None
    model: InferenceModel
    param_infos: dict[str, ParamInfo]
    disk_dtypes: dict[str, np.dtype]
    engine: InferenceEngine | None
    engines: weakref.WeakSet[InferenceEngine]

    def __init__(
        self,
        config: MaxTextConfig,
        template: Template,
        weights: Tree,
        checkpoint: Checkpoint | None = None,
        context: BuildContext | None = None,
    ): ...

    def build_model(self, weights: Tree) -> InferenceModel:
        """The model for the adapters that are loaded."""
        context, slots = self.context, None
        if self.adapters.loaded:
            slots = self.adapters
            context = replace(context, adapters=slots.spec)
        return InferenceModel(
            self.config, self.rules, context, self.template, weights, slots, self.proposer
        )

    def load_adapter(self, folder: str | os.PathLike, name: str | None = None) -> None:
        """Load one more PEFT folder, by default under the name of the folder. Programs are compiled
        again only if the adapter has layers, a rank, DoRA or fully saved modules that the model was
        not built for. Raises UserError while requests are running."""
        self.add_adapter(name or local_path(folder).name, read_adapter(folder, self.config))

    def add_adapter(self, name: str, adapter: Adapter) -> None:
        """Serve an adapter under a name. If that is not possible, raises UserError and changes
        nothing."""
        self.adapters.add(name, adapter)
        try:
            self.update_adapters()
        except BaseException:
            self.adapters.remove(name)
            raise

    def drop_adapter(self, name: str) -> None:
        """Unload an adapter, and free its slot. Raises UserError while requests are running."""
        self.adapters.remove(name)
        self.update_adapters()

    def update_adapters(self) -> None:
        if any(engine.leased for engine in self.engines):
            raise UserError("requests are running: load and drop adapters between them")
        built = self.model.context.adapters
        if serves(built, self.adapters.spec):
            self.model.weights = self.model.with_adapters(self.model.weights, self.param_infos)
            for engine in self.engines:
                engine.executor.set_weights(self.model.weights)
            return
        self.engine = None
        weights, _ = split_adapter(self.model.checkpoint_weights)
        self.model = self.build_model(jax.tree.map(jnp.asarray, weights))

    def save_adapter(self, folder: str | os.PathLike, name: str | None = None) -> None:
        """Write an adapter, by default the first, as a PEFT folder. Raises UserError if none is
        loaded."""
        loaded = self.adapters.find(name)
        if loaded is None:
            raise UserError("which adapter? none is loaded")
        base, names = "", frozenset[str]()
        if self.checkpoint is not None:
            base, names = str(self.checkpoint.path), self.checkpoint.hf_tensor_names
        write_adapter(folder, loaded.adapter, self.config, base, names)

    def merge(self, name: str | None = None) -> Self:
        """A new model with an adapter merged into its weights: W + scale · B A in float32, rounded
        once. Raises ConfigError if the weights are quantized."""
        loaded = self.adapters.find(name)
        if loaded is None:
            raise UserError("which adapter? none is loaded")
        if quantized_weight_dtype(self.config) is not None:
            raise ConfigError(
                f"quantization={self.config.quantization} rounds the base: load it without, then "
                "merge the adapter"
            )
        base = ModelWeights(split_adapter(self.model.checkpoint_weights)[0], self.param_infos)
        config, template, weights = merge_model(base, loaded.adapter, self.config, self.rules)
        merged = type(self)(config, template, weights, self.checkpoint, self.context)
        merged.disk_dtypes = self.disk_dtypes
        return merged
