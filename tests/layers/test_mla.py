"""MLA against DeepSeek V2 and V3 of transformers, and weight absorption against the plain form.

Shapes: B batch, S sequence, E embed_dim, H heads.
"""

import math
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2RotaryEmbedding,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from maxtext.common import hash_rng
from maxtext.common.errors import ConfigError
from maxtext.kernels.attention import AUTOSELECTED, AttentionMask
from maxtext.layers.cache import CacheConfig
from maxtext.layers.context import BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.mla import KEY_ROPE, LATENT, empty_cache
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import IndexerSpec, MlaSpec, NormSpec, RopeSpec
from tests.layers.gpu_context import interpreted_kernels

BATCH, LENGTH, EMBED_DIM, HEADS, QUERY_RANK, RANK, NOPE, ROPE, VALUE = (
    2,
    11,
    24,
    4,
    12,
    16,
    10,
    8,
    6,
)
FACTOR, ORIGINAL, MSCALE = 4.0, 16, 0.7
YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=FACTOR,
    original_max_position_embeddings=ORIGINAL,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=MSCALE,
    mscale_all_dim=MSCALE,
)
PLAIN = dict(rope_type="default", rope_theta=10000.0)
SHARED = dict(
    hidden_size=EMBED_DIM,
    num_attention_heads=HEADS,
    num_key_value_heads=HEADS,
    kv_lora_rank=RANK,
    qk_rope_head_dim=ROPE,
    qk_nope_head_dim=NOPE,
    v_head_dim=VALUE,
    max_position_embeddings=64,
    attn_implementation="eager",
)
# Two documents and padding in the first row, one in the second; positions restart.
SEGMENTS = np.array([[1] * 4 + [2] * 5 + [0] * 2, [1] * LENGTH], np.int32)
PACKED = np.array([[*range(4), *range(5), *range(2)], [*range(LENGTH)]], np.int32)


def rope_spec(yarn, interleave):
    if not yarn:
        return RopeSpec(interleave=interleave)
    return RopeSpec("yarn", interleave=interleave, factor=FACTOR, original_length=ORIGINAL)


def mla_spec(query_rank=QUERY_RANK, yarn=False, interleave=True, **options):
    scale = (NOPE + ROPE) ** -0.5
    if yarn:
        scale *= (0.1 * MSCALE * math.log(FACTOR) + 1) ** 2
    return MlaSpec(
        HEADS,
        RANK,
        NOPE,
        ROPE,
        VALUE,
        scale,
        rope_spec(yarn, interleave),
        NormSpec(epsilon=1e-6),
        AttentionMask(),
        query_rank=query_rank,
        **options,
    )


def template(spec):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, "float32")
    )


def random_weights(spec, seed=0):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(
        lambda leaf: (draw(size=leaf.shape) * 0.4).astype(np.float32), template(spec).weights
    )


def hidden(seed=3):
    return np.random.default_rng(seed).normal(size=(BATCH, LENGTH, EMBED_DIM)).astype(np.float32)


def layer_inputs(packed=False):
    if packed:
        return LayerInputs(jnp.asarray(PACKED), jnp.asarray(SEGMENTS))
    return LayerInputs(jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH)))


def randomize(layer):
    """Every weight is random, so that an unused one is noticed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return layer.float().eval()


SHAPES = {
    "query_a": ("q_a_proj", (EMBED_DIM, QUERY_RANK)),
    "query_b": ("q_b_proj", (QUERY_RANK, HEADS, NOPE + ROPE)),
    "query": ("q_proj", (EMBED_DIM, HEADS, NOPE + ROPE)),
    "kv_a": ("kv_a_proj_with_mqa", (EMBED_DIM, RANK + ROPE)),
    "kv_b": ("kv_b_proj", (RANK, HEADS, NOPE + VALUE)),
    "out": ("o_proj", (HEADS, VALUE, EMBED_DIM)),
}


def from_hf(named):
    """The tree of Hugging Face tensors; torch stores matrices as [out, in]."""
    tree = {}
    for name, (hf_name, shape) in SHAPES.items():
        if f"{hf_name}.weight" in named:
            tree[name] = {"weight": named[f"{hf_name}.weight"].T.reshape(shape)}
        if f"{hf_name}.bias" in named:
            tree[name]["bias"] = named[f"{hf_name}.bias"]
    for name, hf_name in (("query_norm", "q_a_layernorm"), ("kv_norm", "kv_a_layernorm")):
        if f"{hf_name}.weight" in named:
            tree[name] = {"scale": named[f"{hf_name}.weight"]}
    return tree


def visible(packed):
    mask = np.tril(np.ones((BATCH, LENGTH, LENGTH), bool))
    if packed:
        mask &= (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (SEGMENTS[:, :, None] != 0)
    return mask


def run_hf(layer, rotary, x, packed, gradient=None):
    """The output, and with `gradient` those of every weight, as our tree, and of the input."""
    x = torch.tensor(x, requires_grad=gradient is not None)
    positions = torch.tensor(PACKED) if packed else torch.arange(LENGTH)[None].expand(BATCH, LENGTH)
    mask = torch.where(torch.tensor(visible(packed))[:, None], 0.0, torch.finfo(torch.float32).min)
    output = layer(x, position_embeddings=rotary(x, positions), attention_mask=mask)[0]
    if gradient is None:
        return output.detach().numpy()
    output.backward(torch.tensor(gradient))
    named = {name: parameter.grad.numpy() for name, parameter in layer.named_parameters()}
    return output.detach().numpy(), from_hf(named), x.grad.numpy()


def run(spec, tree, x, packed=False):
    model = template(spec)
    return jax.jit(lambda tree, x: model.bind(tree)(x, layer_inputs(packed)))(tree, x)


def version_2(yarn, query_rank, bias):
    config = DeepseekV2Config(
        **SHARED,
        q_lora_rank=query_rank or None,
        rope_parameters=YARN if yarn else PLAIN,
        attention_bias=bias,
    )
    return randomize(DeepseekV2Attention(config, 0)), DeepseekV2RotaryEmbedding(config)


def version_3(yarn, query_rank, bias, interleave=True):
    config = DeepseekV3Config(
        **SHARED,
        q_lora_rank=query_rank or None,
        rope_parameters=YARN if yarn else PLAIN,
        attention_bias=bias,
        rope_interleave=interleave,
    )
    return randomize(DeepseekV3Attention(config, 0)), DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize(
    ("make", "query_rank", "yarn", "bias", "packed"),
    [
        (version_2, 0, False, False, False),
        (version_2, QUERY_RANK, True, True, True),
        (version_3, 0, True, True, True),
        (version_3, QUERY_RANK, False, False, False),
        (partial(version_3, interleave=False), QUERY_RANK, True, False, False),
    ],
    ids=["v2 direct", "v2 yarn bias packed", "v3 direct yarn bias packed", "v3", "v3 halves yarn"],
)
def test_output_matches_transformers(make, query_rank, yarn, bias, packed):
    layer, rotary = make(yarn, query_rank, bias)
    interleave = not isinstance(make, partial)
    spec = mla_spec(query_rank, yarn, interleave, bias=bias)
    tree = from_hf({name: tensor.numpy() for name, tensor in layer.state_dict().items()})
    assert jax.tree.structure(tree) == jax.tree.structure(template(spec).weights)
    x = hidden()
    real = SEGMENTS != 0 if packed else np.ones((BATCH, LENGTH), bool)
    output, aux = run(spec, tree, x, packed)
    np.testing.assert_allclose(output[real], run_hf(layer, rotary, x, packed)[real], atol=2e-5)
    assert aux == {}


@pytest.mark.parametrize("latent", [False, True])
def test_gradients_match_transformers(latent):
    """Also with weight absorption: it is the same function of the same weights."""
    layer, rotary = version_3(True, QUERY_RANK, True)
    x, gradient = hidden(), hidden(5)
    expected, hf_dweights, hf_dx = run_hf(layer, rotary, x, False, gradient)
    tree = from_hf({name: tensor.numpy() for name, tensor in layer.state_dict().items()})
    model = template(mla_spec(yarn=True, bias=True, latent=latent))

    @jax.jit
    def output_and_gradients(tree, x):
        output, vjp = jax.vjp(lambda tree, x: model.bind(tree)(x, layer_inputs())[0], tree, x)
        return output, *vjp(gradient)

    output, dweights, dx = output_and_gradients(tree, x)
    np.testing.assert_allclose(output, expected, atol=2e-5)
    np.testing.assert_allclose(dx, hf_dx, atol=1e-4)
    assert jax.tree.structure(dweights) == jax.tree.structure(hf_dweights)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), dweights, hf_dweights)


@pytest.mark.parametrize("query_rank", [0, QUERY_RANK])
def test_weight_absorption_matches_the_plain_form(query_rank):
    """With packed rows and padding; outputs and gradients of all weights."""
    tree = random_weights(mla_spec(query_rank))
    x, gradient = hidden(), hidden(5)

    @partial(jax.jit, static_argnums=0)
    def output_and_gradients(latent, tree, x):
        model = template(mla_spec(query_rank, latent=latent))
        output, vjp = jax.vjp(
            lambda tree, x: model.bind(tree)(x, layer_inputs(packed=True))[0], tree, x
        )
        return output, *vjp(gradient)

    plain, absorbed = (output_and_gradients(latent, tree, x) for latent in (False, True))
    assert not np.asarray(plain[0])[SEGMENTS == 0].any()  # without bias, the output of padding is 0
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), absorbed, plain)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("query_rank", [0, QUERY_RANK])
def test_decode_steps_attend_to_latents_in_their_blocks(latent, query_rank):
    """As on one GPU, with an interpreted kernel: the tokens of one sequence after each other, after
    a prompt, against the whole sequence."""
    spec = replace(
        mla_spec(query_rank, latent=latent), kv_rank=32, rope_dim=16, backend=AUTOSELECTED
    )
    prompt, block_size = 6, 16
    model = Template.of(
        lambda: spec.build(
            Initializer(hash_rng.key_from_seed(0), "bfloat16"), EMBED_DIM, "bfloat16"
        )
    )
    draw = np.random.default_rng(0).normal
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(draw(size=leaf.shape) * 0.3, leaf.dtype), model.weights
    )
    x = jnp.asarray(hidden(), "bfloat16")
    expected, _ = model.bind(weights)(x, layer_inputs())
    cache = empty_cache(
        spec,
        CacheConfig(
            BATCH, 2 * block_size, "bfloat16", block_size, context=BuildContext("gpu", 1, "9.0")
        ),
    )
    assert cache.in_place
    assert set(cache.blocks) == {LATENT, KEY_ROPE}
    table = jnp.asarray([[3, 0], [1, 2]], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    inputs = LayerInputs(positions[:, :prompt], cache=cache, is_first_chunk=True, block_table=table)
    prefilled, aux = model.bind(weights)(x[:, :prompt], inputs)
    outputs = [prefilled]
    with interpreted_kernels() as kernels:
        for token in range(prompt, LENGTH):
            at = slice(token, token + 1)
            inputs = LayerInputs(positions[:, at], cache=aux["cache"], block_table=table)
            output, aux = model.bind(weights).decode(x[:, at], inputs)
            outputs.append(output)
    assert "latent_attention" in kernels
    actual = np.asarray(jnp.concatenate(outputs, axis=1), np.float32)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_allclose(actual, expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("latent", [False, True])
def test_max_logits_are_reported(latent):
    """Against numpy, with RoPE as a product of complex numbers; the output does not change."""
    spec = mla_spec(latent=latent, report_max_logits=True)
    tree = random_weights(spec)
    x = hidden()
    output, aux = run(spec, tree, x, packed=True)
    plain, _ = run(mla_spec(), tree, x, packed=True)
    np.testing.assert_allclose(output, plain, atol=1e-4)

    def normed(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    def rotate(x):  # [B, S, H, P], neighbours as complex numbers
        pairs = x[..., 0::2] + 1j * x[..., 1::2]
        return pairs * np.exp(
            1j * PACKED[:, :, None, None] * 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE)
        )

    q = normed(x @ tree["query_a"]["weight"], tree["query_norm"]["scale"])
    q = np.einsum("bsr,rhd->bshd", q, tree["query_b"]["weight"])
    latent_and_rope = x @ tree["kv_a"]["weight"]
    k = normed(latent_and_rope[..., :RANK], tree["kv_norm"]["scale"])
    k = np.einsum("bsr,rhd->bshd", k, tree["kv_b"]["weight"])[..., :NOPE]
    logits = np.einsum("bshd,bthd->bhst", q[..., :NOPE], k)
    logits += np.einsum(
        "bshd,btd->bhst",
        rotate(q[..., NOPE:]),
        rotate(latent_and_rope[:, :, None, RANK:])[:, :, 0].conj(),
    ).real
    logits = np.where(visible(packed=True)[:, None], logits * spec.scale, -np.inf)
    np.testing.assert_allclose(aux["max_logits"], logits.max(axis=(0, 2, 3)), rtol=1e-4)


def test_axes_and_shapes_of_the_weights():
    model = template(mla_spec(bias=True))
    axes = model.axes
    assert axes["query_a"] == {"weight": ("embed", "q_lora_up_proj"), "bias": ("q_lora_up_proj",)}
    assert axes["query_b"] == {"weight": ("q_lora", "q_heads", "kv")}
    assert axes["kv_a"]["weight"] == ("embed", "kv_lora_up_proj")
    assert axes["kv_b"] == {"weight": ("kv_lora", "kv_heads", "kv_head_dim")}
    assert axes["out"]["weight"] == ("heads", "kv", "embed")
    assert template(mla_spec(0)).axes["query"] == {"weight": ("embed", "q_heads", "kv")}
    jax.tree.map(
        lambda names, leaf: np.testing.assert_equal(len(names), leaf.ndim),
        axes,
        model.weights,
        is_leaf=lambda value: isinstance(value, tuple),
    )


@pytest.mark.parametrize("latent", [False, True])
def test_intermediates_have_remat_names(latent):
    model = template(mla_spec(latent=latent))
    program = str(
        jax.make_jaxpr(lambda tree, x: model.bind(tree)(x, layer_inputs())[0])(
            model.weights, hidden()
        )
    )
    tags = {
        "query_wa_proj",
        "kv_wa_proj",
        "mla_q",
        "query_proj",
        "key_proj",
        "value_proj",
        "context",
        "out_proj",
    }
    # With weight absorption, keys and values are not computed.
    tags |= {"attention_out"} | (set() if latent else {"mla_kv"})
    assert tags == {tag for tag in tags | {"mla_kv"} if f"name={tag}" in program}


def test_indexer_needs_the_query_latent():
    indexer = IndexerSpec(2, 16, ROPE, RopeSpec(), topk=4)
    with pytest.raises(ConfigError, match="q_lora_rank"):
        mla_spec(0, indexer=indexer)
