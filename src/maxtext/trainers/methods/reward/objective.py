"""The loss of a reward model over preference pairs (Bradley and Terry, 1952; arXiv:2009.01325).

    loss = −log σ(r_chosen − r_rejected − margin) + c·(r_chosen + r_rejected)²

r is the score at the last token of prompt and completion, `margin` a column of the data (0 without
it), and c = center_rewards_coefficient, which keeps the scores around zero (arXiv:2312.09244).
Shapes: P pairs, S positions, E embedding.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from maxtext.common.types import Tree
from maxtext.input_pipeline.interface import MARGIN
from maxtext.models.transformer import Transformer
from maxtext.trainers.methods.preference.objective import (
    ROW_AXES,
    num_pair_tokens,
    pair_mask,
    pair_rows,
)
from maxtext.trainers.model_losses import (
    Batch,
    Losses,
    bind_model,
    run_head,
    sum_aux_losses,
    training_inputs,
)
from maxtext.trainers.objective import ModelObjective, Sums

METRICS = ("rewards/accuracies", "rewards/margins", "rewards/mean")


@dataclass(frozen=True)
class RewardObjective(ModelObjective):
    @property
    def row_fields(self) -> tuple[str, ...]:
        return (MARGIN,)

    def counts(self, batch: Batch) -> Sums:
        num_pairs = jnp.maximum(jnp.sum(pair_mask(batch)), 1.0)
        return dict.fromkeys(("reward_loss", "center_loss", *METRICS), num_pairs)

    def losses(
        self, weights: Tree, reference: Tree, batch: Batch, key: jax.Array | None, step: jax.Array
    ) -> Losses:
        scores, layer_aux = self.scores(weights, batch, key)
        sums, metrics = self.loss_sums(scores, batch)
        aux_losses = sum_aux_losses(layer_aux)
        return Losses(sums, aux_losses=aux_losses, layer_aux=layer_aux, metrics=metrics)

    def loss_sums(self, scores: jax.Array, batch: Batch) -> tuple[Sums, Sums]:
        """Losses and metrics, summed over pairs. `scores` [P, 2]: chosen, rejected."""
        mask, (chosen, rejected) = pair_mask(batch), scores.T
        difference = chosen - rejected
        sums = {"reward_loss": -jax.nn.log_sigmoid(difference - batch[MARGIN])}
        if coefficient := self.config.center_rewards_coefficient:
            sums["center_loss"] = coefficient * jnp.square(chosen + rejected)
        metrics = {
            "rewards/accuracies": (difference > 0).astype(jnp.float32),
            "rewards/margins": difference,
            "rewards/mean": (chosen + rejected) / 2,
        }

        def total(values: Sums) -> Sums:
            return {name: jnp.sum(jnp.where(mask > 0, value, 0)) for name, value in values.items()}

        return total(sums), total(metrics)

    def scores(self, weights: Tree, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, dict]:
        """float32 [P, 2], and what the layers report."""
        rows = self.model_rows(batch)
        model = bind_model(self.config, self.template, weights)
        x, layer_aux = model.run(rows["inputs"], training_inputs(self.config, rows, key))
        models = [(self.config, self.template, weights)]
        scores = run_head(last_scores, models, x, rows, out_axes=ROW_AXES)
        return scores.reshape(-1, 2), layer_aux

    def eval_sums(self, weights: Tree, reference: Tree, batch: Batch) -> Sums:
        sums, metrics = self.loss_sums(self.scores(weights, batch, None)[0], batch)
        loss = sums["reward_loss"] + sums.get("center_loss", 0.0)
        return metrics | {"loss": loss, "count": jnp.sum(pair_mask(batch))}

    def eval_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        num_pairs = max(sums["count"], 1.0)
        return {name: sums[name] / num_pairs for name in ("loss", *METRICS)}

    def model_rows(self, batch: Batch) -> Batch:
        return pair_rows(batch)

    def num_tokens(self, batch: Batch) -> jax.Array:
        return num_pair_tokens(batch)


def last_scores(model: Transformer, x: jax.Array, batch: Batch) -> jax.Array:
    """float32 [B]: the score of each row at its last token, from the output of the last layer
    [B, S, E]. Rows of a context-parallel run are permuted, so positions say which token is last."""
    is_token = batch["inputs_segmentation"] != 0
    last = jnp.argmax(jnp.where(is_token, batch["inputs_position"], -1), axis=1)
    x = jnp.take_along_axis(x, last[:, None, None], axis=1)
    return model.scores(model.final_norm(x))[:, 0, 0].astype(jnp.float32)
