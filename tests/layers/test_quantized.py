"""Which weights may be quantized, in which form a model keeps them, and layers with them against
layers with floats.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common import hash_rng
from maxtext.common.trees import flatten_dict
from maxtext.configs.derive import Devices
from maxtext.kernels.weight_only import QuantizedWeight
from maxtext.layers.context import BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.quantized import abstract_quantized, quantize_weights
from maxtext.layers.specs import MoeSpec, RouterSpec
from maxtext.layers.weight_layout import supports_gemv
from maxtext.models.configuration import load
from maxtext.models.transformer import make_template

SMALL = (
    "base_num_query_heads=4", "base_num_kv_heads=4", "base_mlp_dim=16", "vocab_size=64",
    "max_target_length=16",
)  # fmt: skip
EXPERTS = ("num_experts=4", "num_experts_per_tok=2")
LATENT = (
    "attention_type=mla", "q_lora_rank=12", "kv_lora_rank=10", "qk_nope_head_dim=6",
    "qk_rope_head_dim=8", "v_head_dim=6", "first_num_dense_layers=0", "shared_experts=1",
    "routed_bias=true",
)  # fmt: skip
DELTA = ("head_dim=8", "gdn_num_value_heads=16")
# A model, the kernels of its first layer that are quantized, and all the rest of the layer.
FAMILIES = {
    "llama": (
        ("decoder_block=llama2",),
        "attention/{query,key,value,out} mlp/{wi_0,wi_1,wo}",
        "attention_norm/scale mlp_norm/scale",
    ),
    "experts": (
        ("decoder_block=mixtral", *EXPERTS),
        "attention/{query,key,value,out} mlp/experts/{wi_0,wi_1,wo}",
        "attention_norm/scale mlp_norm/scale mlp/router/weight",
    ),
    "latents": (
        ("decoder_block=deepseek", *LATENT, *EXPERTS),
        "attention/{query_a,query_b,kv_a,kv_b,out} mlp/experts/{wi_0,wi_1,wo} "
        "mlp/shared/{wi_0,wi_1,wo}",
        "attention/{query_norm/scale,kv_norm/scale} attention_norm/scale mlp_norm/scale "
        "mlp/router/{weight,bias}",
    ),
    "delta": (
        ("decoder_block=qwen3_next", *DELTA, *EXPERTS),
        "attention/{query,key,value,gate,beta,decay,out} mlp/experts/{wi_0,wi_1,wo}",
        "attention/{conv_query,conv_key,conv_value,log_rate,step_bias,norm/scale} "
        "attention_norm/scale mlp_norm/scale mlp/router/weight",
    ),
}


def spread(text):
    """`a/{b,c}` as a/b and a/c."""
    words = set()
    for word in text.split():
        start, _, rest = word.partition("{")
        words |= {start + end for end in rest.removesuffix("}").split(",")}
    return words


def is_quantized(leaf):
    return isinstance(leaf, QuantizedWeight)


def template_of(*words, size=32, layers=2, scanned=False):
    more = (f"base_emb_dim={size}", f"base_num_decoder_layers={layers}", f"scan_layers={scanned}")
    return make_template(load(None, [*SMALL, *words, *more], environ={}, devices=Devices(1)))


def in_floats(weights):
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if is_quantized(leaf) else leaf,
        weights,
        is_leaf=is_quantized,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_which_weights(name):
    words, kernels, rest = FAMILIES[name]
    _, weights = abstract_quantized(template_of(*words, layers=4), "int8")
    assert is_quantized(weights["head"]["weight"])
    assert not is_quantized(weights["embedder"]["embedding"])
    layer = {
        "/".join(path): leaf
        for path, leaf in flatten_dict(weights["layers"][0]["blocks"][0][0]).items()
    }
    assert {path for path, leaf in layer.items() if is_quantized(leaf)} == {
        f"{path}/weight" for path in spread(kernels)
    }
    assert {path for path, leaf in layer.items() if not is_quantized(leaf)} == spread(rest)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_stacked_layers_are_quantized_like_each(axis, dtype):
    """The last dimensions of a weight [layers, ...] and of one with the layers at another place are
    the same.
    """
    words = ("decoder_block=mixtral", *EXPERTS)
    template = template_of(*words, f"param_scan_axis={axis}", size=256, scanned=True)
    draw = np.random.default_rng(0).normal
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(draw(size=leaf.shape), jnp.float32), template.weights
    )
    actual = flatten_dict(
        jax.jit(lambda weights: quantize_weights(template, weights, dtype))(weights)
    )
    single = flatten_dict(template_of(*words, size=256).contracted)
    for path, leaf in flatten_dict(weights).items():
        if path[0] != "layers" or path[-1] != "weight" or "router" in path:
            continue
        place = flatten_dict(template.axes)[path].index("layers")
        assert place == axis
        contracted = single[(*path[:4], 0, *path[4:])]
        for layer in range(2):
            alone = np.take(np.asarray(leaf), layer, axis)
            largest = np.abs(alone).max(axis=contracted, keepdims=True) / 127
            part = jax.tree.map(
                lambda part, layer=layer: np.take(np.asarray(part), layer, axis), actual[path]
            )
            if dtype == "int8":
                np.testing.assert_allclose(part.scale, largest, rtol=1e-6)
            assert np.abs(part.astype(np.float32) - alone).max() <= part.scale.max() * 0.501


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"quantized_weights": "int8"}, None),
        ({"quantized_weights": "int8", "platform": "tpu"}, None),
        ({"quantized_weights": "int4"}, "int4 weights have no 8-bit products"),
        ({"dtype": "float32"}, "float32 asks for more precision"),
        ({"mode": "train"}, "for inference without adapters only"),
        ({"platform": "gpu", "capability": "9.0"}, None),
        ({"platform": "gpu", "capability": "8.0"}, "need compute capability 8.9, not 8.0"),
        ({"platform": "tpu"}, "a TPU has no fp8 products"),
    ],
)
def test_which_devices_quantize_activations(options, reason):
    context = BuildContext(
        **{"mode": "inference", "dtype": "bfloat16", "quantized_weights": "fp8"} | options
    )
    actual = context.eight_bit_unsupported_reason()
    assert actual is None if reason is None else reason in actual


@pytest.mark.parametrize(
    ("name", "capability", "in_shape", "supported"),
    [
        ("int4", "9.0", (32, 128), True),
        ("int4", "9.0", (16, 64), True),  # a group has two heads
        ("int4", "9.0", (32, 96), False),  # a group is one head of 96
        ("int8", "9.0", (32, 96), True),
        ("fp8", "9.0", (32, 96), True),
        ("fp8", "8.0", (32, 96), False),
        ("nf4", "9.0", (4096,), False),
    ],
)
def test_which_weights_gemv_kernels_take(name, capability, in_shape, supported):
    context = BuildContext(quantized_weights=name, platform="gpu", capability=capability)
    assert supports_gemv(in_shape, [64, 4096], "bfloat16", context) == supported


def test_a_scale_is_split_like_the_outputs():
    axes, weights = abstract_quantized(
        template_of("decoder_block=mixtral", *EXPERTS, scanned=True), "int8"
    )
    block = axes["layers"][0]["blocks"][0]
    assert block["attention"]["query"]["weight"] == QuantizedWeight(
        ("embed", "layers", "q_heads", "kv"), (None, "layers", "q_heads", "kv")
    )
    assert block["attention"]["out"]["weight"] == QuantizedWeight(
        ("heads", "layers", "kv", "embed"), (None, "layers", None, "embed")
    )
    assert block["mlp"]["experts"]["wo"]["weight"] == QuantizedWeight(
        ("exp", "layers", "mlp_moe", "embed_moe"), ("exp", "layers", None, "embed_moe")
    )
    assert block["mlp"]["router"]["weight"] == ("embed", "layers", "exp")
    experts = weights["layers"][0]["blocks"][0]["mlp"]["experts"]["wo"]["weight"]
    assert (experts.qvalue.shape, experts.scale.shape) == ((4, 2, 16, 32), (4, 2, 1, 32))
    assert (experts.qvalue.dtype, experts.scale.dtype) == (jnp.int8, jnp.float32)


EXPERT_LAYER = MoeSpec(
    RouterSpec(4, 2, normalise=True), 160, activations=("sigmoid", "linear"), limit=0.8, bias=True
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("method", ["sparse", "dense", "dropping"])
def test_experts_of_integers_give_what_their_floats_give(method, dtype):
    spec, size = replace(EXPERT_LAYER, method=method), 256
    template = Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), size, "float32")
    )
    draw = np.random.default_rng(0).normal
    floats = jax.tree.map(
        lambda leaf: jnp.asarray(draw(size=leaf.shape) * 0.1, jnp.float32), template.weights
    )
    weights = quantize_weights(template, floats, dtype)
    assert weights["experts"]["wi_0"]["weight"].scale.shape == (
        (4, 1, 160) if dtype == "int8" else (4, 2, 160)
    )
    x = jnp.asarray(draw(size=(2, 5, size)), jnp.float32)
    inputs = LayerInputs(
        jnp.broadcast_to(jnp.arange(5), (2, 5)), jnp.asarray([[1] * 5, [1] * 3 + [0] * 2])
    )
    run = jax.jit(lambda weights: template.bind(weights)(x, inputs)[0])
    with jax.default_matmul_precision("highest"):
        actual, expected = run(weights), run(in_floats(weights))
        exact = run(floats)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.abs(expected).max())
    assert np.abs(actual - exact).max() > 1e-3  # so the comparison can fail
