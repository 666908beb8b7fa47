"""Initial weights: a function of the seed alone, with the spread that the configuration says."""

import jax
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.layers.quantized import initial_quantizer, quantize_weights
from maxtext.models.configuration import load
from maxtext.models.transformer import initial_weights, make_template

WORDS = [
    "vocab_size=512", "base_emb_dim=128", "base_num_query_heads=8", "base_num_kv_heads=4",
    "head_dim=32", "base_mlp_dim=320", "base_num_decoder_layers=4",
]  # fmt: skip


def weights(*extra, loop=False):
    config = load(None, [*WORDS, *extra], environ={}, devices=Devices(1))
    return jax.tree.map(np.asarray, jax.jit(lambda: initial_weights(config, loop))())


@pytest.fixture(scope="module")
def plain():
    return weights()


@pytest.fixture(scope="module")
def other():
    """Another seed, another scale, biases and everything fused."""
    return weights(
        "init_weights_seed=1", "dense_init_scale=0.25", "attention_bias=true", "mlp_bias=true",
        "attention_sink=true", "fused_qkv=true", "fused_mlp=true", "trainable_position_size=256",
        "max_target_length=256",
    )  # fmt: skip


def is_kernel(path):
    return "weight" in str(path[-1])


def test_the_same_seed_gives_the_same_weights(plain):
    jax.tree.map(np.testing.assert_array_equal, plain, weights())


def test_another_seed_gives_other_weights(plain):
    changed = weights("init_weights_seed=1")
    for (path, one), two in zip(
        jax.tree.leaves_with_path(plain), jax.tree.leaves(changed), strict=True
    ):
        if is_kernel(path) or "embedding" in str(path[-1]):
            assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 / np.sqrt(one.size)


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [True, False])  # the first compiles faster
def test_weights_are_quantized_one_at_a_time_as_they_are_created(scanned):
    config = load(None, [*WORDS, f"scan_layers={scanned}"], environ={}, devices=Devices(1))
    template = make_template(config)
    quantize = initial_quantizer("nf4", 64, head=False)
    program = jax.jit(lambda: initial_weights(config, loop=True, quantize=quantize)).lower()
    compiled = program.compile()
    created = compiled()
    expected = jax.jit(
        lambda: quantize_weights(template, initial_weights(config), "nf4", 64, head=False)
    )()
    assert jax.tree.structure(created) == jax.tree.structure(expected)
    for (path, one), two in zip(
        jax.tree.leaves_with_path(created), jax.tree.leaves(expected), strict=True
    ):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        if one.dtype == np.uint8:
            assert np.mean(np.asarray(one) != np.asarray(two)) < 1e-3, path
        else:
            np.testing.assert_allclose(one, two, rtol=1e-5)
    layer_floats = sum(4 * leaf.size for leaf in jax.tree.leaves(template.weights["layers"])) / 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * layer_floats


@pytest.mark.parametrize("loop", [False, True])
def test_scanned_and_unrolled_start_alike(plain, loop):
    unrolled = weights("scan_layers=false", loop=loop)
    layers = unrolled["layers"][0]["blocks"][0]
    stacked = jax.tree.map(
        lambda *each: np.stack(each, min(1, each[0].ndim)), *(layers[i] for i in range(4))
    )
    jax.tree.map(
        np.testing.assert_array_equal, plain, unrolled | {"layers": {0: {"blocks": {0: stacked}}}}
    )


FAN_IN = {"query": 128, "key": 128, "value": 128, "qkv": 128, "out": 8 * 32, "wi": 128, "wi_0": 128,
          "wi_1": 128,
          "wo": 320, "head": 128}  # fmt: skip


@pytest.mark.parametrize(("which", "scale", "count"), [("plain", 1.0, 8), ("other", 0.25, 5)])
def test_kernels_have_variance_scale_over_fan_in(request, which, scale, count):
    """A normal cut at two deviations and stretched back: kurtosis 2.37, so a variance of n values
    has an error of sqrt(1.37 / n)."""
    found = 0
    for path, kernel in jax.tree.leaves_with_path(request.getfixturevalue(which)):
        if is_kernel(path):
            found += 1
            expected = np.sqrt(scale / FAN_IN[path[-2].key])
            assert abs(kernel.std() / expected - 1) < 5 * np.sqrt(1.37 / kernel.size) / 2, path
            assert abs(kernel.mean()) < 5 * expected / np.sqrt(kernel.size), path
            assert np.abs(kernel).max() <= 2 * expected / 0.8796 * 1.0001, path
    assert found == count


def test_embeddings_have_variance_one_over_width(plain, other):
    for table in (
        plain["embedder"]["embedding"],
        other["embedder"]["embedding"],
        other["positions"]["embedding"],
    ):
        assert abs(table.std() * np.sqrt(128) - 1) < 5 * np.sqrt(2 / table.size) / 2


def test_norms_start_at_one_and_biases_at_zero(plain, other):
    seen = set()
    for path, leaf in [*jax.tree.leaves_with_path(plain), *jax.tree.leaves_with_path(other)]:
        name = path[-1].key
        if name in ("scale", "bias"):
            seen.add(name)
            np.testing.assert_array_equal(
                leaf, np.full(leaf.shape, 1.0 if name == "scale" else 0.0)
            )
    assert seen == {"scale", "bias"}


def test_layers_start_unlike_each_other(plain):
    query = plain["layers"][0]["blocks"][0]["attention"]["query"]["weight"]  # [E, layers, H, D]
    rows = np.moveaxis(query, 1, 0).reshape(4, -1)
    assert np.abs(np.corrcoef(rows) - np.eye(4)).max() < 5 / np.sqrt(rows.shape[1])


def test_weight_dtype():
    config = load(None, [*WORDS, "weight_dtype=bfloat16"], environ={}, devices=Devices(1))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(make_template(config).weights)} == {
        "bfloat16"
    }
