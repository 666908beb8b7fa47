"""Preference optimization: DPO and its relatives, and ORPO.

A batch has the fields of two sequences per pair, `chosen_*` and `rejected_*`. One forward pass runs
both, as rows 2i and 2i + 1, so that devices and microbatches hold whole pairs. Shapes: P pairs,
S positions.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.input_pipeline import FIELDS
from maxtext.layers.parameters import Template
from maxtext.models.transformer import Transformer
from maxtext.trainers.losses import preference as preference_losses
from maxtext.trainers.model_losses import (
    Batch,
    Losses,
    bind_model,
    run_head,
    sum_aux_losses,
    target_mask,
    training_inputs,
)
from maxtext.trainers.objective import PolicyObjective, Sums

REFERENCE_LOGPS = ("reference_chosen_logps", "reference_rejected_logps")  # [P], computed before
ROW_AXES = ("activation_embed_and_logits_batch",)


@dataclass(frozen=True)
class PairLogps:
    """Of each pair, [P] for the chosen and for the rejected completion."""

    chosen: jax.Array  # sums over the tokens of the completion
    rejected: jax.Array
    chosen_lengths: jax.Array
    rejected_lengths: jax.Array
    chosen_nll: jax.Array  # negative log-likelihood of prompt and chosen completion
    layer_aux: dict


@dataclass(frozen=True)
class PreferenceObjective(PolicyObjective):
    """The loss of dpo_loss_type over pairs of completions."""

    @property
    def has_reference(self) -> bool:
        return self.config.dpo_loss_type not in ("orpo", "simpo")

    @property
    def needs_reference(self) -> bool:
        """Whether every step computes the reference."""
        return self.has_reference and not self.config.precompute_reference_logps

    @property
    def row_fields(self) -> tuple[str, ...]:
        return () if not self.has_reference or self.needs_reference else REFERENCE_LOGPS

    def counts(self, batch: Batch) -> Sums:
        num_pairs = jnp.maximum(jnp.sum(pair_mask(batch)), 1.0)
        chosen_tokens = jnp.maximum(jnp.sum(batch["chosen_inputs_segmentation"] != 0), 1)
        names = (*self.metric_names, "preference_loss")
        return dict.fromkeys(names, num_pairs) | {"nll_loss": chosen_tokens.astype(jnp.float32)}

    @property
    def metric_names(self) -> tuple[str, ...]:
        rewards = ("chosen", "rejected", "margins", "accuracies")
        names = (*(f"rewards/{name}" for name in rewards), "logps/chosen", "logps/rejected")
        if self.config.dpo_loss_type == "orpo":
            names += ("log_odds_ratio", "log_odds_chosen")
        return names

    def losses(
        self, weights: Tree, reference: Tree, batch: Batch, key: jax.Array | None, step: jax.Array
    ) -> Losses:
        policy = self.pair_logps(self.template, weights, batch, key)
        sums, metrics = self.loss_sums(
            policy, self.reference_logps(weights, reference, batch), batch
        )
        aux_losses = sum_aux_losses(policy.layer_aux)
        return Losses(sums, aux_losses=aux_losses, layer_aux=policy.layer_aux, metrics=metrics)

    def loss_sums(
        self, policy: PairLogps, reference: tuple[jax.Array, jax.Array] | None, batch: Batch
    ) -> tuple[Sums, Sums]:
        """Losses and metrics, summed over pairs; the negative log-likelihood over tokens."""
        config, mask = self.config, pair_mask(batch)
        if config.dpo_loss_type == "orpo":
            value, metrics = preference_losses.orpo(
                policy.chosen / jnp.maximum(policy.chosen_lengths, 1.0),
                policy.rejected / jnp.maximum(policy.rejected_lengths, 1.0),
                nll=0.0,
                weight=config.orpo_lambda,
                label_smoothing=config.dpo_label_smoothing,
                mask=mask,
                num_pairs=1.0,
            )
            sums = {"preference_loss": value, "nll_loss": jnp.sum(policy.chosen_nll)}
        else:
            value, metrics = preference_losses.dpo(
                policy.chosen,
                policy.rejected,
                *(reference or (None, None)),
                beta=config.dpo_beta,
                label_smoothing=config.dpo_label_smoothing,
                loss_type=config.dpo_loss_type,
                gamma=config.simpo_gamma,
                chosen_lengths=policy.chosen_lengths,
                rejected_lengths=policy.rejected_lengths,
                mask=mask,
                num_pairs=1.0,
            )
            sums = {"preference_loss": value}
        return sums, {name: metrics[name] for name in self.metric_names}

    def reference_logps(
        self, weights: Tree, reference: Tree, batch: Batch
    ) -> tuple[jax.Array, jax.Array] | None:
        """The reference's log-probabilities, from the batch or computed; None if the loss has no
        reference."""
        if self.row_fields:
            return batch[REFERENCE_LOGPS[0]], batch[REFERENCE_LOGPS[1]]
        return self.compute_reference(weights, reference, batch) if self.needs_reference else None

    def compute_reference(
        self, weights: Tree, reference: Tree, batch: Batch
    ) -> tuple[jax.Array, jax.Array]:
        """Sums of log-probabilities of the chosen and of the rejected completions."""
        template, frozen = self.reference_model(weights, reference)
        pairs = self.pair_logps(template, frozen, batch, None)
        return jax.lax.stop_gradient((pairs.chosen, pairs.rejected))

    def pair_logps(
        self, template: Template, weights: Tree, batch: Batch, key: jax.Array | None
    ) -> PairLogps:
        rows = self.model_rows(batch)
        model = bind_model(self.config, template, weights)
        x, layer_aux = model.run(rows["inputs"], training_inputs(self.config, rows, key))
        head = partial(row_logp_sums, self.config)
        sums = run_head(head, [(self.config, template, weights)], x, rows, out_axes=ROW_AXES)
        logps, nll, lengths = (value.reshape(-1, 2) for value in sums)
        return PairLogps(
            chosen=logps[:, 0],
            rejected=logps[:, 1],
            chosen_lengths=lengths[:, 0],
            rejected_lengths=lengths[:, 1],
            chosen_nll=nll[:, 0],
            layer_aux=layer_aux,
        )

    def eval_sums(self, weights: Tree, reference: Tree, batch: Batch) -> Sums:
        policy = self.pair_logps(self.template, weights, batch, None)
        sums, metrics = self.loss_sums(
            policy, self.reference_logps(weights, reference, batch), batch
        )
        num_pairs = jnp.sum(pair_mask(batch))
        result = metrics | {"loss": sums["preference_loss"], "count": num_pairs}
        if "nll_loss" in sums:
            num_tokens = jnp.sum(batch["chosen_inputs_segmentation"] != 0)
            result |= {"nll_loss": sums["nll_loss"], "nll_tokens": num_tokens.astype(jnp.float32)}
        return result

    def eval_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        num_pairs = max(sums["count"], 1.0)
        metrics = {name: sums[name] / num_pairs for name in ("loss", *self.metric_names)}
        if "nll_loss" in sums:
            metrics["nll_loss"] = sums["nll_loss"] / max(sums["nll_tokens"], 1.0)
            metrics["loss"] += metrics["nll_loss"]
        return metrics

    def model_rows(self, batch: Batch) -> Batch:
        return pair_rows(batch)

    def num_tokens(self, batch: Batch) -> jax.Array:
        return num_pair_tokens(batch)


def pair_rows(batch: Batch) -> Batch:
    """The 2P rows of P pairs: chosen, rejected, chosen, rejected …"""
    rows = {}
    for field in FIELDS:
        pairs = jnp.stack([batch[f"chosen_{field}"], batch[f"rejected_{field}"]], axis=1)
        rows[field] = pairs.reshape(-1, pairs.shape[-1])
    return rows


def num_pair_tokens(batch: Batch) -> jax.Array:
    fields = (batch["chosen_inputs_segmentation"], batch["rejected_inputs_segmentation"])
    return jnp.sum(jnp.stack(fields) != 0).astype(jnp.float32)


def pair_mask(batch: Batch) -> jax.Array:
    """[P]: 1 for a pair, 0 for a row of padding."""
    return jnp.any(batch["chosen_inputs_segmentation"] != 0, axis=1).astype(jnp.float32)


def row_logp_sums(
    config: MaxTextConfig, model: Transformer, x: jax.Array, batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each row: the log-probability of its tokens in the loss, the negative log-likelihood of
    all its tokens, and the number of tokens in the loss."""
    token_losses, _ = model.losses(model.final_norm(x), batch["targets"], config.num_vocab_tiling)
    loss_mask = target_mask(batch)
    is_token = (batch["inputs_segmentation"] != 0).astype(jnp.float32)
    return (
        -jnp.sum(token_losses * loss_mask, axis=1),
        jnp.sum(token_losses * is_token, axis=1),
        jnp.sum(loss_mask, axis=1),
    )
