"""What a run needs before its first step: mesh, abstract model, shardings, and a state that is born in its shards."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxtext.checkpoint.convert.faithful import unsaid
from maxtext.checkpoint.open import open_checkpoint, places_of
from maxtext.checkpoint.weights import load_weights
from maxtext.common.errors import ConfigError
from maxtext.configs.derive import Devices
from maxtext.configs.load import load
from maxtext.configs.sources import from_python
from maxtext.input_pipeline import FIELDS
from maxtext.layers.parameters import Template
from maxtext.models.transformer import initial_weights, make_template
from maxtext.optimizers import learning_rate_schedule, make_optimizer
from maxtext.sharding import AxisRules, make_mesh, use_rules
from maxtext.trainers.step import TrainState, make_eval_step, make_train_step

# By platform. On CPUs, LLVM's first level compiles a step in three quarters of the time, and it runs as fast.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {"cpu": {"xla_backend_optimization_level": 1}}


@dataclass(frozen=True)
class Setup:
    config: Any
    rules: AxisRules
    template: Template
    optimizer: optax.GradientTransformationExtraArgs

    @classmethod
    def of(cls, config: Any, devices: Sequence[jax.Device] | None = None) -> "Setup":
        """For this run's devices, or for others that need not be here: then the step can be compiled, not run."""
        template = make_template(config)
        rules = AxisRules.of(config, make_mesh(config, devices))
        return cls(config, rules, template, make_optimizer(config, template.axes, template.trained))

    def fresh(self) -> TrainState:
        return self.first_state(initial_weights(self.config))

    def first_state(self, weights: Any) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), weights, self.optimizer.init(weights), jnp.zeros((), bool))

    @cached_property
    def abstract_state(self) -> TrainState:
        return jax.eval_shape(self.first_state, self.template.weights)

    @cached_property
    def weight_shardings(self) -> Any:
        return self.rules.shardings(self.template.axes, self.template.weights)

    @cached_property
    def state_shardings(self) -> TrainState:
        """Weights by their axes; whatever the optimizer keeps for a weight, like that weight; the rest everywhere."""
        of_weight = {
            path: (leaf.shape, sharding)
            for (path, leaf), sharding in zip(
                jax.tree.leaves_with_path(self.template.weights), jax.tree.leaves(self.weight_shardings), strict=True
            )
        }

        def place(path: tuple, leaf: Any) -> Any:
            for start in range(len(path)):
                shape, sharding = of_weight.get(path[start:], (None, None))
                if shape == leaf.shape:
                    return sharding
            return self.rules.replicated()

        return jax.tree.map_with_path(place, self.abstract_state)

    def batch_sharding(self, shape: tuple[int, ...]) -> Any:
        return self.rules.sharding(self.config.input_data_sharding_logical_axes, shape)

    def initial_state(self) -> TrainState:
        """Fresh, or with the weights of load_parameters_path: a folder of ours, or one of Hugging Face's."""
        with use_rules(self.rules):
            if not self.config.load_parameters_path:
                return jax.jit(self.fresh, out_shardings=self.state_shardings)()
            weights = read_weights(self.config, self.template, self.weight_shardings)
            make = jax.jit(self.first_state, out_shardings=self.state_shardings, donate_argnums=0)
            return make(weights)

    def abstract_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (rows, self.config.max_target_length)
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding(shape)) for name in FIELDS}

    def compile_train_step(self, rows: int) -> jax.stages.Compiled:
        """The step for batches of so many rows."""
        return self.compile(self.lower_train_step(rows))

    def lower_train_step(self, rows: int) -> jax.stages.Lowered:
        step = make_train_step(self.config, self.template, self.optimizer, learning_rate_schedule(self.config))
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(self.state_shardings, self.rules.replicated()))
        return self.lower(jitted, placed(self.abstract_state, self.state_shardings), rows, self.abstract_key)

    def compile_eval_step(self, rows: int) -> jax.stages.Compiled:
        step = jax.jit(make_eval_step(self.config, self.template), out_shardings=self.rules.replicated())
        return self.compile(self.lower(step, placed(self.template.weights, self.weight_shardings), rows))

    def lower(self, step: Any, state: Any, rows: int, *rest: Any) -> jax.stages.Lowered:
        with use_rules(self.rules), jax.default_matmul_precision(self.config.matmul_precision.value):
            return step.lower(state, self.abstract_batch(rows), *rest)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        platform = self.rules.mesh.devices.flat[0].platform
        return lowered.compile(COMPILER_OPTIONS.get(platform, {}))

    @cached_property
    def key(self) -> jax.Array:
        """The randomness of training (dropout), apart from that of the initial weights; on every device."""
        make = jax.jit(self.make_key, out_shardings=self.rules.replicated())
        return make()

    def make_key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.config.init_weights_seed), 1)

    @property
    def abstract_key(self) -> jax.ShapeDtypeStruct:
        key = jax.eval_shape(self.make_key)
        return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.rules.replicated())

    def to_devices(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows of a batch, laid out over all devices together with the others'."""
        return {
            name: jax.make_array_from_process_local_data(
                self.batch_sharding((field.shape[0] * jax.process_count(), *field.shape[1:])), field
            )
            for name, field in batch.items()
        }


def read_weights(config: Any, template: Template, shardings: Any) -> Any:
    """The weights that a run starts from, straight into their shards; they must be of this very model."""
    checkpoint = open_checkpoint(config.load_parameters_path)
    places = places_of(template, config)
    source = checkpoint.weights(config, places)
    words = from_python({"max_target_length": config.max_target_length})
    other = unsaid(config, load(None, words, environ={}, devices=Devices(1), model=checkpoint.settings))
    if other and not config.override_model_config:
        raise ConfigError(
            f"load_parameters_path={checkpoint.path} holds another model: this run's has {', '.join(other)}; leave out "
            "what differs (the folder says what model it is), or set override_model_config=true to use its weights so"
        )
    return load_weights(source, places, template, shardings)


def placed(tree: Any, shardings: Any) -> Any:
    """Abstract arrays that say where they lie."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree, shardings
    )
