"""Distillation from logits that a teacher wrote earlier (offline_data_dir).

Both sides of the KL are softmaxes over the top K tokens of the teacher. Shapes: B batch,
S sequence, K tokens of the vocabulary.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline.teacher_logits import TOP_K_FIELDS
from maxtext.models.transformer import Transformer
from maxtext.trainers.losses.distill import distill
from maxtext.trainers.methods.distillation.objective import (
    TOKEN_SUMS,
    distillation_counts,
    loss_coefficients,
    pop_z_loss,
)
from maxtext.trainers.model_losses import (
    Batch,
    Losses,
    bind_model,
    run_head,
    sum_aux_losses,
    sum_tiles,
    target_mask,
    training_inputs,
    z_loss_sums,
)
from maxtext.trainers.objective import LanguageModelObjective, Sums

OFFLINE_SUMS = tuple(name for name in TOKEN_SUMS if name != "teacher_loss")
TEMPERATURE = "distill_temperature"


@dataclass(frozen=True)
class OfflineDistillationObjective(LanguageModelObjective):
    top_k: int

    @property
    def token_fields(self) -> dict[str, tuple[int, DTypeLike]]:
        return {name: (self.top_k, dtype) for name, dtype in TOP_K_FIELDS.items()}

    def counts(self, batch: Batch) -> Sums:
        return distillation_counts(self.config, batch)

    def losses(
        self, weights: Tree, reference: Tree, batch: Batch, key: jax.Array | None, step: jax.Array
    ) -> Losses:
        model = bind_model(self.config, self.template, weights)
        x, layer_aux = model.run(batch["inputs"], training_inputs(self.config, batch, key))
        coefficients = loss_coefficients(self.config, step)
        fields = batch | {TEMPERATURE: coefficients[TEMPERATURE]}
        head = partial(top_k_sums, self.config)
        sums = run_head(head, [(self.config, self.template, weights)], x, fields)
        alpha = coefficients["distill_alpha"]
        loss = alpha * sums["soft_loss"] + (1.0 - alpha) * sums["hard_loss"]
        return Losses(
            sums={"distillation_loss": loss} | pop_z_loss(sums),
            aux_losses=sum_aux_losses(layer_aux),
            layer_aux=layer_aux,
            metrics=sums | coefficients,
        )


def top_k_sums(config: MaxTextConfig, model: Transformer, x: jax.Array, batch: Batch) -> Sums:
    """OFFLINE_SUMS and z_loss of the output of the last layer."""

    def tile(
        x: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
        teacher_logits: jax.Array,
        indices: jax.Array,
    ) -> Sums:
        logits = model.logits(model.final_norm(x))
        _, metrics = distill(
            logits,
            teacher_logits.astype(jnp.float32),
            targets,
            mask,
            temperature=batch[TEMPERATURE],
            indices=indices,
            tokens=1.0,  # sums instead of means
        )
        sums = {name: metrics[name] for name in OFFLINE_SUMS}
        return sums | z_loss_sums(config, logits, mask)

    teacher_fields = (batch[name] for name in TOP_K_FIELDS)
    arrays = (x, batch["targets"], target_mask(batch), *teacher_fields)
    return sum_tiles(tile, config.num_vocab_tiling, *arrays)
