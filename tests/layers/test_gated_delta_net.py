"""Gated DeltaNet against the layers of transformers: hf_outputs, gradients, packed documents,
decoding, precision.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from maxtext.common import hash_rng
from maxtext.kernels.decode.delta_step import STATES, DeltaStep, gated_delta_decode
from maxtext.kernels.delta_rule import causal_convolution_step, gated_delta_step
from maxtext.layers.cache import CacheConfig
from maxtext.layers.context import INFERENCE, REFERENCE, BuildContext
from maxtext.layers.gated_delta_net import empty_cache, l2_normalise
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import GatedDeltaNetSpec
from maxtext.layers.weight_layout import pack_weights
from tests.layers.gpu_context import interpreted_kernels
from tests.tolerance import assert_within_rounding, dtype_of, in_both_precisions

EMBED_DIM, HEADS, KEY_DIM, VALUE_DIM, CONV_WIDTH, EPSILON = 12, 2, 4, 6, 4, 1e-6
LENGTH = 21
jit = jax.jit
FAMILIES = {
    "next": (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    "3.5": (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
}


def template(group, dtype="float32", **options):
    spec = GatedDeltaNetSpec(
        HEADS,
        HEADS * group,
        KEY_DIM,
        VALUE_DIM,
        CONV_WIDTH,
        **{"chunk": 8, "norm_epsilon": EPSILON, **options},
    )
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), dtype), EMBED_DIM, dtype)
    )


def hf_layer(family, group):
    make_config, make = FAMILIES[family]
    config = make_config(
        hidden_size=EMBED_DIM,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        rms_norm_eps=EPSILON,
        linear_conv_kernel_dim=CONV_WIDTH,
        linear_key_head_dim=KEY_DIM,
        linear_value_head_dim=VALUE_DIM,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS * group,
    )
    layer = make(config, 0)
    generator = torch.Generator().manual_seed(group)
    for name, weight in layer.named_parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.5 + (name == "norm.weight")
    return layer


def from_hf(tensors, group):
    """The tree of Hugging Face tensors (weights or gradients)."""
    tensors = {
        name.removesuffix(".weight"): tensor.detach().numpy() for name, tensor in tensors.items()
    }
    values = group * VALUE_DIM
    if "in_proj_qkvz" in tensors:
        qkvz = tensors["in_proj_qkvz"].reshape(HEADS, 2 * KEY_DIM + 2 * values, EMBED_DIM)
        query, key, value, gate = np.split(qkvz, np.cumsum([KEY_DIM, KEY_DIM, values]), axis=1)
        beta, decay = np.split(
            tensors["in_proj_ba"].reshape(HEADS, 2 * group, EMBED_DIM), 2, axis=1
        )
    else:
        query, key, value = np.split(
            tensors["in_proj_qkv"], np.cumsum([HEADS * KEY_DIM, HEADS * KEY_DIM])
        )
        gate, beta, decay = (tensors[f"in_proj_{name}"] for name in "zba")
    projections = dict(query=query, key=key, value=value, gate=gate, beta=beta, decay=decay)
    convolutions = np.split(tensors["conv1d"], np.cumsum([HEADS * KEY_DIM, HEADS * KEY_DIM]))
    return {
        **{
            name: {"weight": rows.reshape(HEADS, -1, EMBED_DIM).transpose(2, 0, 1)}
            for name, rows in projections.items()
        },
        **{
            f"conv_{name}": channels.reshape(HEADS, -1, CONV_WIDTH).transpose(2, 0, 1)
            for name, channels in zip(("query", "key", "value"), convolutions, strict=True)
        },
        "log_rate": tensors["A_log"].reshape(HEADS, group),
        "step_bias": tensors["dt_bias"].reshape(HEADS, group),
        "norm": {"scale": tensors["norm"]},
        "out": {"weight": tensors["out_proj"].T.reshape(HEADS, values, EMBED_DIM)},
    }


def activations(length=LENGTH, seed=0):
    return np.random.default_rng(seed).normal(size=(2, length, EMBED_DIM)).astype(np.float32)


def inputs(segments=None, length=LENGTH):
    return LayerInputs(jnp.broadcast_to(jnp.arange(length), (2, length)), segments)


def hf_outputs(layer, x):
    """The output of transformers, in float32 and in float64."""
    return in_both_precisions(
        layer, lambda layer: layer(torch.tensor(x, dtype=dtype_of(layer))).detach().numpy()
    )


def run(model, tree, x, layer_inputs):
    return jit(lambda tree, x: model.bind(tree)(x, layer_inputs)[0])(tree, x)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_match_transformers(family, group):
    layer, x = hf_layer(family, group), activations(70)  # more than one chunk of transformers
    expected = hf_outputs(layer, x)
    tree = from_hf(dict(layer.named_parameters()), group)
    for form in ("chunked", "recurrent"):
        y = run(template(group, form=form), tree, x, inputs(length=70))
        assert_within_rounding(y, *expected)


def test_gradients_match_transformers():
    layer, x, group = hf_layer("next", 2), activations(), 2
    weights = activations(seed=1)
    model = template(group)

    def backward(layer):
        """The gradients of the weights, and of x."""
        tensor = torch.tensor(x, dtype=dtype_of(layer), requires_grad=True)
        (layer(tensor) * torch.tensor(weights)).sum().backward()
        return from_hf(
            {name: weight.grad for name, weight in layer.named_parameters()}, group
        ), tensor.grad

    def total(tree, x):
        return jnp.sum(model.bind(tree)(x, inputs())[0] * weights)

    gradients, dx = jit(jax.grad(total, argnums=(0, 1)))(
        from_hf(dict(layer.named_parameters()), group), x
    )
    (float32, dx32), (float64, dx64) = in_both_precisions(layer, backward)
    jax.tree.map(assert_within_rounding, gradients, float32, float64)
    assert_within_rounding(dx, dx32, dx64)
    assert all(np.abs(gradient).max() > 1e-3 for gradient in jax.tree.leaves(gradients))


def test_without_qk_norm(monkeypatch):
    """transformers always norms queries and keys, so its rule is patched."""
    rule = modeling_qwen3_next.torch_chunk_gated_delta_rule

    def unnormed(*arguments, **options):
        return rule(*arguments, **{**options, "use_qk_l2norm_in_kernel": False})

    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", unnormed)
    layer, x = hf_layer("next", 2), activations() * 0.5
    expected = hf_outputs(layer, x)
    tree = from_hf(dict(layer.named_parameters()), 2)
    assert_within_rounding(run(template(2, qk_norm=False), tree, x, inputs()), *expected)
    assert np.abs(run(template(2), tree, x, inputs()) - expected[0]).max() > 1e-2


SEGMENTS = np.array([[1] * 2 + [2] * 13 + [3] * 4 + [0] * 2, [0] * 3 + [5] * 9 + [6] * 9])
DOCUMENTS = [(0, 0, 2), (0, 2, 15), (0, 15, 19), (1, 3, 12), (1, 12, 21)]  # row, first, end


@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_packed_documents(form):
    """A packed document has the output of transformers for it alone, whatever the padding holds."""
    layer, x = hf_layer("3.5", 2), activations()
    tree, model = from_hf(dict(layer.named_parameters()), 2), template(2, form=form)
    y = run(model, tree, x, inputs(SEGMENTS))
    for row, first, end in DOCUMENTS:
        expected = hf_outputs(layer, x[row : row + 1, first:end])
        assert_within_rounding(y[row : row + 1, first:end], *expected)
    changed_padding = run(
        model, tree, np.where(SEGMENTS[..., None] == 0, 7.0, x).astype(np.float32), inputs(SEGMENTS)
    )
    np.testing.assert_array_equal(
        np.asarray(changed_padding)[SEGMENTS != 0], np.asarray(y)[SEGMENTS != 0]
    )


def test_decoding():
    """Token by token with the step functions and the layer's weights: matches transformers over the
    sequence.
    """
    group = 2
    layer, x = hf_layer("next", group), activations(12)
    expected = hf_outputs(layer, x)
    module = template(group).bind(
        jax.tree.map(jnp.asarray, from_hf(dict(layer.named_parameters()), group))
    )

    @jit
    def step(x, states):
        """x [B, E]; the states of the three convolutions and of the rule."""
        activations, new_states = [], []
        for name, state in zip(("query", "key", "value"), states, strict=False):
            y, state = causal_convolution_step(
                getattr(module, name)(x), getattr(module, f"conv_{name}")[...], state
            )
            activations.append(jax.nn.silu(y))
            new_states.append(state)
        q, k = (jnp.repeat(l2_normalise(x), group, axis=1) for x in activations[:2])
        v = activations[2].reshape(2, -1, VALUE_DIM)
        decay = module.log_decay(module.decay(x)).reshape(2, -1)
        beta = module.step_size(module.beta(x)).reshape(2, -1)
        out, state = gated_delta_step(q, k, v, decay, beta, states[3])
        gate = jax.nn.silu(module.gate(x))
        return module.out(module.norm(out).reshape(gate.shape) * gate), [*new_states, state]

    dims = (KEY_DIM, KEY_DIM, group * VALUE_DIM)
    states = [jnp.zeros((2, CONV_WIDTH - 1, HEADS, dim)) for dim in dims]
    states.append(jnp.zeros((2, HEADS * group, KEY_DIM, VALUE_DIM)))
    decoded = []
    for t in range(12):
        y, states = step(x[:, t], states)
        decoded.append(y)
    assert_within_rounding(np.stack(decoded, axis=1), *expected)


@pytest.mark.slow
def test_bfloat16():
    """The output is near that of float32, and gradients are finite."""
    layer, x = hf_layer("next", 2), activations()
    expected = layer(torch.tensor(x)).detach().numpy()
    tree = jax.tree.map(
        lambda weight: jnp.asarray(weight, jnp.bfloat16), from_hf(dict(layer.named_parameters()), 2)
    )
    model = template(2, dtype="bfloat16")

    def total(tree):
        y, _ = model.bind(tree)(jnp.asarray(x, jnp.bfloat16), inputs(SEGMENTS * 0 + 1))
        return jnp.sum(y.astype(jnp.float32) ** 2), y

    gradients, y = jit(jax.grad(total, has_aux=True))(tree)
    assert y.dtype == jnp.bfloat16
    error = np.asarray(y, np.float32) - expected
    assert np.sqrt(np.mean(error**2) / np.mean(expected**2)) < 0.02
    assert all(
        np.isfinite(gradient.astype(jnp.float32)).all() for gradient in jax.tree.leaves(gradients)
    )


def test_shapes_and_axes_of_weights():
    model = template(3)
    axes, values = model.axes, 3 * VALUE_DIM
    shapes = jax.tree.map(lambda weight: weight.shape, model.weights)
    for name, dim in dict(
        query=KEY_DIM, key=KEY_DIM, value=values, gate=values, beta=3, decay=3
    ).items():
        assert shapes[name]["weight"] == (EMBED_DIM, HEADS, dim)
        assert axes[name]["weight"] == ("embed", "gdn_head", None)
    for name, dim in dict(query=KEY_DIM, key=KEY_DIM, value=values).items():
        assert shapes[f"conv_{name}"] == (CONV_WIDTH, HEADS, dim)
        assert axes[f"conv_{name}"] == (None, "gdn_head", None)
    assert axes["log_rate"] == axes["step_bias"] == ("gdn_head", None)
    assert shapes["log_rate"] == shapes["step_bias"] == (HEADS, 3)
    assert (shapes["out"]["weight"], axes["out"]["weight"]) == (
        (HEADS, values, EMBED_DIM),
        ("gdn_head", None, "embed"),
    )
    assert shapes["norm"]["scale"] == (VALUE_DIM,)


def test_initial_rates():
    """Uniform between 0.01 and 16, in as many heads as the statistics need."""
    spec = GatedDeltaNetSpec(32, 1024, 1, 1, CONV_WIDTH, 8, EPSILON)
    module = spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), 1, "float32")
    rates = np.sort(np.exp(module.log_rate[...]).ravel())
    assert rates[0] >= 0.01
    np.testing.assert_allclose(
        rates, np.linspace(0.01, 16, rates.size), atol=0.9
    )  # Kolmogorov: 0.05 of the range
    np.testing.assert_array_equal(module.step_bias[...], 1)
    np.testing.assert_array_equal(module.norm.scale[...], 1)


def test_invalid_specs_raise():
    with pytest.raises(ValueError, match="form must be one of chunked, recurrent, not parallel"):
        template(1, form="parallel")
    with pytest.raises(ValueError, match="3 value heads are not a multiple of 2 key heads"):
        GatedDeltaNetSpec(2, 3, KEY_DIM, VALUE_DIM, CONV_WIDTH, 8, EPSILON)


@pytest.mark.parametrize("group", [1, 2])
def test_decode_kernel(group):
    """As on one GPU, with an interpreted kernel: the tokens of two sequences after each other,
    against the whole sequences; the states of an idle row stay."""
    sizes = HEADS, HEADS * group, 16, 32, CONV_WIDTH
    spec = GatedDeltaNetSpec(*sizes, chunk=8, norm_epsilon=EPSILON)
    gpu = BuildContext("gpu", 1, "9.0", INFERENCE, "bfloat16", "bfloat16")

    def build(context):
        initializer = Initializer(hash_rng.key_from_seed(0), "bfloat16", context=context)
        return spec.build(initializer, EMBED_DIM, "bfloat16")

    plain, packed = (Template.of(lambda c=c: build(c)) for c in (REFERENCE, gpu))
    draw = np.random.default_rng(0).normal
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(draw(size=leaf.shape) * 0.3, leaf.dtype), plain.weights
    )
    x = jnp.asarray(draw(size=(2, 7, EMBED_DIM)), "bfloat16")
    expected, _ = plain.bind(weights)(x, LayerInputs(jnp.broadcast_to(jnp.arange(7), (2, 7))))
    layer = packed.bind(pack_weights(packed, jax.tree.map(jnp.copy, weights)))
    cache = empty_cache(spec, CacheConfig(3, 16, "bfloat16", context=gpu))
    cache = jax.tree.map(lambda array: array.at[2].set(0.5), cache)
    idle = jax.tree.map(lambda array: np.asarray(array[2]), cache)
    outputs = []
    with interpreted_kernels() as kernels:
        for token in range(7):
            rows = jnp.pad(x[:, token : token + 1], ((0, 1), (0, 0), (0, 0)))
            positions = jnp.asarray([[token], [token], [-1]])
            output, aux = layer.decode(rows, LayerInputs(positions, cache=cache))
            outputs.append(output[:2])
            cache = aux["cache"]
    assert kernels == {"gated_delta_step"}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[2], b), cache, idle)
    actual = np.asarray(jnp.concatenate(outputs, axis=1), np.float32)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_allclose(actual, expected, atol=0.03 * np.abs(expected).max())


def test_decode_kernel_lowers_for_gpus():
    step = DeltaStep(16, 2, 128, 128, 4, 1e-6, qk_norm=True)
    columns = step.key_heads * sum(step.dims.values())
    shapes = {name: (4, 16, dim) for name, dim in zip(STATES, (128, 128, 256), strict=False)}
    weights = {f"conv_{name}": shape for name, shape in shapes.items()}
    weights |= {"log_rate": (16, 2), "step_bias": (16, 2), "norm": (128,)}
    states = {name: (3, 3, *shape[1:]) for name, shape in shapes.items()}
    states["state"] = (3, 32, 128, 128)

    def array(shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    arguments = (
        array((3, columns)),
        {name: array(shape) for name, shape in weights.items()},
        {
            name: array(s, "float32" if name == "state" else "bfloat16")
            for name, s in states.items()
        },
        array((3,), "int32"),
    )
    lowered = jit(lambda *rest: gated_delta_decode(step, *rest)).trace(*arguments)
    assert "gated_delta_step" in lowered.lower(lowering_platforms=("cuda",)).as_text()
