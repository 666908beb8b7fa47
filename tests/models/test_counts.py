"""Parameters and FLOPs against published sizes, arithmetic by hand, brute force, and XLA's own count."""

import time

import jax
import jax.numpy as jnp
import pytest

from maxtext.configs import load
from maxtext.configs.derive import Devices
from maxtext.kernels.attention import Visibility
from maxtext.models import make_template
from maxtext.models.counts import forward_flops_per_token, parameter_count, train_flops_per_token, visible_keys


def configuration(*words):
    return load(None, list(words), environ={}, devices=Devices(1))


# name: (words, parameters, forward FLOPs a token). Products count 2 for each weight that a token meets; attention 2 for
# q k and 2 for weights times values, for each head, dimension, and key that a token sees.
MODELS = {
    # Touvron et al. 2023: 32 layers, width 4096, 32 heads of 128, MLP 11008, vocabulary 32000; 6.7B. Length 4096: a
    # token sees 2048.5 keys on average.
    "llama2-7b": (
        ["model_name=llama2-7b", "max_target_length=4096"],
        6_738_415_616,
        32 * (2 * 4 * 4096 * 4096 + 2 * 3 * 4096 * 11008 + 4 * 32 * 128 * 2048.5) + 2 * 4096 * 32000,
    ),
    # Grattafiori et al. 2024: 8 key/value heads, MLP 14336, vocabulary 128256; length 8192.
    "llama3.1-8b": (
        ["model_name=llama3.1-8b", "max_target_length=8192"],
        8_030_261_248,
        32 * (2 * (2 * 4096 * 4096 + 2 * 4096 * 1024) + 2 * 3 * 4096 * 14336 + 4 * 4096 * 4096.5) + 2 * 4096 * 128256,
    ),
    # Jiang et al. 2023: the same layers, vocabulary 32000, a window of 4096; length 8192: the first 4096 tokens see
    # 1 … 4096, the others 4096.
    "mistral-7b": (
        ["model_name=mistral-7b", "sliding_window_size=4096", "max_target_length=8192", "override_model_config=true"],
        7_241_732_096,
        32
        * (
            2 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
            + 2 * 3 * 4096 * 14336
            + 4 * 4096 * (4096 * 4097 / 2 + 4096 * 4096) / 8192
        )
        + 2 * 4096 * 32000,
    ),
    # Brown et al. 2020: 96 layers, width 12288, 96 heads of 128, MLP 4 times the width, tied head; biases and two
    # LayerNorms a layer. Here a vocabulary of 50304 (padded from 50257) and 2048 positions.
    "gpt3-175b": (
        ["model_name=gpt3-175b", "trainable_position_size=2048", "max_target_length=2048",
         "override_model_config=true"],
        96 * (12 * 12288 * 12288 + (3 + 1 + 4 + 1) * 12288 + 4 * 12288) + (50304 + 2048) * 12288 + 2 * 12288,
        96 * (2 * 12 * 12288 * 12288 + 4 * 12288 * 1024.5) + 2 * 12288 * 50304,
    ),
    # base.yml: 16 layers, width 2048, 16 heads of 128, MLP 7168, vocabulary 32000, length 2048.
    "default": (
        ["model_name=default"],
        16 * (4 * 2048 * 2048 + 3 * 2048 * 7168 + 2 * 2048) + 2 * 2048 * 32000 + 2048,
        16 * (2 * 4 * 2048 * 2048 + 2 * 3 * 2048 * 7168 + 4 * 2048 * 1024.5) + 2 * 2048 * 32000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_parameters(name):
    words, parameters, _ = MODELS[name]
    assert parameter_count(make_template(configuration(*words)).weights) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_flops(name):
    words, _, flops = MODELS[name]
    config = configuration(*words)
    assert forward_flops_per_token(config) == pytest.approx(flops, rel=1e-12)
    assert train_flops_per_token(config) == pytest.approx(3 * flops, rel=1e-12)


def test_gpt3_is_as_large_as_published():
    """175.0B; with the 50257 tokens that were in use."""
    parameters = MODELS["gpt3-175b"][1] - (50304 - 50257) * 12288
    assert parameters == pytest.approx(175e9, rel=0.003)


def test_joint_products_and_parallel_blocks_count_the_same():
    plain = forward_flops_per_token(configuration("model_name=default"))
    for words in (["fused_qkv=true"], ["fused_mlp=true"], ["decoder_block=default"]):
        assert forward_flops_per_token(configuration("model_name=default", *words)) == plain


def test_simple_blocks():
    small = ["base_emb_dim=64", "base_mlp_dim=96", "base_num_decoder_layers=3", "vocab_size=100"]
    one, two = (configuration(*small, f"decoder_block={block}") for block in ("simple", "simple_mlp"))
    assert forward_flops_per_token(one) == 3 * 2 * 64 * 64 + 2 * 64 * 100
    assert forward_flops_per_token(two) == 3 * 2 * 2 * 64 * 96 + 2 * 64 * 100


VISIBILITIES = [
    Visibility(), Visibility(causal=False), Visibility(window=1), Visibility(window=5), Visibility(window=16),
    Visibility(window=40), Visibility(chunk=1), Visibility(chunk=5), Visibility(chunk=8), Visibility(chunk=40),
]  # fmt: skip


@pytest.mark.parametrize("length", [1, 7, 16, 23])
@pytest.mark.parametrize("visibility", VISIBILITIES, ids=Visibility.describe)
def test_visible_keys_by_brute_force(visibility, length):
    count = 0
    for i in range(length):
        for j in range(length):
            sees = not visibility.causal or j <= i
            sees &= visibility.window is None or i - visibility.window < j
            sees &= visibility.chunk is None or i // visibility.chunk == j // visibility.chunk
            count += sees
    assert visible_keys(visibility, length) == pytest.approx(count / length, rel=1e-12)


@pytest.mark.parametrize("block", ["llama2", "gpt3"])
def test_xla_counts_the_same(block):
    """XLA multiplies the whole square of attention, and counts element-wise work, too: a few per cent here."""
    batch, length, width, heads, head, layers = 2, 128, 256, 4, 64, 2
    words = [
        f"max_target_length={length}", f"base_emb_dim={width}", f"base_num_query_heads={heads}", f"head_dim={head}",
        f"base_num_decoder_layers={layers}", "base_mlp_dim=1024", "vocab_size=2048", "dtype=float32",
        "attention=dot_product", "scan_layers=false", "remat_policy=none", f"decoder_block={block}",
    ]  # fmt: skip
    gpt = ["base_num_kv_heads=4", "mlp_activations=[gelu]", "trainable_position_size=128", "logits_via_embedding=true"]
    config = configuration(*words, *(gpt if block == "gpt3" else ["base_num_kv_heads=2"]))
    template = make_template(config)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    compiled = jax.jit(lambda weights, ids, at: template.bind(weights)(ids, at)).lower(template.weights, ids, ids)
    unseen = layers * 4 * heads * head * (length - (length + 1) / 2)  # the half above the diagonal
    expected = batch * length * (forward_flops_per_token(config) + unseen)
    assert 1 <= compiled.compile().cost_analysis()["flops"] / expected < 1.05


def test_a_405b_template_takes_no_memory():
    """Its weights would take 1.6 TB."""
    config = configuration("model_name=llama3.1-405b")
    before, start = sum(array.nbytes for array in jax.live_arrays()), time.monotonic()
    template = make_template(config)
    assert time.monotonic() - start < 20
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 1e6
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(template.weights))
    # Grattafiori et al. 2024: 126 layers, width 16384, 128 heads over 8, MLP 53248, vocabulary 128256.
    layer = 2 * 16384 * 16384 + 2 * 16384 * 8 * 128 + 3 * 16384 * 53248 + 2 * 16384
    assert parameter_count(template.weights) == 126 * layer + 2 * 16384 * 128256 + 16384
