"""Every family trains: a step changes its weights, scanned as unrolled. And what experts, indexers,
QK-clip and multi-token prediction add to a step."""

import jax
import numpy as np
import pytest

from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ModelWeights, load_weights
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.multi_token import mtp_targets
from tests.support.training_families import (
    EXPERTS,
    FAMILIES,
    INDEXED,
    SGD,
)


def named(bench, weights):
    """Weights by their names in checkpoints, stacked or not."""
    return dict(ModelWeights(weights, model_param_infos(bench.context.template, bench.config)))


# The layers of the others consist of parts of these. tests/parity/test_zoo.py compares their
# scanned with their unrolled logits.
@pytest.mark.representative("qwen3_next", "gpt3")
@pytest.mark.parametrize("block", FAMILIES)
@pytest.mark.slow
def test_scanned_and_unrolled_layers_give_the_same_step(make_bench, packed, block):
    overrides = (f"decoder_block={block}", *FAMILIES[block], *SGD)
    unrolled, scanned = make_bench(*overrides), make_bench(*overrides, "scan_layers=true")
    template = scanned.context.template
    before = load_weights(
        ModelWeights(unrolled.state.weights,
                     model_param_infos(unrolled.context.template, unrolled.config)),
        model_param_infos(template, scanned.config), template,
    )  # fmt: skip
    state, metrics = scanned(packed, scanned.context.state_from_weights(before))
    assert np.isfinite(metrics["loss"])
    weights, start = named(scanned, state.weights), named(unrolled, unrolled.state.weights)
    other, other_metrics = unrolled(packed)
    assert metrics["loss"] == pytest.approx(other_metrics["loss"], rel=1e-5)
    expected = named(unrolled, other.weights)
    for name, weight in weights.items():
        np.testing.assert_allclose(expected[name], weight, atol=2e-5, rtol=1e-4, err_msg=name)
    still = [name for name in weights if (weights[name] == start[name]).all()]
    # A scale that is not trained, a bias that the load sets; and experts that no token of this
    # batch chose.
    assert all(name.endswith(("/scale", "router/bias")) or "/experts/" in name for name in still), (
        still
    )
    assert len(still) < len(weights) / 3
    if block == "deepseek":  # by the load alone
        biases = np.concatenate(
            [weight for name, weight in weights.items() if name.endswith("router/bias")]
        )
        assert set(np.abs(biases).tolist()) in ({0.25}, {0, 0.25})


@pytest.mark.slow
def test_load_balance_loss_does_not_depend_on_microbatches(make_bench, packed):
    """The loss of eight layers' experts is not divided by the number of microbatches."""
    overrides = ("decoder_block=mixtral", *EXPERTS, "load_balance_loss_weight=0.5", *SGD)
    plain, cut = make_bench(*overrides), make_bench(*overrides, "gradient_accumulation_steps=2")
    twice = {
        name: np.repeat(field[:4], 2, axis=0) for name, field in packed.items()
    }  # both cuts are the same rows
    _, metrics = plain(twice)
    _, other = cut(twice, plain.state)
    assert metrics["load_balance_loss"] > 0.1
    assert other["load_balance_loss"] == pytest.approx(metrics["load_balance_loss"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(
        metrics["lm_loss"] + metrics["load_balance_loss"], rel=1e-6
    )


@pytest.mark.parametrize("sparse", ["false", "true"])
@pytest.mark.slow
def test_weights_that_an_indexer_trains(make_bench, packed, sparse):
    """During warm-up the indexer alone, and the language model's loss is only reported; then
    both.
    """
    bench = make_bench(*INDEXED, f"indexer_sparse_training={sparse}")
    state, metrics = bench(packed)
    before, after = named(bench, bench.state.weights), named(bench, state.weights)
    moved = {name for name in before if (before[name] != after[name]).any()}
    learned = {name for name in moved if "/indexer/" in name}
    assert any(name.endswith("indexer/query/weight") for name in learned)
    total = (
        metrics["lm_loss"] + metrics["indexer_loss"]
        if sparse == "true"
        else metrics["indexer_loss"]
    )
    assert metrics["loss"] == pytest.approx(total, rel=1e-6)
    assert (moved == learned) == (sparse == "false")
    assert not any(name.endswith("router/bias") for name in moved), "their rate is zero"


MTP = ("decoder_block=llama2", "mtp_num_layers=2", "mtp_loss_scaling_factor=0.3", *SGD)


@pytest.mark.slow
def test_mtp_loss(make_bench, packed, quickly):
    """By hand: the mean over all positions of both layers; and the same for unequal
    microbatches.
    """
    bench, cut = make_bench(*MTP), make_bench(*MTP, "gradient_accumulation_steps=4")
    state, metrics = bench(packed)

    def further(weights, batch):
        model = bench.context.template.bind(weights)
        inputs = LayerInputs(batch["inputs_position"], batch["inputs_segmentation"])
        x, _ = model.run(batch["inputs"], inputs)
        return [
            model.logits(hidden) for hidden in model.mtp(x, model.embed, inputs, batch["inputs"])[0]
        ]

    total = count = 0.0
    for step, logits in enumerate(quickly(further)(bench.state.weights, packed), start=1):
        targets, mask = map(
            np.asarray,
            mtp_targets(
                packed["targets"],
                packed["targets_segmentation"],
                packed["inputs_segmentation"],
                step,
            ),
        )
        logits = np.asarray(logits, np.float64)
        logits -= logits.max(-1, keepdims=True)
        likelihood = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= (np.take_along_axis(likelihood, targets[..., None], -1)[..., 0] * mask).sum()
        count += mask.sum()
    assert count > 30
    assert metrics["mtp_loss"] == pytest.approx(0.3 * total / count, rel=1e-4)
    assert metrics["loss"] == pytest.approx(metrics["lm_loss"] + metrics["mtp_loss"], rel=1e-6)
    other, other_metrics = cut(packed, bench.state)
    assert other_metrics["mtp_loss"] == pytest.approx(metrics["mtp_loss"], rel=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), state.weights, other.weights
    )


@pytest.mark.slow
def test_mtp_acceptance_rate_is_recorded(run_training):
    run = run_training(
        "decoder_block=llama2",
        "mtp_num_layers=1",
        *SGD,
        "mtp_eval_target_module=1",
        "steps=2",
        "eval_interval=1",
        "eval_steps=1",
    )
    rates = [record["eval_mtp_acceptance_rate"] for record in run.records if "eval_loss" in record]
    assert len(rates) == 2
    assert all(0 <= rate <= 1 for rate in rates)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("moba=true", "moba_chunk_size=4", "moba_topk=2"), id="chosen chunks"),
        pytest.param(("mhc_expansion_rate=2", "sinkhorn_iterations=3", "mtp_num_layers=1",
                      "engram_layers=[1]",
                      "engram_vocab_bases=[23,23]", "engram_head_dim=4", "engram_num_heads=2"),
                      id="all at once",
                     marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_added_layer_weight_has_a_gradient(make_bench, packed, overrides):
    """Hyper-connections and engram memories have weights of their own, which are all trained."""
    bench = make_bench("decoder_block=llama2", "base_num_decoder_layers=2", *overrides, *SGD)
    state, first = bench(packed)
    for _ in range(3):
        state, metrics = bench(packed, state)
    assert metrics["loss"] < first["loss"]
    before, after = named(bench, bench.state.weights), named(bench, state.weights)
    still = [name for name in before if (before[name] == after[name]).all()]
    # Before the convolution of a memory has left zero, nothing reaches the norm before it.
    assert not still or all("convolution_norm" in name for name in still), still
