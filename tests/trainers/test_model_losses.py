"""Losses besides the cross-entropy, recomputed here: sums in loops, layers from their parts."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.layers.inputs import LayerInputs
from maxtext.models.transformer import initial_weights
from maxtext.trainers.build import build_run_context
from maxtext.trainers.model_losses import (
    eval_loss_sums,
    language_model_losses,
    needs_segment_mask,
    token_counts,
)

GRAIN = "dataset_type=grain"
MTP = (
    GRAIN,
    "mtp_num_layers=2",
    "mtp_loss_scaling_factor=0.3",
    "mtp_eval_target_module=2",
    "eval_interval=1",
)
EXPERTS = (
    GRAIN,
    "num_experts=4",
    "num_experts_per_tok=2",
    "base_num_decoder_layers=2",
    "load_balance_loss_weight=0.3",
)


@dataclass(frozen=True)
class Model:
    """A configuration with weights that differ from their initial values: norms have scales."""

    config: Any
    template: Any
    weights: Any
    losses: Any
    evaluate: Any

    @classmethod
    def of(cls, config, quickly):
        template = build_run_context(config).template
        draw = np.random.default_rng(3).normal
        weights = quickly(lambda: initial_weights(config))()
        weights = jax.tree.map(
            lambda leaf: leaf + 0.1 * draw(size=leaf.shape).astype(leaf.dtype), weights
        )
        losses = quickly(
            lambda weights, batch: language_model_losses(config, template, weights, batch, None)
        )
        evaluate = quickly(lambda weights, batch: eval_loss_sums(config, template, weights, batch))
        return cls(config, template, weights, losses, evaluate)

    @cached_property
    def bound(self):
        return self.template.bind(self.weights)


@pytest.fixture(scope="module")
def mtp_model(configure, quickly):
    return Model.of(configure(*MTP), quickly)


def inputs_of(batch):
    return LayerInputs(
        batch["inputs_position"], batch["inputs_segmentation"], None, batch["inputs"]
    )


# Further tokens.


def target_positions(batch, steps):
    """(row, position) whose target `steps` tokens later belongs to the same document."""
    segments = batch["targets_segmentation"]
    return [
        (row, position)
        for row, line in enumerate(segments)
        for position in range(len(line) - steps)
        if line[position] != 0 and line[position + steps] == line[position]
    ]


def rms(x, scale):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-5) * scale


def drafts(model, batch):
    """For each MTP layer the logits [B, S, V], from the definition: the layer reads the next tokens
    of a document (id 0 beyond its end) and the output of the previous MTP layer."""
    x, _ = model.bound.run(batch["inputs"], inputs_of(batch))
    for steps, layer in enumerate(model.bound.mtp.layers, start=1):
        ids = np.zeros_like(batch["inputs"])
        for row, position in target_positions(batch, steps):
            ids[row, position] = batch["inputs"][row, position + steps]
        embedded = np.asarray(model.bound.embedder.embedding[...])[ids]
        concatenated = np.concatenate(
            [
                rms(embedded, layer.embedding_norm.scale[...]),
                rms(np.asarray(x), layer.hidden_norm.scale[...]),
            ],
            axis=-1,
        )
        x, _ = layer.block(
            jnp.asarray(concatenated @ np.asarray(layer.projection.weight[...])), inputs_of(batch)
        )
        yield np.asarray(
            rms(np.asarray(x), layer.output_norm.scale[...]) @ model.bound.head.weight[...]
        )


@pytest.mark.slow
def test_mtp_loss(mtp_model, packed):
    total = count = 0.0
    with jax.default_matmul_precision("highest"):
        for steps, logits in enumerate(drafts(mtp_model, packed), start=1):
            for row, position in target_positions(packed, steps):
                token_logits = logits[row, position].astype(np.float64)
                total += (
                    np.log(np.exp(token_logits).sum())
                    - token_logits[packed["targets"][row, position + steps]]
                )
                count += 1
    losses = mtp_model.losses(mtp_model.weights, packed)
    assert float(losses.sums["mtp_loss"]) == pytest.approx(0.3 * total, rel=1e-5)
    counts = token_counts(mtp_model.config, packed)
    assert (
        counts["mtp_loss"]
        == count
        == sum(max(n - 1, 0) + max(n - 2, 0) for n in (16, 4, 7, 5, 6, 3, 7, 2, 1, 8, 1))
    )
    assert counts["lm_loss"] == counts["z_loss"] == 16 + 4 + 7 + 5 + 6 + 3 + 7 + 2 + 1 + 8 + 1


@pytest.mark.slow
def test_a_draft_token_is_accepted_if_the_model_predicts_it(mtp_model, packed):
    """Of the second MTP layer, whose drafts the model predicts two positions later. The vocabulary
    is reduced to few tokens, so that both sometimes agree."""
    few = jnp.arange(mtp_model.config.vocab_size) < 3
    weights = mtp_model.weights | {"head": {"weight": mtp_model.weights["head"]["weight"] * few}}
    mtp_model = replace(mtp_model, weights=weights)
    with jax.default_matmul_precision("highest"):
        said = np.argmax(
            mtp_model.bound(
                packed["inputs"], packed["inputs_position"], packed["inputs_segmentation"]
            ),
            -1,
        )
        drafted = np.argmax(list(drafts(mtp_model, packed))[1], -1)
    taken = [
        said[row, position + 2] == drafted[row, position]
        for row, position in target_positions(packed, 2)
    ]
    sums = mtp_model.evaluate(mtp_model.weights, packed)
    assert (sums["accepted"], sums["drafts"]) == (sum(taken), len(taken))
    assert 0 < sum(taken) < len(taken)


# The balance of experts.


def balance(model, batch):
    """E² · mean over sequences and experts of (fraction of the tokens routed to it · its mean
    probability), for each layer; over the tokens of a sequence, and over sequences that have any.
    """
    x = model.bound.embed(batch["inputs"])
    for layer in model.bound.layers[0].blocks[0]:
        x = x + layer.attention(layer.attention_norm(x), inputs_of(batch))[0]
        probabilities = np.asarray(jax.nn.softmax(layer.mlp_norm(x) @ layer.mlp.router.weight[...]))
        balance = []
        for row, segments in zip(probabilities, batch["inputs_segmentation"], strict=True):
            if segments.any():
                row = row[segments > 0]
                chosen = np.argsort(-row, axis=-1)[:, :2]
                fraction = np.array([(chosen == expert).sum() for expert in range(4)]) / len(row)
                balance.append(np.mean(fraction * row.mean(axis=0)))
        yield 4**2 * np.mean(balance)
        x = x + layer.mlp(layer.mlp_norm(x), inputs_of(batch))[0]


@pytest.mark.slow
def test_load_balance_loss_is_summed_over_layers(configure, quickly, packed):
    model = Model.of(configure("decoder_block=mixtral", *EXPERTS), quickly)
    with jax.default_matmul_precision("highest"):
        expected = list(balance(model, packed))
    losses = model.losses(model.weights, packed)
    reported = np.ravel(losses.layer_aux["layers"][0]["blocks"][0]["load_balance_loss"])
    np.testing.assert_allclose(reported, 0.3 * np.array(expected), rtol=1e-5)
    assert float(losses.aux_losses["load_balance_loss"]) == pytest.approx(
        0.3 * sum(expected), rel=1e-5
    )


def test_mtp_layers_contribute_to_the_load_balance_loss(configure, quickly, packed):
    model = Model.of(configure("decoder_block=mixtral", *EXPERTS, "mtp_num_layers=1"), quickly)
    losses = model.losses(model.weights, packed)
    of_layers = float(jnp.sum(losses.layer_aux["layers"][0]["blocks"][0]["load_balance_loss"]))
    further = float(losses.layer_aux["mtp"]["layers"][0]["block"]["load_balance_loss"])
    assert further > 0.3  # times two at an even load
    assert float(losses.aux_losses["load_balance_loss"]) == pytest.approx(
        of_layers + further, rel=1e-6
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((GRAIN,), True),
        (
            (GRAIN, "packing=false"),
            False,
        ),  # causal attention does not look at the padding behind it
        ((GRAIN, "packing=false", "attention_type=full"), True),
        (
            (GRAIN, "packing=false", "decoder_block=mixtral", "num_experts=4"),
            True,
        ),  # padding would take expert capacity
        (("decoder_block=mixtral", "num_experts=4"), False),  # synthetic rows have no padding
        ((), False),
    ],
)
def test_segments_are_masked_where_needed(configure, overrides, expected):
    assert needs_segment_mask(configure(*overrides)) is expected
