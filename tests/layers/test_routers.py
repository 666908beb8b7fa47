"""Routers and their gradients against transformers with the same weights; statistics against
numpy.
"""

import importlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common import hash_rng
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.routers import (
    Routing,
    balanced_selection,
    expert_counts,
    load_balance_loss,
    updated_bias,
)
from maxtext.layers.specs import RouterSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

BATCH, LENGTH, EMBED_DIM, EXPERTS = 2, 33, 16, 12
EPSILON = 0.1  # large enough to be noticed

# name: (spec, (model, config class, router class) of transformers, config, HF names of our weights)
WEIGHT = {"weight": "weight"}
DEEPSEEK2 = dict(
    num_attention_heads=2,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=3,
    routed_scaling_factor=2.5,
)
DEEPSEEK3 = dict(n_routed_experts=EXPERTS, num_experts_per_tok=3, routed_scaling_factor=2.5)
SIGMOID = RouterSpec(EXPERTS, 3, score="sigmoid", scaling=2.5, bias="selection", float32=True)
SELECTION_BIAS = {**WEIGHT, "bias": "e_score_correction_bias"}
FAMILIES = {
    "mixtral": (
        RouterSpec(EXPERTS, 2, normalise=True),
        ("mixtral", "MixtralConfig", "MixtralTopKRouter"),
        dict(num_local_experts=EXPERTS, num_experts_per_tok=2),
        WEIGHT,
    ),
    "qwen3 normalised": (
        RouterSpec(EXPERTS, 4, normalise=True),
        ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter"),
        dict(num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=True),
        WEIGHT,
    ),
    "qwen3 unnormalised": (
        RouterSpec(EXPERTS, 4),
        ("qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeTopKRouter"),
        dict(num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=False),
        WEIGHT,
    ),
    "qwen3 next": (
        RouterSpec(EXPERTS, 3, normalise=True),
        ("qwen3_next", "Qwen3NextConfig", "Qwen3NextTopKRouter"),
        dict(num_experts=EXPERTS, num_experts_per_tok=3, norm_topk_prob=True),
        WEIGHT,
    ),
    "qwen3.5": (
        RouterSpec(EXPERTS, 3, normalise=True),
        ("qwen3_5_moe", "Qwen3_5MoeTextConfig", "Qwen3_5MoeTopKRouter"),
        dict(num_experts=EXPERTS, num_experts_per_tok=3),
        WEIGHT,
    ),
    "gpt-oss": (
        RouterSpec(EXPERTS, 4, score="softmax_of_topk", bias="logits"),
        ("gpt_oss", "GptOssConfig", "GptOssTopKRouter"),
        dict(num_local_experts=EXPERTS, num_experts_per_tok=4),
        {**WEIGHT, "bias": "bias"},
    ),
    "deepseek 2 greedy": (
        RouterSpec(EXPERTS, 3, scaling=2.5, float32=True),
        ("deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter"),
        DEEPSEEK2 | dict(topk_method="greedy"),
        WEIGHT,
    ),
    "deepseek 2 groups": (
        RouterSpec(
            EXPERTS, 3, scaling=2.5, groups=4, topk_groups=2, group_score="max", float32=True
        ),
        ("deepseek_v2", "DeepseekV2Config", "DeepseekV2TopkRouter"),
        DEEPSEEK2 | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2),
        WEIGHT,
    ),
    "deepseek 3": (
        replace(SIGMOID, normalise=True, groups=4, topk_groups=2),
        ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter"),
        DEEPSEEK3 | dict(n_group=4, topk_group=2, norm_topk_prob=True),
        SELECTION_BIAS,
    ),
    "deepseek 3 unnormalised": (
        replace(SIGMOID, groups=3, topk_groups=1),
        ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter"),
        DEEPSEEK3 | dict(n_group=3, topk_group=1, norm_topk_prob=False),
        SELECTION_BIAS,
    ),
    "kimi": (
        replace(SIGMOID, normalise=True),
        ("deepseek_v3", "DeepseekV3Config", "DeepseekV3TopkRouter"),
        DEEPSEEK3 | dict(n_group=1, topk_group=1, norm_topk_prob=True),
        SELECTION_BIAS,
    ),
    "llama 4": (
        RouterSpec(EXPERTS, 1, score="sigmoid"),
        ("llama4", "Llama4TextConfig", "Llama4Router"),
        dict(num_local_experts=EXPERTS, num_experts_per_tok=1),
        WEIGHT,
    ),
    "llama 4 top 2": (
        RouterSpec(EXPERTS, 2, score="sigmoid"),
        ("llama4", "Llama4TextConfig", "Llama4Router"),
        dict(num_local_experts=EXPERTS, num_experts_per_tok=2),
        WEIGHT,
    ),
    "gemma 4": (
        RouterSpec(EXPERTS, 4, normalise=True, input_norm_epsilon=EPSILON, expert_scale=True),
        ("gemma4", "Gemma4TextConfig", "Gemma4TextRouter"),
        dict(num_experts=EXPERTS, top_k_experts=4, rms_norm_eps=EPSILON),
        {"weight": "proj.weight", "scale": "scale", "expert_scale": "per_expert_scale"},
    ),
}


def template(spec, dtype="float32"):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, dtype)
    )


def draw_weights(spec, seed=0):
    """Biases and scales far from their initial values."""
    draw = np.random.default_rng(seed).normal
    shapes = jax.tree.map(lambda leaf: leaf.shape, template(spec).weights)
    return {
        name: (draw(size=shape) * 0.5 + (1 if "scale" in name else 0)).astype(np.float32)
        for name, shape in shapes.items()
    }


def values(seed=1, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=(BATCH, LENGTH, EMBED_DIM))).astype(
        np.float32
    )


def run_hf(family, weights, x, cotangent):
    """Indices and weights [B, S, k] of transformers, sorted by index, and the gradients of
    sum(weights · cotangent).
    """
    spec, (model, config_class, router_class), settings, names = FAMILIES[family]
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    router = getattr(modeling, router_class)(
        getattr(configuration, config_class)(hidden_size=EMBED_DIM, **settings)
    )
    tensors = dict(router.named_parameters()) | dict(router.named_buffers())
    with torch.no_grad():
        for name, hf_name in names.items():
            tensors[hf_name].copy_(torch.tensor(weights[name].T))
    x = torch.tensor(x.reshape(-1, EMBED_DIM), requires_grad=True)
    if model == "llama4":
        scores, _ = router(x)
        topk_weights, indices = torch.topk(scores, spec.topk, dim=-1)
    else:
        _, topk_weights, indices = router(x)
    order = torch.argsort(indices, dim=-1)
    indices, topk_weights = indices.gather(1, order), topk_weights.gather(1, order)
    (topk_weights * torch.tensor(cotangent.reshape(-1, spec.topk))).sum().backward()
    gradients = {name: tensors[hf_name].grad for name, hf_name in names.items()}
    gradients = {
        name: np.zeros(EXPERTS) if g is None else g.numpy().T for name, g in gradients.items()
    }
    arrays = (
        array.detach().numpy().reshape(BATCH, LENGTH, -1)
        for array in (indices, topk_weights, x.grad)
    )
    return *arrays, gradients


@pytest.mark.parametrize("family", FAMILIES)
def test_selection_and_gradients_match_transformers(family):
    spec = FAMILIES[family][0]
    weights, x = draw_weights(spec), values()
    cotangent = np.random.default_rng(2).normal(size=(BATCH, LENGTH, spec.topk)).astype(np.float32)

    def loss(weights, x):
        routing = template(spec).bind(weights)(x)
        order = jnp.argsort(routing.indices, axis=-1)
        topk_weights = jnp.take_along_axis(routing.weights, order, axis=-1)
        return jnp.sum(topk_weights * cotangent), (
            jnp.take_along_axis(routing.indices, order, axis=-1),
            topk_weights,
            routing,
        )

    loss_and_gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)
    (_, (indices, topk_weights, routing)), (dweights, dx) = loss_and_gradients(weights, x)
    hf_indices, hf_topk_weights, hf_dx, hf_dweights = run_hf(family, weights, x, cotangent)
    np.testing.assert_array_equal(indices, hf_indices)
    np.testing.assert_allclose(topk_weights, hf_topk_weights, atol=1e-6)
    assert routing.weights.dtype == routing.probabilities.dtype == jnp.float32
    assert routing.indices.dtype == jnp.int32
    assert dweights.keys() == hf_dweights.keys()
    for name, gradient in dweights.items():
        np.testing.assert_allclose(gradient, hf_dweights[name], atol=2e-5, err_msg=name)
    np.testing.assert_allclose(dx, hf_dx, atol=1e-5)


def test_probabilities():
    """The softmax over all experts, or normalised sigmoids; they sum to one."""
    x, weight = values(), draw_weights(RouterSpec(EXPERTS, 2))["weight"]
    logits = (x @ weight).astype(np.float64)
    expected = {
        "softmax": np.exp(logits),
        "softmax_of_topk": np.exp(logits),
        "sigmoid": 1 / (1 + np.exp(-logits)),
    }
    for score, unnormalised in expected.items():
        routing = template(RouterSpec(EXPERTS, 2, score=score, scaling=3.0)).bind(
            {"weight": weight}
        )(x)
        np.testing.assert_allclose(
            routing.probabilities,
            unnormalised / unnormalised.sum(axis=-1, keepdims=True),
            rtol=1e-4,
            atol=1e-7,
        )


def test_saturated_scores_are_ranked_by_logits():
    """Sigmoids of 40 and 60 are both 1.0 in float32."""
    weight = np.zeros((EMBED_DIM, EXPERTS), np.float32)
    weight[0, :3] = 40, 60, 50
    x = np.zeros((1, 1, EMBED_DIM), np.float32)
    x[..., 0] = 1
    routing = template(RouterSpec(EXPERTS, 1, score="sigmoid")).bind({"weight": weight})(x)
    assert routing.indices.item() == 1
    assert routing.weights.item() == 1.0


def test_normalised_sigmoids_of_zero_are_zero():
    spec = RouterSpec(EXPERTS, 2, score="sigmoid", normalise=True)
    weight = np.full((EMBED_DIM, EXPERTS), -100, np.float32)
    routing = template(spec).bind({"weight": weight})(np.ones((1, 1, EMBED_DIM), np.float32))
    np.testing.assert_array_equal(routing.weights, 0)


def test_float32_logits():
    """From bfloat16 inputs: float32 logits are exact, others are rounded to bfloat16."""
    x = jnp.asarray(values(), jnp.bfloat16)
    weights = draw_weights(RouterSpec(EXPERTS, 2))
    exact = np.asarray(x, np.float64) @ weights["weight"]
    exact = np.exp(exact) / np.exp(exact).sum(axis=-1, keepdims=True)
    errors = {}
    for float32 in (True, False):
        routing = template(RouterSpec(EXPERTS, 2, float32=float32), "bfloat16").bind(weights)(x)
        assert routing.weights.dtype == jnp.float32
        errors[float32] = np.abs(np.asarray(routing.probabilities, np.float64) / exact - 1).max()
    assert errors[True] < 1e-5
    assert 1e-3 < errors[False] < 0.2


@pytest.mark.parametrize(
    ("experts", "topk", "length"), [(8, 2, 16), (12, 5, 31), (7, 7, 3), (1, 1, 4), (128, 8, 50)]
)
def test_random_selection_is_balanced(experts, topk, length):
    indices = np.asarray(balanced_selection((3, length), experts, topk))
    assert indices.shape == (3, length, topk)
    assert all(len(set(row)) == topk for row in indices.reshape(-1, topk))
    for part in (indices, *indices):
        counts = np.bincount(part.reshape(-1), minlength=experts)
        assert len(counts) == experts
        assert counts.max() - counts.min() <= 1


def test_random_selection_replaces_the_top_experts():
    """The weights are still the scores of the selected experts."""
    spec = RouterSpec(EXPERTS, 3, normalise=True, random=True)
    x, weights = values(), draw_weights(spec)
    routing = template(spec).bind(weights)(x)
    np.testing.assert_array_equal(routing.indices, balanced_selection((BATCH, LENGTH), EXPERTS, 3))
    scores = np.take_along_axis(np.exp(x @ weights["weight"]), np.asarray(routing.indices), axis=-1)
    np.testing.assert_allclose(
        routing.weights, scores / scores.sum(axis=-1, keepdims=True), rtol=1e-4
    )


def test_axes_and_initial_values():
    spec = RouterSpec(EXPERTS, 2, bias="selection", input_norm_epsilon=1e-6, expert_scale=True)
    assert template(spec).axes == {
        "weight": ("embed", "exp"),
        "bias": ("exp",),
        "scale": ("norm",),
        "expert_scale": ("exp",),
    }
    router = spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, "float32")
    np.testing.assert_array_equal(router.bias[...], np.zeros(EXPERTS))
    np.testing.assert_array_equal(router.scale[...], np.ones(EMBED_DIM))
    np.testing.assert_array_equal(router.expert_scale[...], np.ones(EXPERTS))


REAL = np.ones((BATCH, LENGTH), bool)
PADDED = REAL & (np.arange(LENGTH) < np.array([[20], [33]]))
EMPTY = REAL & (np.arange(LENGTH) < np.array([[0], [7]]))
MASKS = {"all": (None, REAL), "padded": (PADDED, PADDED), "an empty row": (EMPTY, EMPTY)}


@pytest.mark.parametrize("masks", MASKS.values(), ids=list(MASKS))
def test_load_balance_loss_matches_transformers(masks):
    """Mixtral's loss, one sequence at a time; counts by a numpy loop."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    real, mask = masks
    spec = RouterSpec(EXPERTS, 3)
    weights, x = draw_weights(spec), values()
    routing = template(spec).bind(weights)(x)
    losses, counts = [], np.zeros((BATCH, EXPERTS))
    for row in range(BATCH):
        logits = torch.tensor(x[row][mask[row]] @ weights["weight"])
        if len(logits):
            losses.append(load_balancing_loss_func((logits,), EXPERTS, 3).item())
        for token in np.flatnonzero(mask[row]):
            counts[row][np.asarray(routing.indices)[row, token]] += 1
    np.testing.assert_allclose(load_balance_loss(routing, real), np.mean(losses), rtol=1e-5)
    np.testing.assert_array_equal(expert_counts(routing.indices, EXPERTS, real), counts)


def test_load_balance_loss_of_extremes():
    """An even load gives k; all tokens at one expert, with probability one, give X."""
    even = Routing(
        balanced_selection((BATCH, EXPERTS), EXPERTS, 3),
        jnp.ones(()),
        jnp.full((BATCH, EXPERTS, EXPERTS), 1 / EXPERTS),
    )
    np.testing.assert_allclose(load_balance_loss(even, None), 3, rtol=1e-6)
    skewed = Routing(
        jnp.full((BATCH, LENGTH, 1), 4),
        jnp.ones(()),
        jnp.broadcast_to(jnp.eye(EXPERTS)[4], (BATCH, LENGTH, EXPERTS)),
    )
    np.testing.assert_allclose(load_balance_loss(skewed, None), EXPERTS, rtol=1e-6)
    padding_loss = load_balance_loss(even, jnp.zeros((BATCH, EXPERTS), bool))
    assert padding_loss == 0


def test_updated_bias():
    """Of two layers: it increases below the mean load, decreases above it, and stays at it."""
    bias = jnp.array([[0.5, -0.25, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    load = jnp.array([[1.0, 9.0, 4.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    expected = [[0.51, -0.26, 0.0, 1.01], [0, 0, 0, 0]]
    np.testing.assert_allclose(updated_bias(bias, load, 0.01), expected, atol=1e-7)


def test_selection_bias_of_bfloat16_weights_is_float32():
    """800 steps of 0.001 are 0.8; a bias in bfloat16 stops at 0.5. A bias of logits is an ordinary
    weight.
    """
    for kind, dtype in (("selection", jnp.float32), ("logits", jnp.bfloat16)):
        spec = RouterSpec(EXPERTS, 2, score="sigmoid", bias=kind)
        router = spec.build(Initializer(hash_rng.key_from_seed(0), "bfloat16"), 8, "bfloat16")
        assert router.bias[...].dtype == dtype
        assert router.weight[...].dtype == jnp.bfloat16
        if kind == "selection":
            load = jnp.arange(EXPERTS, dtype=jnp.float32)
            bias, step = (
                router.bias[...],
                jax.jit(lambda bias, load: updated_bias(bias, load, 0.001)),
            )
            for _ in range(800):
                bias = step(bias, load)
            expected = 0.8 * np.sign((EXPERTS - 1) / 2 - np.arange(EXPERTS))
            np.testing.assert_allclose(bias, expected, rtol=1e-4)
