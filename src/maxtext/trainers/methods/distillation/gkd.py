"""Generalized knowledge distillation (GKD, arXiv:2306.13649): the loss is a divergence.

    loss = β·KL(t ‖ m) + (1−β)·KL(s ‖ m),  m = β·t + (1−β)·s

t and s are softmaxes of the logits of teacher and student over distill_temperature. β = 0 is the
forward KL(t ‖ s), β = 1 the reverse KL(s ‖ t). on_policy.py samples the completions of batches.
"""

from dataclasses import dataclass

import jax

from maxtext.trainers.losses.distill import divergence
from maxtext.trainers.methods.distillation.objective import (
    DistillationObjective,
    distillation_counts,
)
from maxtext.trainers.model_losses import Batch
from maxtext.trainers.objective import Sums

METRICS = ("kl", "kl_temperature_1", "hard_loss", "teacher_loss")
DIVERGENCE = "divergence"


@dataclass(frozen=True)
class GKDObjective(DistillationObjective):
    def counts(self, batch: Batch) -> Sums:
        counts = distillation_counts(self.config, batch)
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
        return {name: sums[name] for name in METRICS} | {DIVERGENCE: total}

    def token_loss(self, sums: Sums, coefficients: Sums) -> jax.Array:
        return sums[DIVERGENCE]
