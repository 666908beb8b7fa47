"""The train step: its loss, gradients and update against torch, and what must not change them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.models.configuration import load
from maxtext.trainers.build import build_run_context
from maxtext.trainers.compilation.compile import lower_train_step
from maxtext.trainers.step import accumulate

torch = pytest.importorskip("torch")

PLAIN = ("opt_type=sgd", "learning_rate=0.5", "gradient_clipping_threshold=0")
Z_LOSS = ("z_loss_multiplier=0.05",)
TOKENS = 16 + 11 + 0 + 5 + 16 + 2 + 9 + 1  # learned from in the packed batch


def torch_losses(logits, batch):
    """(mean cross-entropy, mean squared logsumexp) over the tokens that are no padding, in
    float64.
    """
    logits = torch.tensor(np.asarray(logits), dtype=torch.float64).flatten(0, 1)
    learned = torch.tensor(batch["targets_segmentation"] != 0).flatten()
    targets = torch.tensor(batch["targets"], dtype=torch.int64).flatten()
    cross_entropy = torch.nn.functional.cross_entropy(logits[learned], targets[learned])
    return cross_entropy.item(), logits[learned].logsumexp(-1).square().mean().item()


@pytest.fixture(scope="module")
def independent(make_bench, quickly):
    """(logits, gradients): of the model alone, and of the masked mean loss written without the
    trainer's losses.
    """
    bench = make_bench(*PLAIN)

    def loss(weights, batch, z):
        logits = bench.logits(weights, batch)
        learned = jnp.asarray(batch["targets_segmentation"] != 0, jnp.float32)
        logarithms = jnp.take_along_axis(
            jax.nn.log_softmax(logits), batch["targets"][..., None], -1
        )[..., 0]
        squares = jax.nn.logsumexp(logits, -1) ** 2
        return jnp.sum(learned * (z * squares - logarithms)) / jnp.sum(learned)

    gradients = quickly(jax.grad(loss))
    return quickly(bench.logits), lambda weights, batch, z=0.0: named(gradients(weights, batch, z))


def named(tree):
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in flat
    }


def update_of(bench, batch):
    """The change of each weight in one step, and its metrics."""
    state, metrics = bench(batch)
    before, after = named(bench.state.weights), named(state.weights)
    return {name: after[name].astype(np.float64) - before[name] for name in before}, metrics


def largest(tree):
    return max(np.abs(leaf).max() for leaf in tree.values())


def assert_same_update(actual, expected, relative=2e-6):
    assert actual.keys() == expected.keys()
    scale = largest(expected)
    for name in expected:
        np.testing.assert_allclose(
            actual[name], expected[name], rtol=0, atol=relative * scale, err_msg=name
        )


@pytest.fixture(scope="module")
def full_batch(make_bench, packed):
    """(update, metrics) of one step on the packed batch at once, with z-loss."""
    return update_of(make_bench(*PLAIN, *Z_LOSS), packed)


def test_loss_equals_the_masked_mean_of_torch(make_bench, packed, full_batch, independent):
    logits, _ = independent
    bench = make_bench(*PLAIN, *Z_LOSS)
    cross_entropy, squares = torch_losses(logits(bench.state.weights, packed), packed)
    _, metrics = full_batch
    assert metrics["lm_loss"] == pytest.approx(cross_entropy, rel=1e-6)
    assert metrics["z_loss"] == pytest.approx(0.05 * squares, rel=1e-6)
    assert metrics["loss"] == pytest.approx(cross_entropy + 0.05 * squares, rel=1e-6)
    assert metrics["total_weights"] == TOKENS


def test_without_z_loss_the_loss_is_the_cross_entropy(make_bench, packed, independent):
    logits, _ = independent
    bench = make_bench(*PLAIN)
    cross_entropy, _ = torch_losses(logits(bench.state.weights, packed), packed)
    _, metrics = bench(packed)
    assert metrics["loss"] == metrics["lm_loss"] == pytest.approx(cross_entropy, rel=1e-6)
    assert "z_loss" not in metrics


def test_sgd_update_is_the_rate_times_the_gradient(make_bench, packed, full_batch, independent):
    bench = make_bench(*PLAIN, *Z_LOSS)
    gradients = independent[1](bench.state.weights, packed, 0.05)
    update, metrics = full_batch
    assert_same_update(update, {name: -0.5 * gradient for name, gradient in gradients.items()})
    norm = np.sqrt(
        sum(np.sum(np.square(gradient, dtype=np.float64)) for gradient in gradients.values())
    )
    assert metrics["raw_grad_norm"] == metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    state, _ = bench(packed)
    weights = named(state.weights).values()
    norm = np.sqrt(sum(np.sum(np.square(weight, dtype=np.float64)) for weight in weights))
    assert metrics["param_norm"] == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_accumulation_gives_the_update_of_the_full_batch(
    make_bench, packed, full_batch, microbatches
):
    """Also if microbatches have very unequal token counts, and with an auxiliary loss."""
    expected, metrics = full_batch
    counts = np.count_nonzero(packed["targets_segmentation"], axis=1)
    assert (
        len({int(counts[index::microbatches].sum()) for index in range(microbatches)})
        == microbatches
    ), "the microbatches must differ"
    update, pieced = update_of(
        make_bench(*PLAIN, *Z_LOSS, f"gradient_accumulation_steps={microbatches}"), packed
    )
    assert_same_update(update, expected)
    assert pieced == pytest.approx(metrics, rel=2e-6)


def test_vocabulary_tiling_changes_nothing(make_bench, packed, full_batch):
    expected, metrics = full_batch
    update, tiled = update_of(make_bench(*PLAIN, *Z_LOSS, "num_vocab_tiling=4"), packed)
    assert_same_update(update, expected)
    assert tiled == pytest.approx(metrics, rel=2e-6)


def test_padding_has_no_gradient(make_bench, packed, full_batch):
    """Other tokens where the segmentation is 0 change nothing, to the bit."""
    padding = packed["targets_segmentation"] == 0
    noise = np.random.default_rng(0).integers(0, 41, padding.shape)
    changed = packed | {
        name: np.where(padding, noise, packed[name]) for name in ("inputs", "targets")
    }
    update, metrics = update_of(make_bench(*PLAIN, *Z_LOSS), changed)
    expected, expected_metrics = full_batch
    assert metrics == expected_metrics
    for name in expected:
        np.testing.assert_array_equal(update[name], expected[name], err_msg=name)


def test_rows_of_one_document_are_the_same_with_and_without_packing(make_bench, packed):
    """Without packing attention has no mask between documents: it needs none before the padding of
    a row.
    """
    rows = [
        row for row, segments in enumerate(packed["inputs_segmentation"]) if segments.max() <= 1
    ]
    assert len(rows) == 5
    single = {name: field[[*rows, *rows[:3]]] for name, field in packed.items()}
    update, metrics = update_of(make_bench(*PLAIN, *Z_LOSS, "packing=false"), single)
    expected, expected_metrics = update_of(make_bench(*PLAIN, *Z_LOSS), single)
    assert_same_update(update, expected)
    assert metrics == pytest.approx(expected_metrics, rel=2e-6)


def test_a_batch_of_padding_alone_changes_nothing(make_bench, packed):
    bench = make_bench(*PLAIN, *Z_LOSS)
    state, metrics = bench({name: np.zeros_like(field) for name, field in packed.items()})
    assert metrics["loss"] == metrics["total_weights"] == metrics["raw_grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.weights, bench.state.weights)


def test_clipping_scales_the_full_gradient(make_bench, packed, full_batch):
    free, metrics = full_batch
    threshold = metrics["raw_grad_norm"] / 3
    bench = make_bench(
        "opt_type=sgd", "learning_rate=0.5", f"gradient_clipping_threshold={threshold}", *Z_LOSS
    )
    clipped, clipped_metrics = update_of(bench, packed)
    assert_same_update(clipped, {name: leaf / 3 for name, leaf in free.items()}, relative=1e-5)
    assert clipped_metrics["raw_grad_norm"] == pytest.approx(metrics["raw_grad_norm"], rel=1e-6)
    assert clipped_metrics["grad_norm"] == pytest.approx(threshold, rel=1e-6)


def test_bfloat16_gradients_are_the_rounded_ones(make_bench, packed, independent):
    bench = make_bench(*PLAIN, "grad_dtype=bfloat16")
    gradients = independent[1](bench.state.weights, packed)
    update, metrics = update_of(bench, packed)
    rounded = {
        name: torch.tensor(leaf).to(torch.bfloat16).to(torch.float32).numpy()
        for name, leaf in gradients.items()
    }
    # A gradient halfway between two bfloat16 values may fall to either side, one
    # part in 256 apart.
    off = total = 0
    for name in update:
        step = -0.5 * rounded[name].astype(np.float64)
        np.testing.assert_allclose(update[name], step, rtol=2**-7, atol=1e-6, err_msg=name)
        off += np.count_nonzero(~np.isclose(update[name], step, rtol=1e-3, atol=1e-6))
        total += step.size
    assert off < 0.01 * total
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in rounded.values()))
    assert metrics["raw_grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_metrics_match_the_documented_records(full_batch):
    _, metrics = full_batch
    assert set(metrics) == {
        "loss", "lm_loss", "z_loss", "learning_rate", "grad_norm", "raw_grad_norm", "param_norm",
        "total_weights",
    }  # fmt: skip


def test_only_weights_that_match_the_mask_train(make_bench, packed):
    bench = make_bench("learning_rate=0.01", "trainable_parameters_mask=[attention/query, ^head/]")
    state, _ = bench(packed)
    before, after = named(bench.state.weights), named(state.weights)
    trained = {name for name in before if "attention/query" in name or name.startswith("head/")}
    assert 2 <= len(trained) < len(before)
    for name in before:
        assert np.array_equal(before[name], after[name]) == (name not in trained), name
    # What does not train has no optimizer state: two moments for each trained weight, and a few
    # counters.
    state_size = sum(leaf.size for leaf in jax.tree.leaves(bench.state.opt_state))
    moments = 2 * sum(before[name].size for name in trained)
    assert moments <= state_size <= moments + 8


def test_gradients_of_many_microbatches_add_up_in_float32():
    """512 times 0.01 in bfloat16 stops at 4, where a step of the format is larger than twice what
    is added.
    """
    weights = {"w": jnp.zeros(2, jnp.bfloat16)}

    def gradient(weights, batch, key):
        return {"w": jnp.full(2, 0.01, jnp.bfloat16)}, {"tokens": jnp.float32(1)}

    gradients, aux = accumulate(
        gradient, weights, {"inputs": jnp.zeros((512, 1), jnp.int32)}, None, 512
    )
    np.testing.assert_allclose(gradients["w"], 512 * np.float64(jnp.bfloat16(0.01)), rtol=1e-4)
    assert aux["tokens"] == 512


def test_clipping_counts_the_gradients_of_weights_that_train(make_bench, packed, independent):
    """SGD moves them by rate * threshold, however large the gradients of frozen weights are."""
    overrides = ("opt_type=sgd", "learning_rate=0.5", "gradient_clipping_threshold=1e-3")
    bench = make_bench(*overrides, "trainable_parameters_mask=[attention/query]")
    gradients = independent[1](bench.state.weights, packed)
    squares = {
        name: np.sum(np.square(np.float64(gradient))) for name, gradient in gradients.items()
    }
    trained = sum(value for name, value in squares.items() if "attention/query" in name)
    state, metrics = bench(packed)
    assert metrics["raw_grad_norm"] == pytest.approx(np.sqrt(trained), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(1e-3, rel=1e-4)
    assert sum(squares.values()) > 4 * trained, "the case must tell the two norms apart"
    before, after = named(bench.state.weights), named(state.weights)
    moved = np.sqrt(
        sum(np.sum(np.square(np.float64(after[name]) - before[name])) for name in before)
    )
    assert moved == pytest.approx(0.5 * 1e-3, rel=1e-2)


def test_three_steps_of_adamw_equal_torch(make_bench, packed, independent):
    """Our step against clip_grad_norm_ and torch.optim.AdamW, with gradients of an independent
    loss."""
    overrides = (
        "learning_rate=0.01",
        "adam_b2=0.99",
        "adam_eps=1e-6",
        "gradient_clipping_threshold=0.7",
    )
    bench = make_bench(*overrides)
    names = list(named(bench.state.weights))
    parameters = [
        torch.nn.Parameter(torch.tensor(leaf)) for leaf in named(bench.state.weights).values()
    ]
    torch_optimizer = torch.optim.AdamW(
        parameters, lr=0.01, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.1
    )
    structure = jax.tree.structure(bench.state.weights)
    state = bench.state
    for _ in range(3):
        weights = jax.tree.unflatten(
            structure, [jnp.asarray(leaf.detach().numpy()) for leaf in parameters]
        )
        for parameter, gradient in zip(
            parameters, independent[1](weights, packed).values(), strict=True
        ):
            parameter.grad = torch.tensor(gradient)
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.7)
        torch_optimizer.step()
        state, metrics = bench(packed, state)
        assert metrics["raw_grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert metrics["raw_grad_norm"] > 0.7, "the case must show clipping"
    assert int(state.step) == 3
    for name, actual, parameter in zip(
        names, jax.tree.leaves(state.weights), parameters, strict=True
    ):
        np.testing.assert_allclose(
            actual, parameter.detach().numpy(), rtol=0, atol=1e-3 * 0.01, err_msg=name
        )


def test_the_recorded_rate_is_that_of_the_schedule(make_bench, packed):
    """Linear warm-up over 4 of 8 steps, then a cosine to a tenth."""
    overrides = (
        "lr_schedule_type=cosine",
        "wsd_decay_steps_fraction=0.1",
        "warmup_steps_fraction=0.5",
    )
    bench = make_bench("steps=8", "learning_rate=0.08", "opt_type=sgd", *overrides)
    state, rates = bench.state, []
    for _ in range(8):
        state, metrics = bench(packed, state)
        rates.append(metrics["learning_rate"])
    cosine = [0.008 + 0.072 * (1 + np.cos(np.pi * step / 4)) / 2 for step in range(4)]
    np.testing.assert_allclose(rates, [0, 0.02, 0.04, 0.06, *cosine], rtol=1e-5, atol=1e-9)


@pytest.mark.slow
def test_dropout_follows_key_and_step(make_bench, packed):
    still, shaken = make_bench(*PLAIN), make_bench(*PLAIN, "dropout_rate=0.5")
    _, calm = still(packed)
    after, first = shaken(packed)
    _, again = shaken(packed)
    assert first == again, "the same state, batch and key"
    assert first["loss"] != calm["loss"]
    # Another step number is other randomness, though weights and batch are the same.
    later = replace(after, weights=shaken.state.weights, opt_state=shaken.state.opt_state)
    _, other = shaken(packed, later)
    assert other["loss"] != first["loss"]
    _, off = make_bench(*PLAIN, "dropout_rate=0.5", "enable_dropout=false")(packed)
    assert off["loss"] == pytest.approx(calm["loss"], rel=1e-6)


@pytest.mark.slow
def test_dropout_differs_between_microbatches(make_bench, packed):
    """Two microbatches with the same rows must not drop the same units: their gradients would not
    average anything out.
    """
    rows = {name: np.repeat(field[:1], 8, axis=0) for name, field in packed.items()}
    bench = make_bench(*PLAIN, "dropout_rate=0.5", "gradient_accumulation_steps=2")
    single = make_bench(*PLAIN, "dropout_rate=0.5")
    both, _ = update_of(bench, rows)
    half, _ = update_of(single, {name: field[:4] for name, field in rows.items()})
    assert largest({name: both[name] - half[name] for name in both}) > 0.01 * largest(half)


@pytest.mark.slow
@pytest.mark.parametrize("base", [[], ["lora_weight_qtype=nf4"]], ids=["bfloat16", "nf4"])
def test_microbatches_share_no_copy_of_frozen_weights(base):
    """A loop over microbatches could compute other forms of them once, and keep all."""
    width, inner, layers, vocab = 256, 4096, 2, 64
    temporaries = []
    for microbatches in (1, 2):
        config = load(
            None,
            [
                *(f"base_num_decoder_layers={layers}", f"base_emb_dim={width}", "head_dim=32"),
                *("base_num_query_heads=2", "base_num_kv_heads=1", f"base_mlp_dim={inner}"),
                *(f"vocab_size={vocab}", "max_target_length=8", "per_device_batch_size=1"),
                *("dataset_type=synthetic", "enable_tensorboard=false", "scan_layers=false"),
                *("lora_rank=2", "weight_dtype=bfloat16", "enable_checkpointing=false"),
                *(*base, f"gradient_accumulation_steps={microbatches}"),
            ],
            environ={},
            devices=Devices(1),
        )
        lowered = lower_train_step(build_run_context(config), microbatches)
        temporaries.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    frozen_bytes = 2 * 3 * width * inner * layers  # in bfloat16
    assert temporaries[1] < temporaries[0] + frozen_bytes / 2
