"""The objective of a train step: `Objective`, an object that the step does not look into, and its
implementations that several methods share.

A method (pre-training and SFT, preferences, distillation) is an `Objective`. Its losses are sums
over tokens, rows or pairs of a microbatch; `counts` are their divisors over the whole batch. So the
sums of microbatches add up to the loss of the batch, whatever tokens each of them has.

`PolicyObjective` is the base of objectives of a policy and a reference (DPO, GRPO). The reference
is the policy as it was at step 0: a frozen copy of its weights, in the compute dtype where the
model casts them to it (`Template.cast`), so that both compute the same; with adapters the base, or
the base and the adapter that training started from.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext.common.trees import merge_dicts
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.parameters import Template
from maxtext.models.counts import forward_flops_per_token
from maxtext.trainers.model_losses import (
    Batch,
    Losses,
    eval_loss_sums,
    language_model_losses,
    target_mask,
    token_counts,
)
from maxtext.trainers.trainable import has_adapters, optimized_mask, select

Sums = dict[str, jax.Array]


class Objective(Protocol):
    """The loss of a model with the weights of `template`.

    `reference`: the frozen weights of another model (the reference of DPO, a teacher), or None.
    """

    @property
    def config(self) -> MaxTextConfig: ...

    @property
    def template(self) -> Template: ...

    @property
    def has_prompts(self) -> bool:
        """Whether rows have tokens that are read and are not in the loss."""

    @property
    def compares_passes(self) -> bool:
        """Whether the loss compares two passes that are equal if their weights are, of which one
        is differentiated."""

    def with_config(self, config: MaxTextConfig) -> "Objective":
        """The same model, with other settings."""

    def with_shared_prefix(self, length: int) -> "Objective":
        """For rows of which the first of each group begin with the same `length` tokens."""

    def counts(self, batch: Batch) -> Sums:
        """The divisor of each sum of `losses`."""

    def losses(
        self, weights: Tree, reference: Tree, batch: Batch, key: jax.Array | None, step: jax.Array
    ) -> Losses:
        """The losses of a microbatch. `step`: the number of steps done, for schedules."""

    def eval_sums(self, weights: Tree, reference: Tree, batch: Batch) -> Sums:
        """Sums over a batch of the evaluation data: `loss`, its divisor `count`, and more."""

    def eval_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """`loss` and other metrics from the sums of `eval_sums` over all batches."""

    def model_rows(self, batch: Batch) -> Batch:
        """The rows of a batch that the model reads, with the fields of FIELDS."""

    def num_tokens(self, batch: Batch) -> jax.Array:
        """The tokens of a batch, for throughput."""

    @property
    def token_fields(self) -> dict[str, tuple[int, DTypeLike]]:
        """Further fields of a batch of training, [rows, length, size]: their size and dtype."""

    @property
    def row_fields(self) -> tuple[str, ...]:
        """Fields of a batch that are float32 [rows], in addition to those of its row format."""

    @property
    def reference_flops_per_token(self) -> float:
        """FLOPs of the forward pass of the reference in every step; 0 if it does not run."""

    @property
    def abstract_reference(self) -> Tree:
        """The weights of the reference as abstract arrays; None if there is no reference."""

    @property
    def reference_axes(self) -> Tree:
        """The logical axes of the reference, in the same tree."""

    def make_reference(self, initial_weights: Callable[[], Tree], shardings: Tree) -> Tree:
        """The reference in these shardings; called if `abstract_reference` is not None.
        `initial_weights` returns the weights of the trained model before the first step."""

    @property
    def starts_from_reference(self) -> bool:
        """Whether `start_weights` changes the weights that were loaded."""

    def start_weights(self, weights: Tree, reference: Tree) -> Tree:
        """The weights of step 0, from those that were loaded; under jit."""

    def constrain_weights(self, weights: Tree) -> Tree:
        """The weights after an update, with the equalities that the objective keeps."""

    @property
    def model_template(self) -> Template:
        """The model that is trained, as it runs."""

    def model_weights(self, weights: Tree, reference: Tree) -> Tree:
        """The weights of `model_template`, from the trained ones; under jit."""

    def trained_weights(self, model_weights: Tree) -> Tree:
        """The trained weights before the first step, from those of `model_template`; under jit."""


@dataclass(frozen=True)
class ModelObjective:
    """The base class of most objectives: the trained weights are the weights of the model that
    runs, and there is no reference."""

    config: MaxTextConfig
    template: Template
    has_prompts: bool = field(default=False, kw_only=True)

    @property
    def compares_passes(self) -> bool:
        return False

    def with_config(self, config: MaxTextConfig) -> Self:
        return replace(self, config=config)

    def with_shared_prefix(self, length: int) -> Self:
        assert not length, "rows of this method share no prompt"
        return self

    @property
    def token_fields(self) -> dict[str, tuple[int, DTypeLike]]:
        return {}

    @property
    def row_fields(self) -> tuple[str, ...]:
        return ()

    @property
    def reference_flops_per_token(self) -> float:
        return 0.0

    @property
    def abstract_reference(self) -> Tree:
        return None

    @property
    def reference_axes(self) -> Tree:
        return None

    def make_reference(self, initial_weights: Callable[[], Tree], shardings: Tree) -> Tree:
        return None

    @property
    def starts_from_reference(self) -> bool:
        return False

    def start_weights(self, weights: Tree, reference: Tree) -> Tree:
        return weights

    def constrain_weights(self, weights: Tree) -> Tree:
        return weights

    @property
    def model_template(self) -> Template:
        return self.template

    def model_weights(self, weights: Tree, reference: Tree) -> Tree:
        return weights

    def trained_weights(self, model_weights: Tree) -> Tree:
        return model_weights


@dataclass(frozen=True)
class LanguageModelObjective(ModelObjective):
    """Next-token prediction over the targets in the mask of a batch."""

    def counts(self, batch: Batch) -> Sums:
        return token_counts(self.config, batch)

    def losses(
        self, weights: Tree, reference: Tree, batch: Batch, key: jax.Array | None, step: jax.Array
    ) -> Losses:
        return language_model_losses(self.config, self.template, weights, batch, key)

    def eval_sums(self, weights: Tree, reference: Tree, batch: Batch) -> Sums:
        return eval_loss_sums(
            self.config, self.template, weights, batch, counts_correct=self.has_prompts
        )

    def eval_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        loss = sums["loss"] / max(sums["count"], 1.0)
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
        if "correct" in sums:
            metrics["mean_token_accuracy"] = sums["correct"] / max(sums["count"], 1.0)
        if "drafts" in sums:
            metrics["mtp_acceptance_rate"] = sums["accepted"] / max(sums["drafts"], 1.0)
        return metrics

    def model_rows(self, batch: Batch) -> Batch:
        return batch

    def num_tokens(self, batch: Batch) -> jax.Array:
        return jnp.sum(target_mask(batch))


@dataclass(frozen=True)
class PolicyObjective(ModelObjective, ABC):
    base_template: Template  # without adapters

    @property
    def compares_passes(self) -> bool:
        return True

    @property
    @abstractmethod
    def needs_reference(self) -> bool:
        """Whether every step computes the reference."""

    @property
    def reference_flops_per_token(self) -> float:
        return forward_flops_per_token(self.config) if self.needs_reference else 0.0

    @property
    def abstract_reference(self) -> Tree:
        """The result of `reference_weights`, as abstract arrays."""
        if not self.needs_reference:
            return None
        return jax.eval_shape(self.reference_weights, self.template.weights)

    @property
    def reference_axes(self) -> Tree:
        """Logical axes of the reference, in the same tree."""
        if has_adapters(self.config):
            trained = optimized_mask(self.config, self.template)
            return select(self.template.axes, trained) if self.config.lora_restore_path else {}
        return self.template.axes

    def make_reference(self, initial_weights: Callable[[], Tree], shardings: Tree) -> Tree:
        return jax.jit(self.reference_weights, out_shardings=shardings)(initial_weights())

    def reference_weights(self, weights: Tree) -> Tree:
        """The reference of a policy that starts with these weights; under jit.

        A new adapter does not change the output, so its reference is the base, which the policy
        has already: {}.
        """
        if has_adapters(self.config):
            if not self.config.lora_restore_path:
                return {}
            trained = optimized_mask(self.config, self.template)
            return jax.tree.map(jnp.copy, select(weights, trained))
        return jax.tree.map(jnp.copy, self.template.cast(weights))

    def reference_model(self, weights: Tree, reference: Tree) -> tuple[Template, Tree]:
        """The template of the reference and its weights, without a gradient. `weights`: those of
        the policy, which hold the base of adapters."""
        if not has_adapters(self.config):
            return self.template, jax.lax.stop_gradient(reference)
        trained = optimized_mask(self.config, self.template)
        base = select(weights, trained, keep=False)
        template = self.template if reference else self.base_template
        return template, jax.lax.stop_gradient(merge_dicts(reference, base))
