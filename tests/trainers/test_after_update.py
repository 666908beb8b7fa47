"""Changes to weights besides the optimizer's update, and weights that no optimizer may change.

Weights are compared by their names in checkpoints, which are the same for stacked and unrolled
layers. Auxiliary outputs are recomputed here from the parts of the layers.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import keystr

from maxtext.checkpoint.open import model_param_infos
from maxtext.checkpoint.weights import ModelWeights
from maxtext.layers.inputs import LayerInputs
from maxtext.trainers.build import build_run_context
from maxtext.trainers.trainable import select

ADAMW = ("learning_rate=0.01", "adam_weight_decay=0.5")
LATENT = (
    "decoder_block=deepseek", "attention_type=mla", "base_num_kv_heads=4", "head_dim=128",
    "q_lora_rank=12", "kv_lora_rank=10", "qk_nope_head_dim=6", "qk_rope_head_dim=4", "v_head_dim=8",
    "base_num_decoder_layers=2",
)  # fmt: skip
BIASED = (
    *LATENT, "num_experts=4", "num_experts_per_tok=2", "routed_score_func=sigmoid",
    "routed_bias=true", "routed_bias_update_rate=0.01",
)  # fmt: skip
UNROLLED, SCANNED = "scan_layers=false", "scan_layers=true"


def named(bench, state):
    """The weights of a state by their names in checkpoints."""
    return dict(
        ModelWeights(state.weights, model_param_infos(bench.context.template, bench.config))
    )


def changed(state, end, change):
    """The state with other values for the weights whose paths end with `end`."""

    def value(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return jnp.asarray(change(leaf), leaf.dtype) if name.endswith(end) else leaf

    return replace(state, weights=jax.tree.map_with_path(value, state.weights))


def layers_of(model):
    return [
        layers[repeat]
        for stack in model.layers
        for repeat in range(stack.segment.repeats)
        for layers in stack.blocks
    ]


# Balancing experts without a loss.


def loads(bench, state, batch, quickly):
    """[layers, X]: the tokens routed to each expert of each layer, without padding."""

    def router_scores_of(weights, batch):
        model, router_scores = bench.context.template.bind(weights), []
        inputs = LayerInputs(batch["inputs_position"], batch["inputs_segmentation"])
        x = model.embed(batch["inputs"])
        for layer in layers_of(model):
            x = x + layer.attention(layer.attention_norm(x), inputs)[0]
            router = layer.mlp.router
            router_scores.append(
                jax.nn.sigmoid(layer.mlp_norm(x) @ router.weight[...]) + router.bias[...]
            )
            x = x + layer.mlp(layer.mlp_norm(x), inputs)[0]
        return router_scores

    chosen = [
        np.argsort(-np.asarray(scores), axis=-1)[..., :2]
        for scores in quickly(router_scores_of)(state.weights, batch)
    ]
    return np.array(
        [
            np.bincount(experts[batch["inputs_segmentation"] > 0].ravel(), minlength=4)
            for experts in chosen
        ]
    )


def uneven(bias):
    """Biases of four experts, the same in every layer; layers are stacked last."""
    values = np.array([0.03, -0.02, 0.01, 0.0], np.float32)
    return np.broadcast_to(values[:, None] if bias.ndim == 2 else values, bias.shape)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_router_biases_follow_the_expert_load_and_nothing_else(
    make_bench, packed, quickly, microbatches
):
    """By exactly the rate, from biases that would decay if anything let them."""
    overrides = (*BIASED, *ADAMW, f"gradient_accumulation_steps={microbatches}")
    unrolled = make_bench(*overrides, UNROLLED)
    expected = loads(unrolled, changed(unrolled.state, "router/bias", uneven), packed, quickly)
    assert (expected != expected.mean(axis=1, keepdims=True)).any(axis=1).all()
    benches = [unrolled, make_bench(*overrides, SCANNED)]
    for bench in benches if microbatches == 1 else benches[1:]:
        begin = changed(bench.state, "router/bias", uneven)
        before, after = named(bench, begin), named(bench, bench(packed, begin)[0])
        for layer, load in enumerate(expected):
            name = f"layers/{layer}/mlp/router/bias"
            step = np.float32(0.01) * np.sign(load.mean() - load).astype(np.float32)
            np.testing.assert_array_equal(after[name], before[name] + step, err_msg=name)
        assert all(
            (before[name] != after[name]).any()
            for name in before
            if not name.endswith("router/bias")
        )


# QK-clip.

FACTORS = np.array([0.01, 3.0, 30.0, 90.0])  # on the queries of the four heads


def largest_logits(bench, weights, batch):
    """[layers, heads], over the keys that queries see: before them, in the same document."""
    segments = batch["inputs_segmentation"]
    positions = np.arange(segments.shape[1])
    seen = (
        (positions[:, None] >= positions)
        & (segments[:, :, None] == segments[:, None])
        & (segments[:, :, None] > 0)
    )
    model, max_logits = bench.context.template.bind(weights), []
    inputs = LayerInputs(batch["inputs_position"], segments)
    x = model.embed(batch["inputs"])
    for layer in layers_of(model):
        attention, read = layer.attention, layer.attention_norm(x)
        query, _ = attention.queries(read, inputs.positions)
        key = attention.keys_and_values(*attention.compress(read, inputs.positions))["key"]
        logits = jnp.einsum("bshd,bthd->bhst", query, key) / np.sqrt(6 + 4)
        max_logits.append(jnp.where(seen[:, None], logits, -np.inf).max(axis=(0, 2, 3)))
        x = x + layer.mlp(layer.mlp_norm(x), inputs)[0]  # attention adds nothing here, see below
    return jnp.array(max_logits)


@pytest.mark.slow
def test_qk_clip_limits_logits_to_the_threshold(make_bench, packed, quickly):
    """Heads below the threshold are unchanged. The learning rate and the attention output are zero,
    so logits change by clipping alone, in a dense layer and in two scanned ones."""
    layers = (
        "base_num_decoder_layers=3",
        "first_num_dense_layers=1",
        "num_experts=4",
        "num_experts_per_tok=2",
    )
    overrides = (
        *LATENT[:-1],
        *layers,
        "use_qk_clip=true",
        "qk_clip_threshold=2",
        "opt_type=sgd",
        "learning_rate=0",
    )
    scanned, unrolled = make_bench(*overrides, SCANNED), make_bench(*overrides, UNROLLED)

    def begin(bench):
        state = changed(bench.state, "attention/out/weight", jnp.zeros_like)
        return changed(state, "query_b/weight", lambda kernel: kernel * FACTORS[:, None])

    state, _ = unrolled(packed, begin(unrolled))
    logits = quickly(lambda weights: largest_logits(unrolled, weights, packed))
    before, after = (np.asarray(logits(each.weights)) for each in (begin(unrolled), state))
    assert (before > 2).any(axis=1).all()
    assert (before < 2).any(axis=1).all()
    np.testing.assert_allclose(after, np.minimum(before, 2), rtol=1e-4)
    updated, start = named(unrolled, state), named(unrolled, begin(unrolled))
    for name, value in named(scanned, scanned(packed, begin(scanned))[0]).items():
        np.testing.assert_allclose(value, updated[name], rtol=1e-5, err_msg=name)
        if not name.endswith(("query_b/weight", "kv_b/weight")):
            np.testing.assert_array_equal(value, start[name], err_msg=name)


# Skipped steps.


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.slow
def test_a_skipped_step_changes_no_weight(make_bench, packed, microbatches):
    """Neither router biases, nor QK-clip, nor the optimizer state; without the skip the same step
    changes all of them."""
    overrides = (
        *BIASED, *ADAMW, "use_qk_clip=true", "qk_clip_threshold=1",
        "skip_step_on_spikes=true", "skip_step_interval=4",
        f"gradient_accumulation_steps={microbatches}",
    )  # fmt: skip
    bench = make_bench(*overrides)
    start = changed(bench.state, "query_b/weight", lambda kernel: kernel * 1000)
    # Four recorded losses of 0: every loss above 0 is a spike.
    spiky = replace(start, opt_state=start.opt_state._replace(recorded=jnp.int32(4)))
    after, metrics = bench(packed, spiky)
    assert metrics["skipped"] == 1
    assert int(after.step) == 1
    jax.tree.map(np.testing.assert_array_equal, after.weights, start.weights)
    jax.tree.map(
        np.testing.assert_array_equal, after.opt_state.inner_state, start.opt_state.inner_state
    )
    other, metrics = bench(packed, start)
    assert metrics["skipped"] == 0
    before, moved = named(bench, start), named(bench, other)
    assert all((before[name] != moved[name]).any() for name in before)


@pytest.mark.slow
def test_indexer_warm_up_trains_indexers_alone(make_bench, packed):
    """Not by weight decay, not by the load of experts, not by clipping."""
    indexed = ("use_indexer=true", "indexer_topk=3", "indexer_head_dim=8", "indexer_n_heads=2")
    overrides = (
        *BIASED,
        *indexed,
        "indexer_loss_scaling_factor=1",
        "use_qk_clip=true",
        "qk_clip_threshold=1",
        *ADAMW,
    )
    bench = make_bench(*overrides)
    begin = changed(bench.state, "query_b/weight", lambda kernel: kernel * 30)
    state, metrics = bench(packed, begin)
    before, after = named(bench, begin), named(bench, state)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in before if "/indexer/" in name} != set()
    assert metrics["loss"] == metrics["indexer_loss"] > 0


# What the model keeps, and an optimizer leaves alone.

KEPT = {
    "gemma4": (
        "sliding_window_size=4", "base_num_decoder_layers=3", "architecture={layer_kinds: "
                                                              "[sliding, sliding, full]}",
    ),
    "deepseek": BIASED,
    # whose router's bias is learned
    "gpt_oss": ("sliding_window_size=4", "num_experts=4", "routed_bias=true"),
}  # fmt: skip


@pytest.mark.parametrize("block", KEPT)
@pytest.mark.slow
def test_no_optimizer_updates_untrained_parameters(configure, quickly, block):
    """The layer scale (Gemma 4) and the router biases (DeepSeek), not even by weight decay."""
    constant = (
        "lr_schedule_type=wsd",
        "wsd_decay_steps_fraction=0",
        "warmup_steps_fraction=0",
        SCANNED,
    )
    overrides = dict(
        override.partition("=")[::2]
        for override in (f"decoder_block={block}", *KEPT[block], *ADAMW, *constant)
    )
    context = build_run_context(configure(*(f"{key}={value}" for key, value in overrides.items())))
    ones = jax.tree.map(lambda leaf: jnp.ones(leaf.shape, leaf.dtype), context.template.weights)
    optimized = select(ones, context.trained)
    state = context.optimizer.init(optimized)
    updates, _ = quickly(context.optimizer.update)(optimized, state, optimized)
    untrained = {"gemma4": r"blocks/\d+/scale$", "deepseek": r"router/bias$", "gpt_oss": r"^$"}[
        block
    ]
    names = {
        keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(ones)
    }
    updates = {
        keystr(path, simple=True, separator="/"): update
        for path, update in jax.tree.leaves_with_path(updates)
    }
    assert names - updates.keys() == {name for name in names if re.search(untrained, name)}
    assert (names == updates.keys()) == (block == "gpt_oss")
    assert all((update < 0).all() for update in updates.values())
