"""The context that all parts of a run share: configuration, mesh rules, model and optimizer."""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import optax

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import RowFormat
from maxtext.layers.adapters import AdapterSpec
from maxtext.layers.lora import split_adapter
from maxtext.layers.parameters import Template
from maxtext.layers.quantized import abstract_quantized
from maxtext.models.counts import train_flops_per_token
from maxtext.models.transformer import (
    initial_weights,
)
from maxtext.sharding import AxisRules, use_rules
from maxtext.trainers.batch_size import StepBatches
from maxtext.trainers.objective import Objective
from maxtext.trainers.shardings import Shardings
from maxtext.trainers.step import TrainState
from maxtext.trainers.trainable import optimized_mask, select


@dataclass(frozen=True)
class RunContext:
    rules: AxisRules  # of the state
    objective: Objective
    optimizer: optax.GradientTransformationExtraArgs
    row_format: RowFormat
    batches: StepBatches
    has_eval_loss: bool = True
    adapters: AdapterSpec | None = None  # that are trained, over a frozen base
    own_program_rules: AxisRules | None = None  # of batches and activations, if not `rules`

    @property
    def config(self) -> MaxTextConfig:
        return self.objective.config

    @property
    def program_rules(self) -> AxisRules:
        """The rules of batches and activations."""
        return self.own_program_rules or self.rules

    def for_evaluation(self) -> "RunContext":
        """The same state, with batches and activations by logical_axis_rules_for_eval."""
        if not self.config.logical_axis_rules_for_eval:
            return self
        return replace(self, own_program_rules=self.rules.for_evaluation(self.config))

    def with_config(self, config: MaxTextConfig) -> "RunContext":
        """The same model and mesh, with other settings of its programs."""
        return replace(self, objective=self.objective.with_config(config))

    def with_shared_prefix(self, length: int) -> "RunContext":
        """For groups of rollouts that begin with `length` common tokens."""
        return replace(self, objective=self.objective.with_shared_prefix(length))

    @property
    def template(self) -> Template:
        """The model that is trained."""
        return self.objective.template

    @property
    def computes_weights(self) -> bool:
        """Whether the weights of the model that runs are computed from the trained ones."""
        return self.objective.model_template is not self.template

    def model_weights(self, state: TrainState) -> Tree:
        """The weights of the model as it runs; those of the state, unless they are computed from
        the trained ones."""
        if not self.computes_weights:
            return state.weights
        template = self.objective.model_template
        shardings = self.rules.shardings(template.axes, template.weights)
        with use_rules(self.rules):
            compute = jax.jit(self.objective.model_weights, out_shardings=shardings)
            return compute(state.weights, state.reference)

    @cached_property
    def trained(self) -> Tree:
        """Bools in the tree of the weights: what the optimizer updates."""
        return optimized_mask(self.config, self.template)

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs that a step computes for a token: those of `train_flops_per_token` for the model
        that is trained, and a forward pass of the reference or teacher if the step runs one."""
        frozen, _ = split_adapter(select(self.template.weights, self.trained, keep=False))
        _, adapters = split_adapter(self.template.weights)
        flops = train_flops_per_token(self.config, frozen, adapters)
        return flops + self.objective.reference_flops_per_token

    @property
    def weight_axes(self) -> Tree:
        """The logical axes of the weights."""
        return self.axes_and_weights[0]

    @property
    def abstract_weights(self) -> Tree:
        return self.axes_and_weights[1]

    @cached_property
    def axes_and_weights(self) -> tuple[Tree, Tree]:
        """Axes and weights of the template; a frozen base may have quantized matrices (QLoRA)."""
        qtype, group = self.config.lora_weight_qtype, self.config.lora_tile_size
        return abstract_quantized(self.template, qtype, group, head=False)

    @cached_property
    def abstract_state(self) -> TrainState:
        state = jax.eval_shape(self.state_from_weights, self.abstract_weights)
        return replace(state, reference=self.objective.abstract_reference)

    @cached_property
    def shardings(self) -> Shardings:
        return Shardings(
            config=self.config,
            batches=self.batches,
            has_eval_loss=self.has_eval_loss,
            rules=self.rules,
            program_rules=self.program_rules,
            template=self.template,
            weight_axes=self.weight_axes,
            abstract_state=self.abstract_state,
            reference_axes=self.objective.reference_axes,
        )

    def random_state(self) -> TrainState:
        """The state before the first step, with random weights and without a reference."""
        return self.state_from_weights(initial_weights(self.config, loop=True))

    def state_from_weights(self, weights: Tree) -> TrainState:
        """The state before the first step, with these weights and without a reference."""
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            weights=weights,
            opt_state=self.optimizer.init(select(weights, self.trained)),
            nonfinite_steps=jnp.zeros((), jnp.int32),
        )

    def abstract_batch(
        self, rows: int, is_training: bool = True
    ) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (rows, self.config.max_target_length)
        field = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.shardings.batch(shape))
        sharding = self.shardings.batch((rows,))
        row_field = jax.ShapeDtypeStruct((rows,), jnp.float32, sharding=sharding)
        row_fields = dict.fromkeys(self.objective.row_fields, row_field)
        token_fields = {
            name: jax.ShapeDtypeStruct(
                (*shape, size), dtype, sharding=self.shardings.batch((*shape, size))
            )
            for name, (size, dtype) in self.objective.token_fields.items()
            if is_training
        }
        return dict.fromkeys(self.row_format.fields, field) | row_fields | token_fields

    @cached_property
    def key(self) -> jax.Array:
        """The RNG key of training (dropout), independent of that of the initial weights;
        replicated."""
        return jax.jit(self.make_key, out_shardings=self.shardings.replicated)()

    def make_key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.config.init_weights_seed), 1)

    @property
    def abstract_key(self) -> jax.ShapeDtypeStruct:
        key = jax.eval_shape(self.make_key)
        return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.shardings.replicated)
