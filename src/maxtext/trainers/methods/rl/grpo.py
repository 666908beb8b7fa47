"""Group-relative policy optimization (GRPO, arXiv:2402.03300), and GSPO by loss_algo.

A row of a batch is a prompt and one of its sampled completions. Beside the fields of FIELDS, whose
targets are the sampled tokens, it has the log-probabilities of these under the sampler, its
advantage, and whether the loss counts it. rollout_step.py makes these batches. Shapes: B rows, S
positions.

Log-probabilities of the policy, the sampler and the reference are those of softmax(logits / T) with
the sampling temperature T, over the whole vocabulary.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxtext.common.errors import ConfigError
from maxtext.common.types import Tree
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.inputs import SharedPrefix
from maxtext.layers.parameters import Template
from maxtext.models.transformer import Transformer
from maxtext.sharding.explicit import auto_sharded
from maxtext.trainers.losses.common import constant, entropies, logps, masked, masked_sum
from maxtext.trainers.losses.grpo import grpo, sampler_weights
from maxtext.trainers.model_losses import (
    Batch,
    Losses,
    bind_model,
    map_tiles,
    run_head,
    sum_aux_losses,
    target_mask,
    training_inputs,
)
from maxtext.trainers.objective import PolicyObjective, Sums

SAMPLER_LOGPS = "sampler_logps"  # [B, S, 1]
OLD_LOGPS = "old_logps"  # [B, S, 1], of the trainer with the weights that sampled
ADVANTAGES = "advantages"  # [B]
IS_TRAINED_ON = "is_trained_on"  # [B], 0 for rows that the loss leaves out
ROW_INDEX = "row_index"  # [B]
# Metrics of each row, float32 [rows of the batch]: the largest difference over tokens of (policy
# logp − sampler logp), and its position
ROW_DIFFERENCES, ROW_POSITIONS = "row_logp_difference", "row_logp_position"
TOKEN_AXES = ("activation_embed_and_logits_batch", "activation_norm_length")
RATIO_LEVELS = {"grpo": "token", "gspo-token": "sequence_token"}
REDUCTIONS = {
    "sequence-mean-token-mean": "grpo",
    "token-mean": "dapo",
    "micro-batch-token-mean": "bnpo",
    "sequence-mean-token-scale": "dr_grpo",
    "sequence-mean": "sum",
}


def uses_sampler_logps(config: MaxTextConfig) -> bool:
    """Whether the ratio is to the sampler's policy: the weights may differ from those that sampled.
    Off policy, sampler_correction weighs the loss for that difference instead."""
    is_off_policy = config.off_policy_steps > 0 and config.sampler_correction == "none"
    return config.num_iterations > 1 or is_off_policy


def needs_old_logps(config: MaxTextConfig) -> bool:
    """Whether the trainer scores rollouts before the first update. The log-probabilities of the
    sampler are the old ones unless they are corrected for."""
    return uses_sampler_logps(config) and config.sampler_correction != "none"


@dataclass(frozen=True)
class GRPOObjective(PolicyObjective):
    """The clipped policy loss with a KL penalty, added up as loss_agg_mode says.

    `shared_prefix`: the rows of a group begin with this many tokens of their prompt, which are
    computed once.
    """

    shared_prefix: int = 0

    def with_shared_prefix(self, length: int) -> "GRPOObjective":
        return replace(self, shared_prefix=length)

    @property
    def needs_reference(self) -> bool:
        return self.config.grpo_beta > 0

    @property
    def temperature(self) -> float:
        return self.config.decode_sampling_temperature

    @property
    def token_fields(self) -> dict[str, tuple[int, DTypeLike]]:
        names = (SAMPLER_LOGPS, OLD_LOGPS) if needs_old_logps(self.config) else (SAMPLER_LOGPS,)
        return dict.fromkeys(names, (1, jnp.float32))

    @property
    def row_fields(self) -> tuple[str, ...]:
        return (ADVANTAGES, IS_TRAINED_ON, ROW_INDEX)

    def counts(self, batch: Batch) -> Sums:
        mask = loss_mask(batch)
        num_tokens = jnp.maximum(jnp.sum(mask), 1.0)
        num_rows = jnp.maximum(jnp.sum(jnp.any(mask != 0, axis=1)), 1).astype(jnp.float32)
        num_sampled = jnp.maximum(jnp.sum(target_mask(batch)), 1.0)
        one = jnp.float32(1)
        reduction = REDUCTIONS[self.config.loss_agg_mode]
        divisors = {"dapo": num_tokens, "bnpo": one * self.config.gradient_accumulation_steps}
        return dict.fromkeys(self.metric_names, num_tokens) | {
            "policy_loss": divisors.get(reduction, num_rows),
            "entropy": num_sampled,
            "sampling/logp_difference_mean": num_sampled,
            ROW_DIFFERENCES: one,
            ROW_POSITIONS: one,
        }

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Means over the tokens that are trained on."""
        names = ("clip_ratio/low", "clip_ratio/high")
        return (*names, "kl") if self.needs_reference else names

    def losses(
        self, weights: Tree, reference: Tree, batch: Batch, key: jax.Array | None, step: jax.Array
    ) -> Losses:
        config = self.config
        policy_logps, entropy, layer_aux = self.token_logps(self.template, weights, batch, key)
        ref_logps = None
        if self.needs_reference:
            template, frozen = self.reference_model(weights, reference)
            ref_logps, *_ = self.token_logps(template, frozen, batch, None)
        sampler_logps = batch[SAMPLER_LOGPS][..., 0]
        old_logps = sampler_logps if uses_sampler_logps(config) else None
        if needs_old_logps(config):
            old_logps = batch[OLD_LOGPS][..., 0]
        mask = loss_mask(batch)
        value, metrics = grpo(
            policy_logps,
            old_logps,
            batch[ADVANTAGES],
            mask,
            ref_logps=ref_logps,
            beta=config.grpo_beta,
            epsilon=config.grpo_epsilon,
            epsilon_high=config.epsilon_high,
            dual_clip=config.dual_clip,
            level=RATIO_LEVELS[config.loss_algo],
            kl=config.kl_estimator,
            kl_correction=config.kl_correction,
            reduce=REDUCTIONS[config.loss_agg_mode],
            max_length=config.max_target_length - config.max_prefill_predict_length,
            rows=1.0,
            tokens=1.0,
            weights=self.correction(policy_logps, old_logps, sampler_logps, mask),
        )
        sampled = target_mask(batch)
        metrics = {name: metrics[name] for name in self.metric_names}
        rows = self.config.global_batch_size_to_train_on
        metrics |= auto_sharded(
            partial(agreement, rows=rows),
            policy_logps,
            sampler_logps,
            sampled,
            batch[ROW_INDEX],
            out_axes=(),
        )
        return Losses(
            {"policy_loss": value},
            aux_losses=sum_aux_losses(layer_aux),
            layer_aux=layer_aux,
            metrics=metrics | {"entropy": masked_sum(entropy, sampled)},
        )

    def correction(
        self,
        policy_logps: jax.Array,
        old_logps: jax.Array | None,
        sampler_logps: jax.Array,
        mask: jax.Array,
    ) -> jax.Array | None:
        """The weights of sampler_correction: of the trainer over the sampler, with the weights that
        sampled."""
        if self.config.sampler_correction == "none":
            return None
        level, mode = self.config.sampler_correction.split("_")
        trainer_logps = policy_logps if old_logps is None else old_logps
        return sampler_weights(
            trainer_logps,
            sampler_logps,
            mask,
            level=level,
            mode=mode,
            maximum=self.config.sampler_correction_cap,
        )

    def token_logps(
        self, template: Template, weights: Tree, batch: Batch, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, dict]:
        """[B, S]: the log-probability of each target; the entropy of each distribution; and the
        auxiliary outputs of the layers."""
        model = bind_model(self.config, template, weights)
        inputs, token_ids = training_inputs(self.config, batch, key), batch["inputs"]
        models = [(self.config, template, weights)]
        head = partial(head_logps, self.config, temperature=self.temperature)
        if not self.shared_prefix:
            x, layer_aux = model.run(token_ids, inputs)
            return (*run_head(head, models, x, batch["targets"], out_axes=TOKEN_AXES), layer_aux)
        rows, row_length = self.config.num_generations, token_ids.shape[1]
        prefix = SharedPrefix(rows, self.shared_prefix, row_length)
        x, layer_aux = model.run(prefix.fold(token_ids), inputs.with_shared_prefix(prefix))
        # The targets of the shared tokens are tokens of the prompt, which have no loss. The last
        # token of a row has no target; without it, the tiles of the logits have equal sizes.
        x, targets = prefix.others(x)[:, :-1], batch["targets"][:, prefix.length : -1]
        outputs = run_head(head, models, x, targets, out_axes=TOKEN_AXES)
        padding = ((0, 0), (prefix.length, 1))
        token_logps, entropy = (jnp.pad(each, padding) for each in outputs)
        return token_logps, entropy, layer_aux

    def score(self, weights: Tree, batch: Batch) -> jax.Array:
        """[B, S]: log-probabilities of the targets."""
        return self.token_logps(self.template, weights, batch, None)[0]

    def eval_sums(self, weights: Tree, reference: Tree, batch: Batch) -> Sums:
        raise ConfigError("eval_interval: reinforcement learning has no evaluation loss")

    def eval_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return sums

    def model_rows(self, batch: Batch) -> Batch:
        return batch

    def num_tokens(self, batch: Batch) -> jax.Array:
        return jnp.sum(batch["inputs_segmentation"] != 0).astype(jnp.float32)


def loss_mask(batch: Batch) -> jax.Array:
    """[B, S]: 1 for a sampled token of a row that is trained on."""
    return target_mask(batch) * batch[IS_TRAINED_ON][:, None]


def agreement(
    policy_logps: jax.Array,
    sampler_logps: jax.Array,
    sampled: jax.Array,
    row_index: jax.Array,
    rows: int,
) -> Sums:
    """The sum of the differences between the log-probabilities [B, S] of the policy and of the
    sampler; and the largest of each row, with its position, at `row_index` of [rows], so that
    microbatches add up."""
    differences = masked(constant(policy_logps) - sampler_logps, sampled)
    positions = jnp.argmax(jnp.abs(differences), axis=1)
    largest = jnp.take_along_axis(differences, positions[:, None], axis=1)[:, 0]
    index = row_index.astype(jnp.int32)
    zeros = jnp.zeros(rows, jnp.float32)
    return {
        "sampling/logp_difference_mean": jnp.sum(jnp.abs(differences)),
        ROW_DIFFERENCES: zeros.at[index].set(largest),
        ROW_POSITIONS: zeros.at[index].set(positions.astype(jnp.float32)),
    }


def head_logps(
    config: MaxTextConfig, model: Transformer, x: jax.Array, targets: jax.Array, temperature: float
) -> tuple[jax.Array, jax.Array]:
    """[B, S] each: log-probabilities of the targets, and entropies, which have no gradient. Logits
    exist for S / num_vocab_tiling tokens of each row at a time."""
    hidden, tiles = model.final_norm(x), config.num_vocab_tiling

    def tile_entropies(hidden: jax.Array) -> jax.Array:
        return entropies(model.logits(hidden), temperature)

    def tile_logps(hidden: jax.Array, targets: jax.Array) -> jax.Array:
        return logps(model.logits(hidden), targets, temperature)

    entropy = map_tiles(tile_entropies, tiles, jax.lax.stop_gradient(hidden))
    if temperature == 1.0:
        return -model.losses(hidden, targets, tiles)[0], entropy
    return map_tiles(tile_logps, tiles, hidden, targets), entropy
