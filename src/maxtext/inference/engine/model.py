"""A model built for inference on the devices of a mesh, and its weights in the layout of the
build.
"""

from collections.abc import Mapping
from dataclasses import replace

from maxtext.adapters.modules import ModelModules
from maxtext.adapters.serving import AdapterSlots, serving_weights
from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ModelWeights, ParamInfo
from maxtext.common.log import LOGGER
from maxtext.common.trees import merge_dicts
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.inference.engine.drafting import Proposer
from maxtext.inference.engine.programs import Programs
from maxtext.layers.context import BuildContext
from maxtext.layers.lora import split_adapter
from maxtext.layers.parameters import Template
from maxtext.layers.quantized import layout_for_decode
from maxtext.layers.specs import AttentionSpec, LayerSpec, MlpSpec, MoeSpec
from maxtext.layers.weight_layout import (
    gemv_unsupported_reason,
    pack_weights,
    packing_unsupported_reason,
    transpose_weights,
    unpack_weights,
)
from maxtext.models.registry import layers
from maxtext.models.transformer import implementations, make_template
from maxtext.sharding import AxisRules


class InferenceModel:
    """Owns the weights that it is given: it converts them to the layout of its build, and frees the
    arrays that it has converted.

    On one NVIDIA GPU there are two builds. The weights of one are transposed for decode steps of a
    single row. `build_for` changes between them, so an engine uses the weights until the next call.
    """

    def __init__(
        self,
        config: MaxTextConfig,
        rules: AxisRules,
        context: BuildContext,
        template: Template,
        weights: Tree,
        adapters: AdapterSlots | None = None,
        proposer: Proposer | None = None,
    ):
        """`adapters` are those that `context` builds the model for. `proposer` drafts tokens."""
        self.config = config
        self.adapters = adapters
        self.rules = rules
        self.context = context
        self.proposer = proposer
        self.builds: dict[int, Programs] = {}
        self.programs = self.build(decode_rows=0)
        weights = self.with_adapters(weights, model_param_infos(template, config))
        weights = pack_weights(self.programs.template, weights)
        self.weights = layout_for_decode(self.programs.template, weights, context)
        self.log_implementations()

    def with_adapters(self, weights: Tree, param_infos: Mapping[str, ParamInfo]) -> Tree:
        """The weights with the parameters of the adapters that are loaded now."""
        if self.adapters is None:
            return weights
        base, _ = split_adapter(weights)
        served = serving_weights(
            self.adapters,
            self.programs.template,
            self.config,
            base=ModelWeights(base, param_infos),
            linears=ModelModules.of(self.config).linears,
            rules=self.rules,
        )
        return merge_dicts(base, served)

    def build(self, decode_rows: int) -> Programs:
        """The programs for decode steps of one row, or of any number (0)."""
        if decode_rows not in self.builds:
            context = replace(self.context, decode_rows=decode_rows)
            template = make_template(self.config, context)
            self.builds[decode_rows] = Programs(
                self.config, template, self.rules, context, proposer=self.proposer
            )
        return self.builds[decode_rows]

    def build_for(self, slots: int) -> None:
        """Use the fastest build for an engine with this number of slots."""
        decode_rows = 1 if slots == 1 and self.single_row_reason is None else 0
        programs = self.build(decode_rows)
        if programs is not self.programs:
            self.weights = transpose_weights(
                self.programs.template, programs.template, self.weights
            )
            self.programs = programs
            self.log_implementations()

    @property
    def single_row_reason(self) -> str | None:
        """Why decode steps of a single row have no build of their own; None if they have."""
        if self.context.adapters is not None:
            return "has adapters"
        reason = packing_unsupported_reason(self.context)
        if reason is not None:
            return reason
        for layer in layers(self.config):
            if not isinstance(layer, LayerSpec):
                return f"{type(layer).__name__} has no GEMV kernels"
            for spec in (layer.attention, layer.mlp):
                if not isinstance(spec, AttentionSpec | MlpSpec | MoeSpec):
                    return f"{type(spec).__name__.removesuffix('Spec')} has no GEMV kernels"
        template = self.build(decode_rows=1).template
        return gemv_unsupported_reason(template, self.config.dtype.value, self.context)

    @property
    def checkpoint_weights(self) -> Tree:
        """The weights under the names that checkpoints have."""
        return unpack_weights(self.programs.template, self.weights)

    def log_implementations(self) -> None:
        for part, description in self.implementations.items():
            LOGGER.info("%s: %s", part, description)

    @property
    def implementations(self) -> dict[str, str]:
        """Which implementations the parts of the model have, and why no faster ones."""
        return implementations(self.config, self.programs.build)
