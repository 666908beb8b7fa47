"""Distillation: a student learns from the targets of its data and from the logits of a teacher.

    loss = α·soft + (1−α)·hard + β·feature,  soft = T²·KL(teacher_T ‖ student_T)

hard is the cross-entropy, feature the distance of the outputs of attention, layer by layer.

The teacher is the reference of the training state: frozen, on the mesh of the student, and in the
compute dtype where its layers cast to it (`Template.cast`). Evaluation is that of the student
alone. Shapes: B batch, S sequence, E embedding.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.parameters import Template
from maxtext.models.counts import forward_flops_per_token
from maxtext.models.transformer import Transformer
from maxtext.optimizers import schedule_steps
from maxtext.sharding.explicit import auto_sharded
from maxtext.trainers.losses.common import masked_sum
from maxtext.trainers.losses.distill import anneal, distill, divergence, feature_distances
from maxtext.trainers.methods.distillation.learn_to_init import LearnToInit
from maxtext.trainers.methods.distillation.teacher import pop_features, read_teacher_weights
from maxtext.trainers.methods.distillation.weight_maps import WeightMaps
from maxtext.trainers.model_losses import (
    Batch,
    Losses,
    bind_model,
    eval_loss_sums,
    run_head,
    sum_aux_losses,
    sum_tiles,
    target_mask,
    training_inputs,
    z_loss_sums,
)
from maxtext.trainers.objective import LanguageModelObjective, Sums

TOKEN_SUMS = ("soft_loss", "hard_loss", "kl", "kl_temperature_1", "teacher_loss")
COEFFICIENTS = ("distill_alpha", "distill_temperature", "distill_beta")
DIVERGENCE = "divergence"
GKD_METRICS = ("kl", "kl_temperature_1", "hard_loss", "teacher_loss")


@dataclass(frozen=True)
class DistillationObjective(LanguageModelObjective):
    teacher_config: MaxTextConfig
    teacher_template: Template
    maps: WeightMaps
    learn_to_init: LearnToInit | None = None

    def with_config(self, config: MaxTextConfig) -> "DistillationObjective":
        update = {"max_segments_per_seq": config.max_segments_per_seq}
        return replace(
            self, config=config, teacher_config=self.teacher_config.model_copy(update=update)
        )

    @property
    def compares_passes(self) -> bool:
        return True

    @property
    def reference_flops_per_token(self) -> float:
        return forward_flops_per_token(self.teacher_config)

    @property
    def abstract_reference(self) -> Tree:
        return self.teacher_template.weights

    @property
    def reference_axes(self) -> Tree:
        return self.teacher_template.axes

    def make_reference(self, initial_weights: Callable[[], Tree], shardings: Tree) -> Tree:
        return read_teacher_weights(self.teacher_config, self.teacher_template, shardings)

    @property
    def starts_from_reference(self) -> bool:
        return self.maps.has_entries

    def start_weights(self, weights: Tree, reference: Tree) -> Tree:
        return self.maps.copy(weights, reference)

    def constrain_weights(self, weights: Tree) -> Tree:
        return self.maps.share(weights)

    @property
    def model_template(self) -> Template:
        return self.template if self.learn_to_init is None else self.learn_to_init.student

    def model_weights(self, weights: Tree, reference: Tree) -> Tree:
        weights = self.maps.share(weights)
        if self.learn_to_init is None:
            return weights
        return self.learn_to_init.model_weights(weights, reference)

    def trained_weights(self, model_weights: Tree) -> Tree:
        if self.learn_to_init is None:
            return model_weights
        return self.learn_to_init.initial_weights(model_weights)

    def counts(self, batch: Batch) -> Sums:
        return distillation_counts(self.config, batch)

    def eval_sums(self, weights: Tree, reference: Tree, batch: Batch) -> Sums:
        weights = self.model_weights(weights, reference)
        return eval_loss_sums(
            self.config, self.model_template, weights, batch, counts_correct=self.has_prompts
        )

    def losses(
        self, weights: Tree, reference: Tree, batch: Batch, key: jax.Array | None, step: jax.Array
    ) -> Losses:
        reference = jax.lax.stop_gradient(reference)
        weights = self.model_weights(weights, reference)
        x, layer_aux = self.run_layers(self.config, self.model_template, weights, batch, key)
        teacher_x, teacher_aux = self.run_layers(
            self.teacher_config, self.teacher_template, reference, batch, None
        )
        coefficients = self.loss_coefficients(step)
        models = [
            (self.config, self.model_template, weights),
            (self.teacher_config, self.teacher_template, reference),
        ]
        arrays = (x, jax.lax.stop_gradient(teacher_x), batch, coefficients["distill_temperature"])
        sums = run_head(self.head_sums, models, *arrays)
        loss = self.token_loss(sums, coefficients)
        if self.uses_features:
            layer_aux, features = pop_features(layer_aux, self.config.distill_layer_indices)
            _, teacher_features = pop_features(teacher_aux, self.config.distill_layer_indices)
            sums["feature_loss"] = self.feature_sum(features, teacher_features, batch)
            loss += coefficients["distill_beta"] * sums["feature_loss"]
        return Losses(
            sums={"distillation_loss": loss} | pop_z_loss(sums),
            aux_losses=sum_aux_losses(layer_aux),
            layer_aux=layer_aux,
            metrics=sums | coefficients,
        )

    @property
    def uses_features(self) -> bool:
        return self.config.distill_beta > 0

    def loss_coefficients(self, step: jax.Array) -> Sums:
        """The scheduled values after `step` steps, by key."""
        return loss_coefficients(self.config, step)

    def token_sums(
        self,
        student_logits: jax.Array,
        teacher_logits: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
        temperature: jax.Array,
    ) -> Sums:
        """Losses and metrics of logits [B, S, V], summed over the tokens that are trained on."""
        _, metrics = distill(
            student_logits,
            teacher_logits,
            targets,
            mask,
            temperature=temperature,
            tokens=1.0,  # sums instead of means
        )
        return {name: metrics[name] for name in TOKEN_SUMS}

    def token_loss(self, sums: Sums, coefficients: Sums) -> jax.Array:
        """The loss without features, from `token_sums` and `loss_coefficients`."""
        alpha = coefficients["distill_alpha"]
        return alpha * sums["soft_loss"] + (1.0 - alpha) * sums["hard_loss"]

    def run_layers(
        self,
        config: MaxTextConfig,
        template: Template,
        weights: Tree,
        batch: Batch,
        key: jax.Array | None,
    ) -> tuple[jax.Array, dict]:
        """The output of the last layer of a model [B, S, E], and what its layers report."""
        inputs = training_inputs(config, batch, key)
        inputs = replace(inputs, reports_attention=self.uses_features)
        return bind_model(config, template, weights).run(batch["inputs"], inputs)

    def feature_sum(
        self, features: jax.Array, teacher_features: jax.Array, batch: Batch
    ) -> jax.Array:
        """The distance of features [L, B, S, E], averaged over layers, summed over tokens."""

        def run(features: jax.Array, teacher_features: jax.Array, mask: jax.Array) -> jax.Array:
            kind = self.config.distill_feature_loss_type
            return masked_sum(feature_distances(features, teacher_features, mask, kind), mask)

        return auto_sharded(run, features, teacher_features, target_mask(batch), out_axes=())

    def head_sums(
        self,
        student: Transformer,
        teacher: Transformer,
        x: jax.Array,
        teacher_x: jax.Array,
        batch: Batch,
        temperature: jax.Array,
    ) -> Sums:
        """`token_sums` and z_loss of the outputs of the last layers of the two models. Logits of
        both exist for S / num_vocab_tiling tokens of each row at a time."""

        def tile(x: jax.Array, teacher_x: jax.Array, targets: jax.Array, mask: jax.Array) -> Sums:
            logits = student.logits(student.final_norm(x))
            teacher_logits = teacher.logits(teacher.final_norm(teacher_x))
            sums = self.token_sums(logits, teacher_logits, targets, mask, temperature)
            return sums | z_loss_sums(self.config, logits, mask)

        arrays = (x, teacher_x, batch["targets"], target_mask(batch))
        return sum_tiles(tile, self.config.num_vocab_tiling, *arrays)


@dataclass(frozen=True)
class GKDObjective(DistillationObjective):
    """Generalized knowledge distillation (GKD, arXiv:2306.13649): the loss is a divergence.

        loss = β·KL(t ‖ m) + (1−β)·KL(s ‖ m),  m = β·t + (1−β)·s

    t and s are softmaxes of the logits of teacher and student over distill_temperature. β = 0 is
    the forward KL(t ‖ s), β = 1 the reverse KL(s ‖ t). on_policy.py samples the completions of
    batches.
    """

    def counts(self, batch: Batch) -> Sums:
        counts = super().counts(batch)
        return counts | {DIVERGENCE: counts["distillation_loss"]}

    def loss_coefficients(self, step: jax.Array) -> Sums:
        coefficients = super().loss_coefficients(step)
        return {"distill_temperature": coefficients["distill_temperature"]}

    def token_sums(
        self,
        student_logits: jax.Array,
        teacher_logits: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
        temperature: jax.Array,
    ) -> Sums:
        sums = super().token_sums(student_logits, teacher_logits, targets, mask, temperature)
        total = divergence(
            student_logits,
            teacher_logits,
            mask,
            beta=self.config.gkd_beta,
            temperature=temperature,
            tokens=1.0,
        )
        return {name: sums[name] for name in GKD_METRICS} | {DIVERGENCE: total}

    def token_loss(self, sums: Sums, coefficients: Sums) -> jax.Array:
        return sums[DIVERGENCE]


def distillation_counts(config: MaxTextConfig, batch: Batch) -> Sums:
    """The divisors of the sums of distillation."""
    tokens = jnp.maximum(jnp.sum(target_mask(batch)), 1.0)
    microbatches = jnp.float32(config.gradient_accumulation_steps)
    names = ("distillation_loss", "feature_loss", "z_loss", *TOKEN_SUMS)
    return dict.fromkeys(names, tokens) | dict.fromkeys(COEFFICIENTS, microbatches)


def pop_z_loss(sums: Sums) -> Sums:
    """Moves z_loss from the metrics, if it is on, to the losses that are minimized."""
    return {"z_loss": sums.pop("z_loss")} if "z_loss" in sums else {}


def loss_coefficients(config: MaxTextConfig, step: jax.Array) -> Sums:
    """α, T and β after `step` steps."""
    schedules = (
        (config.distill_alpha, config.distill_alpha_end, config.distill_alpha_schedule),
        (
            config.distill_temperature,
            config.distill_temperature_end,
            config.distill_temperature_schedule,
        ),
        (config.distill_beta, config.distill_beta_end, config.distill_beta_schedule),
    )
    steps = schedule_steps(config)
    return {
        name: anneal(step, steps, *schedule)
        for name, schedule in zip(COEFFICIENTS, schedules, strict=True)
    }
