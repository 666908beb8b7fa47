"""Parameters and FLOPs against published sizes, arithmetic by hand, brute force, and XLA's own
count.
"""

import time

import jax
import jax.numpy as jnp
import pytest

from maxtext.configs.derive import Devices
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.specs import Moba
from maxtext.models.configuration import load
from maxtext.models.counts import (
    breakdown,
    forward_flops_per_token,
    parameter_count,
    train_flops_per_token,
)
from maxtext.models.flops import moba_keys, visible_keys
from maxtext.models.transformer import make_template


def configuration(*words):
    return load(None, list(words), environ={}, devices=Devices(1))


# name: (words, parameters, forward FLOPs a token). Products count 2 for each weight that a token
# meets; attention 2 for q k and 2 for weights times values, for each head, dimension, and key that
# a token sees.
MODELS = {
    # Touvron et al. 2023: 32 layers, width 4096, 32 heads of 128, MLP 11008, vocabulary 32000;
    # 6.7B. Length 4096: a token sees 2048.5 keys on average.
    "llama2-7b": (
        ["model_name=llama2-7b", "max_target_length=4096"],
        6_738_415_616,
        32 * (2 * 4 * 4096 * 4096 + 2 * 3 * 4096 * 11008 + 4 * 32 * 128 * 2048.5)
        + 2 * 4096 * 32000,
    ),
    # Grattafiori et al. 2024: 8 key/value heads, MLP 14336, vocabulary 128256; length 8192.
    "llama3.1-8b": (
        ["model_name=llama3.1-8b", "max_target_length=8192"],
        8_030_261_248,
        32 * (2 * (2 * 4096 * 4096 + 2 * 4096 * 1024) + 2 * 3 * 4096 * 14336 + 4 * 4096 * 4096.5)
        + 2 * 4096 * 128256,
    ),
    # Jiang et al. 2023: the same layers, vocabulary 32000, a window of 4096; length 8192: the first
    # 4096 tokens see 1 … 4096, the others 4096.
    "mistral-7b": (
        [
            "model_name=mistral-7b",
            "sliding_window_size=4096",
            "max_target_length=8192",
            "override_model_config=true",
        ],
        7_241_732_096,
        32
        * (
            2 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
            + 2 * 3 * 4096 * 14336
            + 4 * 4096 * (4096 * 4097 / 2 + 4096 * 4096) / 8192
        )
        + 2 * 4096 * 32000,
    ),
    # Brown et al. 2020: 96 layers, width 12288, 96 heads of 128, MLP 4 times the width, tied head;
    # biases and two LayerNorms a layer. Here a vocabulary of 50304 (padded from 50257) and 2048
    # positions.
    "gpt3-175b": (
        [
            "model_name=gpt3-175b",
            "trainable_position_size=2048",
            "max_target_length=2048",
            "override_model_config=true",
        ],
        96 * (12 * 12288 * 12288 + (3 + 1 + 4 + 1) * 12288 + 4 * 12288)
        + (50304 + 2048) * 12288
        + 2 * 12288,
        96 * (2 * 12 * 12288 * 12288 + 4 * 12288 * 1024.5) + 2 * 12288 * 50304,
    ),
    # base.yml: 16 layers, width 2048, 16 heads of 128, MLP 7168, vocabulary 32000, length 2048.
    "default": (
        ["model_name=default"],
        16 * (4 * 2048 * 2048 + 3 * 2048 * 7168 + 2 * 2048) + 2 * 2048 * 32000 + 2048,
        16 * (2 * 4 * 2048 * 2048 + 2 * 3 * 2048 * 7168 + 4 * 2048 * 1024.5) + 2 * 2048 * 32000,
    ),
}


def mla(width, heads, query_rank, kv_rank, nope, rope, value, keys):
    """Down and up for queries, down for keys and values, up for both, out; then q k and weights
    times values.
    """
    weights = width * query_rank + query_rank * heads * (nope + rope) + width * (kv_rank + rope)
    weights += kv_rank * heads * (nope + value) + heads * value * width
    return 2 * weights + 2 * heads * (nope + rope + value) * keys


def indexer(width, query_rank, heads, size, keys):
    """Queries from the latent, one key, a weight for each head; a product with every key, and their
    weighted sum.
    """
    return (
        2 * (query_rank * heads * size + width * size + width * heads)
        + 2 * heads * size * keys
        + 2 * heads * keys
    )


def experts(width, expert, count, chosen, shared=0):
    return 2 * width * count + (chosen + shared) * 2 * 3 * width * expert


def sparse_keys(topk, length):
    """Tokens see 1 … topk keys, then topk."""
    return (topk * (topk + 1) / 2 + (length - topk) * topk) / length


DEEPSEEK3 = (7168, 128, 1536, 512, 128, 64, 128)
CUSTOM = (1024, 16, 384, 128, 32, 16, 128)

# name: (words, forward FLOPs a token), as above; router and chosen experts count.
FURTHER = {
    # Jiang et al. 2024: Mistral with 8 experts, of which 2.
    "mixtral-8x7b": (
        ["max_target_length=4096"],
        32
        * (2 * (2 * 4096 * 4096 + 2 * 4096 * 1024) + experts(4096, 14336, 8, 2) + 4 * 4096 * 2048.5)
        + 2 * 4096 * 32000,
    ),
    # DeepSeek-AI 2024: 3 dense layers of 61; 8 of 256 experts and a shared one.
    "deepseek3-671b": (
        ["max_target_length=4096"],
        61 * mla(*DEEPSEEK3, 2048.5)
        + 3 * 2 * 3 * 7168 * 18432
        + 58 * experts(7168, 2048, 256, 8, 1)
        + 2 * 7168 * 129280,
    ),
    # A layer like the last, its projection of two widths to one, and the head, once more.
    "deepseek3-671b with another token": (
        ["max_target_length=4096", "mtp_num_layers=1"],
        62 * mla(*DEEPSEEK3, 2048.5)
        + 3 * 2 * 3 * 7168 * 18432
        + 59 * experts(7168, 2048, 256, 8, 1)
        + 2 * 2 * 7168 * 129280
        + 2 * 2 * 7168 * 7168,
    ),
    # DeepSeek-AI 2025: an indexer of 64 heads looks at all keys, attention at 2048 of them.
    "deepseek3.2-671b": (
        ["max_target_length=8192"],
        61 * (mla(*DEEPSEEK3, sparse_keys(2048, 8192)) + indexer(7168, 1536, 64, 128, 4096.5))
        + 3 * 2 * 3 * 7168 * 18432
        + 58 * experts(7168, 2048, 256, 8, 1)
        + 2 * 7168 * 129280,
    ),
    # No more keys than are kept: nothing to choose.
    "deepseek3.2-671b, short": (
        ["max_target_length=2048"],
        61 * mla(*DEEPSEEK3, 1024.5)
        + 3 * 2 * 3 * 7168 * 18432
        + 58 * experts(7168, 2048, 256, 8, 1)
        + 2 * 7168 * 129280,
    ),
    # Queries straight from the input; two shared experts.
    "deepseek2-16b": (
        ["max_target_length=4096"],
        27
        * (
            2 * (2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048)
            + 2 * 16 * 320 * 2048.5
        )
        + 2 * 3 * 2048 * 10944
        + 26 * experts(2048, 1408, 64, 6, 2)
        + 2 * 2048 * 102400,
    ),
    # Its own latent: keys of 512 + 64, values of 512, for every head.
    "deepseek2-16b over latents": (
        ["max_target_length=4096", "mla_naive_kvcache=false"],
        27
        * (
            2 * (2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048)
            + 2 * 16 * (576 + 512) * 2048.5
        )
        + 2 * 3 * 2048 * 10944
        + 26 * experts(2048, 1408, 64, 6, 2)
        + 2 * 2048 * 102400,
    ),
    # OpenAI 2025: 12 layers with a window of 128 and 12 without; 64 heads of 64 over 8; 4 of 32
    # experts.
    "gpt-oss-20b": (
        ["max_target_length=4096"],
        24 * (2 * (2 * 2880 * 4096 + 2 * 2880 * 512) + experts(2880, 2880, 32, 4))
        + 12 * 4 * 4096 * (sparse_keys(128, 4096) + 2048.5)
        + 2 * 2880 * 201088,
    ),
    # 25 layers with a window of 1024, 16 heads of 256 over 8; 5 without, 16 of 512 over 2 whose
    # values are the keys; an MLP beside 8 of 128 experts.
    "gemma4-26b": (
        ["max_target_length=2048"],
        25 * (2 * (2 * 2816 * 4096 + 2 * 2816 * 2048) + 4 * 4096 * sparse_keys(1024, 2048))
        + 5 * (2 * (2 * 2816 * 8192 + 2816 * 1024) + 4 * 8192 * 1024.5)
        + 30 * (2 * 3 * 2816 * 2112 + experts(2816, 704, 128, 8))
        + 2 * 2816 * 262144,
    ),
    # 36 Gated DeltaNets: 16 key and 32 value heads of 128, a convolution of 4; a state of 128 x 128
    # a value head is read for the key, written, and read for the query. 12 layers attend, with a
    # gate as large as the query.
    "qwen3-next-80b-a3b": (
        ["max_target_length=4096"],
        36
        * (
            2 * 2048 * (2048 + 2048 + 4096 + 4096 + 32 + 32)
            + 2 * 4096 * 2048
            + 2 * 4 * (2048 + 2048 + 4096)
        )
        + 36 * 3 * 2 * 32 * 128 * 128
        + 12 * (2 * 2048 * (2 * 4096 + 2 * 512) + 2 * 4096 * 2048 + 4 * 4096 * 2048.5)
        + 48 * (experts(2048, 512, 512, 10, 1) + 2 * 2048)
        + 2 * 2048 * 151936,
    ),
    # 36 layers see chunks of 8192, 12 the whole; 1 of 16 experts and a shared one.
    "llama4-17b-16e": (
        ["max_target_length=16384"],
        48 * (2 * (2 * 5120 * 5120 + 2 * 5120 * 1024) + experts(5120, 8192, 16, 1, 1))
        + 4 * 5120 * (36 * 4096.5 + 12 * 8192.5)
        + 2 * 5120 * 202048,
    ),
    # Attention writes 768 of 2048 numbers; experts work on those, and a matrix widens them.
    "qwen3-custom-30b-a3b": (
        ["max_target_length=2048"],
        48 * (2 * (2048 * 4096 + 2 * 2048 * 512 + 4096 * 768) + 4 * 4096 * 1024.5)
        + 48 * (experts(768, 2048, 128, 8) + 2 * 768 * 2048)
        + 2 * 2048 * 151936,
    ),
    # Four streams: around each of 12 sub-layers 4096 numbers give 24, and 1024 wide vectors go 4 to
    # 1, 4 to 4, 1 to 4. Two memories: 16 rows of 512 give 4 keys and a value; a product of key and
    # stream; 4 taps on each stream.
    "deepseek-custom": (
        ["max_target_length=2048"],
        6 * (mla(*CUSTOM, sparse_keys(256, 2048)) + indexer(1024, 384, 16, 64, 1024.5))
        + 2 * 3 * 1024 * 2048
        + 5 * experts(1024, 512, 16, 2, 1)
        + 12 * 2 * (4096 * 24 + 1024 * (4 + 16 + 4))
        + 2 * 2 * (8192 * 5 * 1024 + 4 * 1024 + 4 * 4 * 1024)
        + 2 * 1024 * 129280,
    ),
}


@pytest.mark.parametrize("name", FURTHER)
def test_flops_of_other_layers(name):
    words, flops = FURTHER[name]
    model = name.split(" ")[0].rstrip(",")
    assert forward_flops_per_token(configuration(f"model_name={model}", *words)) == pytest.approx(
        flops, rel=1e-12
    )


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
    one, two = (
        configuration(*small, f"decoder_block={block}") for block in ("simple", "simple_mlp")
    )
    assert forward_flops_per_token(one) == 3 * 2 * 64 * 64 + 2 * 64 * 100
    assert forward_flops_per_token(two) == 3 * 2 * 2 * 64 * 96 + 2 * 64 * 100


MASKS = [
    AttentionMask(),
    AttentionMask(causal=False),
    AttentionMask(window=1),
    AttentionMask(window=5),
    AttentionMask(window=16),
    AttentionMask(window=40),
    AttentionMask(chunk=1),
    AttentionMask(chunk=5),
    AttentionMask(chunk=8),
    AttentionMask(chunk=40),
]


@pytest.mark.parametrize("length", [1, 7, 16, 23])
@pytest.mark.parametrize("mask", MASKS, ids=AttentionMask.describe)
def test_visible_keys_by_brute_force(mask, length):
    count = 0
    for i in range(length):
        for j in range(length):
            sees = not mask.causal or j <= i
            sees &= mask.window is None or i - mask.window < j
            sees &= mask.chunk is None or i // mask.chunk == j // mask.chunk
            count += sees
    assert visible_keys(mask, length) == pytest.approx(count / length, rel=1e-12)


@pytest.mark.parametrize("most", [1, 3, 8, 100])
@pytest.mark.parametrize("mask", MASKS, ids=AttentionMask.describe)
def test_no_more_than_so_many_keys(mask, most):
    length, count = 23, 0
    for i in range(length):
        sees = range(length) if not mask.causal else range(i + 1)
        sees = [j for j in sees if mask.window is None or i - mask.window < j]
        count += min(
            most,
            len([j for j in sees if mask.chunk is None or i // mask.chunk == j // mask.chunk]),
        )
    assert visible_keys(mask, length, most) == pytest.approx(count / length, rel=1e-12)


@pytest.mark.parametrize("length", [1, 8, 23, 32])
@pytest.mark.parametrize(("chunk", "top"), [(4, 1), (4, 3), (8, 2), (64, 2), (5, 9)])
def test_moba_by_brute_force(chunk, top, length):
    """A query's own chunk up to itself, and the best of those before it, all of which it weighs."""
    seen = sum(i % chunk + 1 + chunk * min(top - 1, i // chunk) for i in range(length))
    weighed = sum(i // chunk for i in range(length))
    assert moba_keys(Moba(chunk, top), length) == pytest.approx(
        (seen / length, weighed / length), rel=1e-12
    )


def test_moba_takes_less_than_the_whole():
    words = ["model_name=default", "max_target_length=2048"]
    whole = forward_flops_per_token(configuration(*words))
    some = forward_flops_per_token(
        configuration(*words, "moba=true", "moba_chunk_size=128", "moba_topk=2")
    )
    # 64.5 keys of the own chunk and, but for the first chunk, 128 more, of 1024.5; weighed against
    # 7.5 chunks.
    assert whole - some == pytest.approx(
        16 * 2048 * (4 * (1024.5 - 64.5 - 128 * 15 / 16) - 2 * 7.5), rel=1e-9
    )


def test_parts_by_hand():
    words = ["base_emb_dim=64", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=16"]
    words += [
        "base_num_decoder_layers=3",
        "vocab_size=100",
        "num_experts=8",
        "num_experts_per_tok=2",
    ]
    words += [
        "base_moe_mlp_dim=32",
        "shared_experts=1",
        "decoder_block=qwen3_next",
        "use_qk_norm=true",
    ]
    words += [
        "gdn_num_key_heads=2",
        "gdn_num_value_heads=4",
        "gdn_key_head_dim=8",
        "gdn_value_head_dim=8",
    ]
    parts = breakdown(make_template(configuration(*words)).weights)
    delta = 64 * (2 * 16 + 2 * 32 + 2 * 4) + 32 * 64 + 4 * (2 * 16 + 32) + 2 * 4
    assert parts == {
        "embedding": 100 * 64,
        "attention": 3 * delta,
        "experts": 3 * 8 * 3 * 64 * 32,
        "shared experts": 3 * (3 * 64 * 32 + 64),
        "routers": 3 * 64 * 8,
        "norms": 3 * (2 * 64 + 8) + 64,
        "output head": 64 * 100,
    }


LATENT = [
    "attention_type=mla", "q_lora_rank=96", "kv_lora_rank=64", "qk_nope_head_dim=48",
    "qk_rope_head_dim=16", "v_head_dim=64", "base_num_kv_heads=4",
]  # fmt: skip
BLOCKS = {
    "llama2": ["head_dim=64", "base_num_kv_heads=2"],
    "gpt3": ["head_dim=64", "base_num_kv_heads=4", "mlp_activations=[gelu]",
             "trainable_position_size=128",
             "logits_via_embedding=true"],
    "deepseek": LATENT,
    "llama2 with streams": ["head_dim=64", "base_num_kv_heads=2", "mhc_expansion_rate=4"],
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_xla_counts_the_same(name):
    """XLA multiplies the whole square of attention, and counts element-wise work, too: a few per
    cent here.
    """
    block = name.split(" ")[0]
    batch, length, width, heads, head, layers = 2, 128, 256, 4, 64, 2
    words = [
        f"max_target_length={length}", f"base_emb_dim={width}", f"base_num_query_heads={heads}",
        f"base_num_decoder_layers={layers}", "base_mlp_dim=1024", "vocab_size=2048",
        "dtype=float32", "attention=dot_product", "scan_layers=false", "remat_policy=none",
        f"decoder_block={block}",
    ]  # fmt: skip
    config = configuration(*words, *BLOCKS[name])
    template = make_template(config)
    ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    compiled = jax.jit(lambda weights, ids, at: template.bind(weights)(ids, at)).lower(
        template.weights, ids, ids
    )
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
    # Grattafiori et al. 2024: 126 layers, width 16384, 128 heads over 8, MLP 53248, vocabulary
    # 128256.
    layer = 2 * 16384 * 16384 + 2 * 16384 * 8 * 128 + 3 * 16384 * 53248 + 2 * 16384
    assert parameter_count(template.weights) == 126 * layer + 2 * 16384 * 128256 + 16384
