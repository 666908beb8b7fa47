"""Group-relative policy optimization (GRPO, arXiv:2402.03300), and GSPO by loss_algo.

A row of a batch is a prompt and one of its sampled completions, of which the completion is learned.
Beside the fields of FIELDS it has its advantage and the log-probabilities of its tokens under the
policy that sampled it. group_rollouts.py makes these batches. Shapes: B rows, S positions.

Log-probabilities of the policy, the sampler and the reference are those of softmax(logits / T) with
the sampling temperature T, over the whole vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.common.errors import ConfigError
from maxtext.configs.types import MaxTextConfig
from maxtext.layers.parameters import Template
from maxtext.trainers.losses.grpo import grpo
from maxtext.trainers.losses.logps import logps
from maxtext.trainers.model_losses import (
    Batch,
    Losses,
    bind_model,
    run_head,
    sum_aux_losses,
    token_weights,
    training_inputs,
)
from maxtext.trainers.objective import Sums
from maxtext.trainers.policy import PolicyObjective

OLD_LOGPS = "old_logps"  # [B, S, 1]
ADVANTAGES = "advantages"  # [B]
TOKEN_AXES = ("activation_embed_and_logits_batch", "activation_norm_length")
RATIO_LEVELS = {"grpo": "token", "gspo-token": "sequence_token"}


@dataclass(frozen=True)
class GroupRelativePolicy(PolicyObjective):
    """The clipped policy loss with a KL penalty, averaged over the tokens of each completion and
    then over completions."""

    @property
    def needs_reference(self) -> bool:
        return self.config.grpo_beta > 0

    @property
    def temperature(self) -> float:
        return self.config.decode_sampling_temperature

    @property
    def token_fields(self) -> dict[str, tuple[int, Any]]:
        return {OLD_LOGPS: (1, jnp.float32)}

    @property
    def row_fields(self) -> tuple[str, ...]:
        return (ADVANTAGES,)

    def counts(self, batch: Batch) -> Sums:
        mask = token_weights(batch)
        num_tokens = jnp.maximum(jnp.sum(mask), 1.0)
        num_rows = jnp.maximum(jnp.sum(jnp.any(mask != 0, axis=1)), 1).astype(jnp.float32)
        return dict.fromkeys(self.metric_names, num_tokens) | {"policy_loss": num_rows}

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Means over the learned tokens."""
        names = ("clip_ratio/low", "clip_ratio/high")
        return (*names, "kl") if self.needs_reference else names

    def losses(
        self, weights: Any, reference: Any, batch: Batch, key: jax.Array | None, step: jax.Array
    ) -> Losses:
        config = self.config
        policy_logps, layer_aux = self.token_logps(self.template, weights, batch, key)
        ref_logps = None
        if self.needs_reference:
            template, frozen = self.reference_model(weights, reference)
            ref_logps, _ = self.token_logps(template, frozen, batch, None)
        value, metrics = grpo(
            policy_logps,
            batch[OLD_LOGPS][..., 0],
            batch[ADVANTAGES],
            token_weights(batch),
            ref_logps=ref_logps,
            beta=config.grpo_beta,
            epsilon=config.grpo_epsilon,
            epsilon_high=config.epsilon_high,
            level=RATIO_LEVELS[config.loss_algo],
            rows=1.0,
            tokens=1.0,
        )
        return Losses(
            {"policy_loss": value},
            aux_losses=sum_aux_losses(layer_aux),
            layer_aux=layer_aux,
            metrics={name: metrics[name] for name in self.metric_names},
        )

    def token_logps(
        self,
        template: Template,
        weights: Any,
        batch: Batch,
        key: jax.Array | None,
        temperature: float | None = None,
    ) -> tuple[jax.Array, dict]:
        """[B, S]: the log-probability of each target; and the auxiliary outputs of the layers.
        `temperature` None is that of sampling."""
        temperature = self.temperature if temperature is None else temperature
        model = bind_model(self.config, template, weights)
        x, layer_aux = model.run(batch["inputs"], training_inputs(self.config, batch, key))
        head = partial(head_logps, temperature=temperature)
        token_logps = run_head(self.config, template, weights, x, batch, head, TOKEN_AXES)
        return token_logps, layer_aux

    def score(self, weights: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """[B, S] each: log-probabilities at the sampling temperature, and at temperature 1, as the
        engine reports them."""
        at_one, _ = self.token_logps(self.template, weights, batch, None, 1.0)
        if self.temperature == 1.0:
            return at_one, at_one
        return self.token_logps(self.template, weights, batch, None)[0], at_one

    def evaluate(self, weights: Any, reference: Any, batch: Batch) -> Sums:
        raise ConfigError("eval_interval: reinforcement learning has no evaluation loss")

    def evaluation_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return sums

    def model_rows(self, batch: Batch) -> Batch:
        return batch

    def num_tokens(self, batch: Batch) -> jax.Array:
        return jnp.sum(batch["inputs_segmentation"] != 0).astype(jnp.float32)


def head_logps(
    config: MaxTextConfig, model: Any, x: jax.Array, batch: Batch, temperature: float
) -> jax.Array:
    hidden = model.final_norm(x)
    if temperature == 1.0:
        return -model.losses(hidden, batch["targets"], config.num_vocab_tiling)[0]
    return logps(model.logits(hidden), batch["targets"], temperature)
