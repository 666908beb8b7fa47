"""Shardings of the training state, of gradients and of batches on the mesh of a run."""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
from jax.sharding import Sharding

from maxtext.common.log import LOGGER
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.parameters import Template
from maxtext.sharding import AxisRules
from maxtext.sharding.state import (
    check_batch_size,
    check_sharded_fraction,
    describe_shardings,
    on_device,
    on_host,
    shard_over,
)
from maxtext.trainers.batch_size import StepBatches
from maxtext.trainers.step import TrainState
from maxtext.trainers.trainable import optimized_mask, select


@dataclass(frozen=True)
class Shardings:
    config: MaxTextConfig
    batches: StepBatches
    has_eval_loss: bool
    rules: AxisRules  # of the state
    program_rules: AxisRules  # of batches
    template: Template
    weight_axes: Tree  # logical axes of the weights
    abstract_state: TrainState
    reference_axes: Tree = None  # logical axes of abstract_state.reference

    @property
    def replicated(self) -> Sharding:
        """The sharding of scalars, metrics and RNG keys."""
        return self.rules.replicated()

    @property
    def one_per_device(self) -> Sharding:
        """The sharding of a [devices] array."""
        return self.rules.one_per_device()

    @property
    def spans_processes(self) -> bool:
        return len({device.process_index for device in self.rules.mesh.devices.flat}) > 1

    @cached_property
    def weights(self) -> Tree:
        shardings = self.rules.shardings(self.weight_axes, self.abstract_state.weights)
        if self.config.parameter_memory_host_offload:
            return jax.tree.map(on_host, shardings)
        return shardings

    @cached_property
    def gradients(self) -> Tree:
        """The shardings of gradients when they reach the optimizer, and of its moments while it
        updates them: those of the weights, with ZeRO-1 also split over the data axis."""
        shardings = jax.tree.map(on_device, self.weights)
        if not self.config.shard_optimizer_over_data:
            return shardings
        return jax.tree.map(
            lambda sharding, weight: shard_over(sharding, weight.shape, "data"),
            shardings,
            self.abstract_state.weights,
        )

    @cached_property
    def state(self) -> TrainState:
        """An optimizer leaf whose path ends with the path of a weight of the same shape is sharded
        like that weight's gradient. Other leaves are replicated."""
        moments = self.gradients
        if self.config.optimizer_memory_host_offload:
            moments = jax.tree.map(on_host, moments)
        by_path = {
            path: (weight.shape, sharding)
            for (path, weight), sharding in zip(
                jax.tree.leaves_with_path(self.abstract_state.weights),
                jax.tree.leaves(moments),
                strict=True,
            )
        }

        def leaf_sharding(path: tuple, leaf: jax.ShapeDtypeStruct) -> Sharding:
            for start in range(len(path)):
                shape, sharding = by_path.get(path[start:], (None, None))
                if shape == leaf.shape:
                    return sharding
            return self.replicated

        shardings = jax.tree.map_with_path(leaf_sharding, self.abstract_state)
        return replace(shardings, weights=self.weights, reference=self.reference)

    @property
    def state_without_reference(self) -> TrainState:
        return replace(self.state, reference=None)

    @cached_property
    def reference(self) -> Tree:
        reference = self.abstract_state.reference
        return reference and self.rules.shardings(self.reference_axes, reference)

    def batch(self, shape: tuple[int, ...]) -> Sharding:
        """The sharding by the logical axes of input data, over the mesh axes that data_sharding
        allows."""
        allowed = {
            axis
            for axes in self.config.data_sharding
            for axis in ([axes] if isinstance(axes, str) else axes)
        }
        axes = [*self.config.input_data_sharding_logical_axes, None][: len(shape)]
        return self.program_rules.sharding(axes, shape, allowed)

    def constrain_gradients(self, gradients: Tree) -> Tree:
        """Under jit: with ZeRO-1, reduce-scatter gradients to the shards that a device updates."""
        if not self.config.shard_optimizer_over_data:
            return gradients
        trained = optimized_mask(self.config, self.template)
        return jax.lax.with_sharding_constraint(gradients, select(self.gradients, trained))

    def check(self) -> None:
        """Raise ConfigError if a batch does not divide over the mesh, or if more weights than
        sharding_tolerance allows are replicated although the mesh could split them. With
        debug_sharding, log the sharding of every weight."""
        config = self.config
        check_batch_size(self.rules, config.micro_batch_size_to_train_on, self.batches.rows_key)
        if config.eval_interval > 0 and self.has_eval_loss:
            check_batch_size(
                self.rules.for_evaluation(config),
                config.micro_batch_size_to_eval_on,
                "eval_per_device_batch_size",
            )
        weights, axes = self.template.weights, self.template.axes
        if config.debug_sharding:
            for line in describe_shardings(self.rules, axes, weights):
                LOGGER.info("sharding: %s", line)
        check_sharded_fraction(self.rules, axes, weights, config.sharding_tolerance)


def with_shardings(tree: Tree, shardings: Tree) -> Tree:
    """A tree of abstract arrays with these shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        tree,
        shardings,
    )
