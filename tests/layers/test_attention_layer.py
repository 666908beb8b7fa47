"""The attention layer: fused projections against separate ones, and its options against
transformers' layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import GptOssConfig, Qwen3Config
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding

from maxtext.common import hash_rng
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.attention import Attention
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import AttentionSpec, NormSpec, RopeSpec
from tests.tolerance import assert_within_rounding

SIZE, LENGTH, HEAD = 24, 9, 8


def template(heads, groups, **options):
    spec = AttentionSpec(
        heads, groups, HEAD, HEAD**-0.5, options.pop("mask", AttentionMask()), **options
    )
    return Template.of(
        lambda: Attention(Initializer(hash_rng.key_from_seed(0), "float32"), spec, SIZE, "float32")
    )


def separate_weights(heads, groups, bias):
    draw = np.random.default_rng(0).normal
    counts = {"query": heads, "key": groups, "value": groups}
    tree = {
        name: {"weight": draw(size=(SIZE, count, HEAD)) * 0.4} for name, count in counts.items()
    }
    tree["out"] = {"weight": draw(size=(heads, HEAD, SIZE)) * 0.4}
    if bias:
        for name, count in counts.items():
            tree[name]["bias"] = draw(size=(count, HEAD))
        tree["out"]["bias"] = draw(size=SIZE)
    return {
        name: {key: value.astype(np.float32) for key, value in layer.items()}
        for name, layer in tree.items()
    }


def fuse(tree, heads, groups):
    """Head by head, as the layer says: each key/value head's queries, then its key, then its
    value.
    """
    each = heads // groups

    def arrange(part):
        q, k, v = (tree[name][part] for name in ("query", "key", "value"))
        rows = []
        for group in range(groups):
            rows += [q[..., group * each + i, :] for i in range(each)] + [
                k[..., group, :],
                v[..., group, :],
            ]
        rows = np.stack(rows, axis=-2)
        return rows.reshape(*rows.shape[:-2], groups, each + 2, HEAD)

    return {"qkv": {part: arrange(part) for part in tree["query"]}, "out": tree["out"]}


def inputs(batch=2):
    x = np.random.default_rng(3).normal(size=(batch, LENGTH, SIZE)).astype(np.float32)
    return x, LayerInputs(jnp.broadcast_to(jnp.arange(LENGTH), (batch, LENGTH)))


def output(template, tree, x, layer_inputs):
    return jax.jit(lambda tree, x: template.bind(tree)(x, layer_inputs)[0])(tree, x)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)], ids=["MHA", "GQA", "MQA"])
def test_fused_is_separate(heads, groups, bias):
    tree = separate_weights(heads, groups, bias)
    x, layer_inputs = inputs()
    separate = template(heads, groups, rope=RopeSpec(), bias=bias, out_bias=bias)
    fused = template(heads, groups, rope=RopeSpec(), bias=bias, out_bias=bias, fused=True)

    @jax.jit
    def run(tree, fused_tree, x):
        one, other = separate.bind(tree), fused.bind(fused_tree)
        return other.project(x), one(x, layer_inputs)[0], other(x, layer_inputs)[0]

    projected, expected, actual = run(tree, fuse(tree, heads, groups), x)
    for part, name in zip(projected, ("query", "key", "value"), strict=True):
        float32, float64 = (
            np.einsum("bse,ehd->bshd", x.astype(dtype), tree[name]["weight"])
            + tree[name].get("bias", 0)
            for dtype in (np.float32, np.float64)
        )
        assert_within_rounding(part, float32, float64)
    np.testing.assert_allclose(actual, expected, atol=1e-6 * np.abs(expected).max())


def from_torch(layer, heads, groups):
    """Our weights from a transformers attention layer; torch keeps [out, in]."""
    state = {name: tensor.detach().numpy() for name, tensor in layer.state_dict().items()}
    tree = {}
    for native_name, hf_name, count in (
        ("query", "q", heads),
        ("key", "k", groups),
        ("value", "v", groups),
    ):
        tree[native_name] = {"weight": state[f"{hf_name}_proj.weight"].T.reshape(SIZE, count, HEAD)}
        if f"{hf_name}_proj.bias" in state:
            tree[native_name]["bias"] = state[f"{hf_name}_proj.bias"].reshape(count, HEAD)
    tree["out"] = {"weight": state["o_proj.weight"].T.reshape(heads, HEAD, SIZE)}
    if "o_proj.bias" in state:
        tree["out"]["bias"] = state["o_proj.bias"]
    if "sinks" in state:
        tree["sinks"] = state["sinks"]
    if "q_norm.weight" in state:
        tree["query_norm"], tree["key_norm"] = (
            {"scale": state["q_norm.weight"]},
            {"scale": state["k_norm.weight"]},
        )
    return tree


def shuffled(layer):
    """Every weight is random, so that a forgotten one shows."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return layer.float().eval()


def their_output(layer, rotary, x, visible):
    x = torch.tensor(x)
    positions = torch.arange(LENGTH)[None].expand(len(x), LENGTH)
    mask = torch.where(torch.tensor(visible), 0.0, float("-inf"))[None, None].expand(
        len(x), 1, LENGTH, LENGTH
    )
    with torch.no_grad():
        return layer(x, position_embeddings=rotary(x, positions), attention_mask=mask)[0].numpy()


def test_qk_norm_of_qwen3():
    """RMSNorm of each head, before RoPE."""
    config = Qwen3Config(
        hidden_size=SIZE, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD,
        rms_norm_eps=1e-3, attn_implementation="eager",
    )  # fmt: skip
    layer = shuffled(Qwen3Attention(config, layer_idx=0))
    x, layer_inputs = inputs()
    norm = NormSpec(epsilon=1e-3)
    theta = config.rope_parameters["rope_theta"]
    actual = template(4, 2, rope=RopeSpec(max_timescale=theta), qk_norm=norm)
    expected = their_output(layer, Qwen3RotaryEmbedding(config), x, np.tri(LENGTH, dtype=bool))
    np.testing.assert_allclose(
        output(actual, from_torch(layer, 4, 2), x, layer_inputs), expected, atol=2e-5
    )


def test_sinks_biases_and_window_of_gpt_oss():
    """With its YaRN, untruncated and with attention scaling."""
    config = GptOssConfig(
        hidden_size=SIZE, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD,
        sliding_window=3,
        layer_types=["sliding_attention"], num_hidden_layers=1, attention_bias=True,
        attn_implementation="eager",
    )  # fmt: skip
    layer = shuffled(GptOssAttention(config, layer_idx=0))
    x, layer_inputs = inputs()
    rope = RopeSpec(
        "yarn",
        max_timescale=150_000.0,
        factor=32.0,
        original_length=4096,
        truncate=False,
        attention_scaling=True,
    )
    visible = np.array([[i - 3 < j <= i for j in range(LENGTH)] for i in range(LENGTH)])
    actual = template(
        4, 2, rope=rope, bias=True, out_bias=True, sinks=True, mask=AttentionMask(window=3)
    )
    expected = their_output(layer, GptOssRotaryEmbedding(config), x, visible)
    np.testing.assert_allclose(
        output(actual, from_torch(layer, 4, 2), x, layer_inputs), expected, atol=2e-5
    )
