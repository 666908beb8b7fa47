"""What a run needs before its first step: mesh, abstract model, shardings, and a state that is born
in its shards.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxtext.checkpoint.convert.faithful import unsaid
from maxtext.checkpoint.open import Checkpoint, model_param_infos, open_checkpoint
from maxtext.checkpoint.weights import load_weights
from maxtext.common.errors import ConfigError
from maxtext.common.log import LOGGER
from maxtext.configs.derive import Devices
from maxtext.configs.load import load
from maxtext.configs.sources import from_python
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import FIELDS
from maxtext.layers.parameters import Template
from maxtext.models.transformer import initial_weights, make_template
from maxtext.optimizers import learning_rate_schedule, make_optimizer
from maxtext.sharding import AxisRules, make_mesh, use_rules
from maxtext.sharding.explicit import explicitly
from maxtext.sharding.state import (
    check_batch,
    check_split,
    describe,
    on_device,
    on_host,
    split_further,
)
from maxtext.trainers.losses import token_order
from maxtext.trainers.step import TrainState, make_eval_step, make_train_step

# By platform. On CPUs, LLVM's first level compiles a step in three quarters of the time, and it
# runs as fast.
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {"cpu": {"xla_backend_optimization_level": 1}}


@dataclass(frozen=True)
class Setup:
    config: MaxTextConfig
    rules: AxisRules
    template: Template
    optimizer: optax.GradientTransformationExtraArgs

    @classmethod
    def of(cls, config: MaxTextConfig, devices: Sequence[jax.Device] | None = None) -> "Setup":
        """For this run's devices, or for others that need not be here: then the step can be
        compiled, not run.
        """
        refuse_inference(config)
        template = make_template(config)
        rules = AxisRules.of(config, make_mesh(config, devices))
        return cls(config, rules, template, make_optimizer(config, template.axes, template.trained))

    def fresh(self) -> TrainState:
        return self.first_state(initial_weights(self.config, loop=True))

    def first_state(self, weights: Any) -> TrainState:
        return TrainState(
            jnp.zeros((), jnp.int32),
            weights,
            self.optimizer.init(weights),
            jnp.zeros((), jnp.int32),
        )

    @cached_property
    def abstract_state(self) -> TrainState:
        return jax.eval_shape(self.first_state, self.template.weights)

    @cached_property
    def weight_shardings(self) -> Any:
        shardings = self.rules.shardings(self.template.axes, self.template.weights)
        return (
            jax.tree.map(on_host, shardings)
            if self.config.parameter_memory_host_offload
            else shardings
        )

    @cached_property
    def moment_shardings(self) -> Any:
        """Of what an optimizer keeps for each weight, and of gradients when they reach it: like the
        weight, and with ZeRO-1 also split over the data axis."""
        shardings = jax.tree.map(on_device, self.weight_shardings)
        if not self.config.shard_optimizer_over_data:
            return shardings
        return jax.tree.map(
            lambda sharding, weight: split_further(sharding, weight.shape, "data"),
            shardings,
            self.template.weights,
        )

    @cached_property
    def state_shardings(self) -> TrainState:
        """Weights by their axes; what the optimizer keeps for a weight, with it; the rest
        everywhere.
        """
        kept = (
            jax.tree.map(on_host, self.moment_shardings)
            if self.offloads_optimizer
            else self.moment_shardings
        )
        of_weight = {
            path: (leaf.shape, sharding)
            for (path, leaf), sharding in zip(
                jax.tree.leaves_with_path(self.template.weights), jax.tree.leaves(kept), strict=True
            )
        }

        def place(path: tuple, leaf: Any) -> Any:
            for start in range(len(path)):
                shape, sharding = of_weight.get(path[start:], (None, None))
                if shape == leaf.shape:
                    return sharding
            return self.rules.replicated()

        placed = jax.tree.map_with_path(place, self.abstract_state)
        return replace(placed, weights=self.weight_shardings)

    @property
    def offloads_optimizer(self) -> bool:
        return self.config.optimizer_memory_host_offload

    def check_layout(self) -> None:
        """Refuse a layout that copies what it could split; say how weights lie, if asked."""
        weights, axes, config = self.template.weights, self.template.axes, self.config
        check_batch(self.rules, config.micro_batch_size_to_train_on, "per_device_batch_size")
        if config.eval_interval > 0:
            check_batch(
                self.rules, config.micro_batch_size_to_eval_on, "eval_per_device_batch_size"
            )
        if self.config.debug_sharding:
            for line in describe(self.rules, axes, weights):
                LOGGER.info("sharding: %s", line)
        check_split(self.rules, axes, weights, self.config.sharding_tolerance)

    def batch_sharding(self, shape: tuple[int, ...]) -> Any:
        """By its logical axes, over the mesh axes that data_sharding lets it be split over."""
        allowed = {
            axis
            for axes in self.config.data_sharding
            for axis in ([axes] if isinstance(axes, str) else axes)
        }
        return self.rules.sharding(self.config.input_data_sharding_logical_axes, shape, allowed)

    def initial_state(self) -> TrainState:
        """Fresh, or with the weights of load_parameters_path: a folder of ours, or one of Hugging
        Face's.
        """
        with use_rules(self.rules):
            if not self.config.load_parameters_path:
                return jax.jit(self.fresh, out_shardings=self.state_shardings)()
            weights = read_weights(self.config, self.template, self.weight_shardings)
            make = jax.jit(self.first_state, out_shardings=self.state_shardings, donate_argnums=0)
            return make(weights)

    def abstract_batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (rows, self.config.max_target_length)
        placed = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.batch_sharding(shape))
        return dict.fromkeys(FIELDS, placed)

    def compile_train_step(self, rows: int) -> jax.stages.Compiled:
        """The step for batches of so many rows."""
        return self.compile(self.lower_train_step(rows))

    def lower_train_step(self, rows: int) -> jax.stages.Lowered:
        step = make_train_step(
            self.config,
            self.template,
            self.optimizer,
            learning_rate_schedule(self.config),
            self.to_optimizer,
        )
        state, batch = placed(self.abstract_state, self.state_shardings), self.abstract_batch(rows)
        if len({device.process_index for device in self.rules.mesh.devices.flat}) > 1:
            votes = jax.ShapeDtypeStruct(
                (self.rules.mesh.size,), jnp.int32, sharding=self.rules.over_devices()
            )
            batch["vote"] = votes
        arguments = state, batch, self.abstract_key
        if self.explicit:
            step = explicitly(step, jax.tree.map(lambda leaf: leaf.sharding, arguments))
        jitted = jax.jit(
            step, donate_argnums=0, out_shardings=(self.state_shardings, self.rules.replicated())
        )
        return self.lower(jitted, *arguments)

    @property
    def explicit(self) -> bool:
        return self.config.shard_mode.value == "explicit"

    def to_optimizer(self, gradients: Any) -> Any:
        """Gradients as the optimizer needs them: with ZeRO-1 each device keeps the part that it
        updates.
        """
        if not self.config.shard_optimizer_over_data:
            return gradients
        return jax.lax.with_sharding_constraint(gradients, self.moment_shardings)

    def compile_eval_step(self, rows: int) -> jax.stages.Compiled:
        step = jax.jit(
            make_eval_step(self.config, self.template), out_shardings=self.rules.replicated()
        )
        weights = placed(self.template.weights, self.weight_shardings)
        return self.compile(self.lower(step, weights, self.abstract_batch(rows)))

    def lower(self, step: Any, *arguments: Any) -> jax.stages.Lowered:
        context = jax.set_mesh(self.rules.mesh) if self.explicit else contextlib.nullcontext()
        with (
            use_rules(self.rules),
            context,
            jax.default_matmul_precision(self.config.matmul_precision.value),
        ):
            return step.lower(*arguments)

    def compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        platform = self.rules.mesh.devices.flat[0].platform
        return lowered.compile(COMPILER_OPTIONS.get(platform, {}))

    @cached_property
    def key(self) -> jax.Array:
        """The randomness of training (dropout), apart from that of the initial weights; on every
        device.
        """
        make = jax.jit(self.make_key, out_shardings=self.rules.replicated())
        return make()

    def make_key(self) -> jax.Array:
        return jax.random.fold_in(jax.random.key(self.config.init_weights_seed), 1)

    @property
    def abstract_key(self) -> jax.ShapeDtypeStruct:
        key = jax.eval_shape(self.make_key)
        return jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=self.rules.replicated())

    def to_devices(
        self, batch: dict[str, np.ndarray], held: np.ndarray | None = None, rows: int | None = None
    ) -> dict[str, jax.Array]:
        """A batch of `rows` laid out over all devices. `held`: sorted indices of its rows that
        `batch` has, among them all that devices of this process need (none, if others read for it:
        expansion_factor_real_data); None: all."""
        order = token_order(self.config)
        rows = next(iter(batch.values())).shape[0] if rows is None else rows
        held = np.arange(rows) if held is None else held
        shape = (rows, self.config.max_target_length)
        readable = (
            rows * self.readers_of,
            shape[1],
        )  # the first rows are those of the processes that read

        def place(field: np.ndarray) -> jax.Array:
            field = field if order is None else field[:, order.tokens(field.shape[1])]

            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                start, stop, _ = index[0].indices(readable[0])
                first, last = np.searchsorted(held, (start, min(stop, rows)))
                part = field[first:last]
                if stop > rows:
                    padding = np.zeros((stop - max(start, rows), shape[1]), np.int32)
                    part = np.concatenate([part, padding])
                return part[(slice(None), *index[1:])]

            return jax.make_array_from_callback(readable, self.batch_sharding(readable), part)

        fields = batch or dict.fromkeys(FIELDS, np.zeros((0, shape[1]), np.int32))
        placed = {name: place(field) for name, field in fields.items()}
        return (
            placed if readable == shape else dealt_out(placed, shape[0], self.batch_sharding(shape))
        )

    @property
    def readers_of(self) -> int:
        """How many processes' rows each reading process loads."""
        return round(max(self.config.expansion_factor_real_data, 1))

    def on_all_devices(self, number: int) -> jax.Array:
        """[devices]: this process's number on each of its devices."""
        value = np.full(1, number, np.int32)
        return jax.make_array_from_callback(
            (self.rules.mesh.size,), self.rules.over_devices(), lambda index: value
        )


@partial(jax.jit, static_argnums=(1, 2))
def dealt_out(batch: dict[str, jax.Array], rows: int, sharding: Any) -> dict[str, jax.Array]:
    """The first rows, from the devices of the processes that read to all."""
    return {
        name: jax.lax.with_sharding_constraint(field[:rows], sharding)
        for name, field in batch.items()
    }


def refuse_inference(config: MaxTextConfig) -> None:
    """What only generation can do."""
    for key, word in (("attention", "paged"), ("use_ragged_attention", True)):
        if getattr(config, key) == word:
            raise ConfigError(
                f"{key}={str(word).lower()} ({config.source(key)}) is about the keys and values that generation keeps, "
                "and training keeps none: leave it out"
            )
    kind = config.quantization.value if config.quantization else ""
    kept = {
        "checkpoint_is_quantized": "true" if config.checkpoint_is_quantized else "",
        "save_quantized_params_path": config.save_quantized_params_path,
        "quantization": kind if kind == "int4" else "",
    }
    for key in filter(kept.get, kept):
        raise ConfigError(
            f"{key}={kept[key]} ({config.source(key)}) is for inference, and training needs weights in floats: leave "
            "it out; quantization=int8 or fp8 trains with products in eight bits"
        )


def read_weights(config: MaxTextConfig, template: Template, shardings: Any) -> Any:
    """The weights that a run starts from, straight into their shards; they must be of this very
    model.
    """
    checkpoint = open_checkpoint(config.load_parameters_path)
    if "checkpoint_is_quantized" in checkpoint.settings:
        raise ConfigError(
            f"{config.load_parameters_path} holds quantized weights, and training needs floats: start from a folder "
            "that is not quantized"
        )
    places = model_param_infos(template, config)
    source = checkpoint.weights(config, places)
    refuse_other_model(config, checkpoint)
    return load_weights(source, places, template, shardings)


def refuse_other_model(config: MaxTextConfig, checkpoint: Checkpoint) -> None:
    """A run starts from weights of its own model, or says that it knows better."""
    words = from_python({"max_target_length": config.max_target_length})
    other = unsaid(
        config, load(None, words, environ={}, devices=Devices(1), model=checkpoint.settings)
    )
    if other and not config.override_model_config:
        raise ConfigError(
            f"load_parameters_path={checkpoint.path} holds another model: this run's has {', '.join(other)}; leave out "
            "what differs (the folder says what model it is), or set override_model_config=true to use its weights so"
        )


def placed(tree: Any, shardings: Any) -> Any:
    """Abstract arrays that say where they lie."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )
