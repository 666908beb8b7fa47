"""The mixture of experts against the blocks of transformers, and each method against a numpy loop
over tokens and choices.
"""

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.common import hash_rng
from maxtext.kernels import grouped_matmul
from maxtext.layers.context import BuildContext
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.moe import expert_capacity
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import MlpSpec, MoeSpec, RouterSpec

BATCH, LENGTH, EMBED_DIM, EXPERTS, HIDDEN_DIM = 2, 9, 8, 6, 10
ROUTER = RouterSpec(EXPERTS, 2, normalise=True)
PLAIN = MoeSpec(ROUTER, HIDDEN_DIM)
LIMITED = replace(PLAIN, activations=("sigmoid", "linear"), limit=0.8, bias=True)
SPECS = {
    "limit and biases": LIMITED,
    "weighed input": replace(
        PLAIN,
        apply_router_weight_on_input=True,
        bias=True,
        activations=("gelu",),
        float32=True,
        router=RouterSpec(EXPERTS, 1),
    ),
    "shared": replace(
        PLAIN,
        shared=MlpSpec(7),
        shared_gate=True,
        router=replace(ROUTER, bias="selection", topk=4),
    ),
}
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0, 0, 0], [0, 1, 1, 1, 0, 2, 2, 2, 2]], np.int32)


def template(spec, dtype="float32"):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, dtype)
    )


def draw_weights(spec, seed=0):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(
        lambda leaf: draw(size=leaf.shape).astype(np.float32) * 0.7, template(spec).weights
    )


def values(*shape, seed=1):
    return (
        np.random.default_rng(seed)
        .normal(size=shape or (BATCH, LENGTH, EMBED_DIM))
        .astype(np.float32)
    )


def inputs(segments=None):
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    return LayerInputs(positions, None if segments is None else jnp.asarray(segments))


def apply_layer(spec, weights, x, segments=None, dtype="float32", router_input=None):
    return template(spec, dtype).bind(weights)(x, inputs(segments), router_input)


def run(spec, weights, x, segments=None, dtype="float32", router_input=None):
    """Jitted: op by op, a layer is many small programs."""
    program = jax.jit(
        lambda weights, x, router_input: apply_layer(
            spec, weights, x, segments, dtype, router_input
        )
    )
    return program(weights, x, router_input)


def assert_close(actual, expected, tolerance=2e-5, **options):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, **options),
        actual,
        expected,
    )


# Numpy, token by token and choice by choice.


def activated(name, x):
    return {"silu": x / (1 + np.exp(-x)), "sigmoid": 1 / (1 + np.exp(-x)), "linear": x}[name]


def reference(spec, weights, x, accepts):
    """The sum over the choices for which accepts(row, token, expert) is true, called in the order
    of rows, tokens and choices.

    For a softmax router, normalised, and gated experts.
    """
    x, weights = x.astype(np.float64), jax.tree.map(lambda leaf: leaf.astype(np.float64), weights)
    experts, y = weights["experts"], np.zeros_like(x)
    for row in range(len(x)):
        for token, value in enumerate(x[row]):
            logits = value @ weights["router"]["weight"]
            selected = np.argsort(-logits, kind="stable")[: spec.router.topk]
            router_weights = np.exp(logits[selected]) / np.exp(logits[selected]).sum()
            for expert, weight in zip(selected, router_weights, strict=True):
                if accepts(row, token, expert):
                    gate, up = (
                        value @ experts["wi_0"]["weight"][expert],
                        value @ experts["wi_1"]["weight"][expert],
                    )
                    y[row, token] += (
                        weight * (activated("silu", gate) * up) @ experts["wo"]["weight"][expert]
                    )
    return y


def test_sparse_and_dense_match_numpy():
    weights, x = draw_weights(PLAIN), values()
    expected = reference(PLAIN, weights, x, lambda *_: True)
    for method in ("sparse", "dense"):
        y, aux = run(replace(PLAIN, method=method), weights, x)
        assert_close(y, expected)
        assert aux == {}


# Three methods, the same sum.


def value_and_gradients(spec, segments):
    def loss(weights, x):
        y, _ = apply_layer(spec, weights, x, segments)
        return jnp.sum(y * values(seed=2)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        draw_weights(spec), values()
    )
    return y, gradients


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_methods_agree(spec):
    """Outputs and gradients of all weights and of the input, with a capacity for all tokens."""
    expected = value_and_gradients(replace(spec, method="dense"), SEGMENTS)
    assert_close(value_and_gradients(spec, SEGMENTS), expected)
    assert_close(
        value_and_gradients(replace(spec, method="dropping", capacity_factor=9.0), SEGMENTS),
        expected,
    )
    gradients = expected[1][0]
    bias = gradients["router"].pop("bias", None)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradients))
    assert bias is None or not bias.any()  # it only selects


def test_sparse_options_do_not_change_results():
    expected = value_and_gradients(PLAIN, SEGMENTS)
    for options in ({"custom_sort_vjp": False}, {"buffer_factor": 3.0}):
        assert_close(value_and_gradients(replace(PLAIN, **options), SEGMENTS), expected)


@jax.custom_vjp
def nan_padded_matmul(x, weights, group_sizes):
    """As a kernel that writes no rows after the last group, neither of the output nor of dx."""
    in_group = jnp.arange(len(x))[:, None] < group_sizes.sum()
    return jnp.where(in_group, grouped_matmul.grouped_matmul(x, weights, group_sizes), jnp.nan)


def nan_padded_backward(residuals, dy):
    x, weights, group_sizes = residuals
    in_group = jnp.arange(len(x))[:, None] < group_sizes.sum()
    _, vjp = jax.vjp(lambda x, w: grouped_matmul.grouped_matmul(x, w, group_sizes), x, weights)
    dx, dw = vjp(dy)
    return jnp.where(in_group, dx, jnp.nan), dw, grouped_matmul.zero_cotangent(group_sizes)


nan_padded_matmul.defvjp(lambda *inputs: (nan_padded_matmul(*inputs), inputs), nan_padded_backward)


@pytest.mark.parametrize("spec", [PLAIN, replace(PLAIN, custom_sort_vjp=False), *SPECS.values()])
def test_sparse_reads_no_rows_after_the_last_expert(spec, monkeypatch):
    expected = value_and_gradients(spec, SEGMENTS)
    monkeypatch.setattr(
        "maxtext.layers.sorted_experts.grouped_matmul",
        SimpleNamespace(
            **{
                **vars(grouped_matmul),
                "grouped_matmul": lambda *arguments: nan_padded_matmul(*arguments[:3]),
            }
        ),
    )
    assert_close(value_and_gradients(spec, SEGMENTS), expected)


def test_grouped_matmul_gets_the_platform(monkeypatch):
    platforms = []

    def run_anywhere(x, weights, group_sizes, platform, real=grouped_matmul.grouped_matmul):
        platforms.append(platform)
        return real(x, weights, group_sizes)

    monkeypatch.setattr(grouped_matmul, "grouped_matmul", run_anywhere)
    initializer = Initializer(None, "float32", context=BuildContext("gpu"))
    layer = Template.of(lambda: PLAIN.build(initializer, EMBED_DIM, "float32"))
    positions = jnp.zeros(values().shape[:2], jnp.int32)
    jax.eval_shape(
        lambda weights, x: layer.bind(weights)(x, LayerInputs(positions))[0],
        draw_weights(PLAIN),
        values(),
    )
    assert platforms == ["gpu"] * 3


def test_sparse_handles_skewed_loads():
    """All tokens at the same two experts, the others idle."""
    weights = draw_weights(PLAIN)
    weights["router"]["weight"] *= 1e-3
    weights["router"]["weight"][:, (1, 4)] += 5
    x = np.abs(values())
    spec = replace(PLAIN, report_load=True)
    y, aux = run(spec, weights, x)
    np.testing.assert_array_equal(aux["expert_load"], [0, BATCH * LENGTH, 0, 0, BATCH * LENGTH, 0])
    assert_close(y, reference(spec, weights, x, lambda *_: True))


# Dropping.


class Capacity:
    """Accepts up to `capacity` tokens of a sequence for each expert."""

    def __init__(self, capacity, segments=None):
        self.capacity = capacity
        self.segments = segments
        self.counts = {}
        self.dropped = 0

    def __call__(self, row, token, expert):
        if self.segments is not None and self.segments[row, token] == 0:
            return False
        count = self.counts[row, expert] = self.counts.get((row, expert), 0) + 1
        self.dropped += count > self.capacity
        return count <= self.capacity


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["full", "padded"])
def test_dropping_matches_numpy(factor, segments):
    spec = replace(PLAIN, method="dropping", capacity_factor=factor)
    weights, x = draw_weights(spec), values()
    capacity = Capacity(int(max(math.ceil(LENGTH * 2 / EXPERTS) * factor, factor)), segments)
    expected = reference(spec, weights, x, capacity)
    assert capacity.dropped > 0
    assert_close(run(spec, weights, x, segments)[0], expected)


@pytest.mark.parametrize(
    ("length", "topk", "experts", "factor", "capacity"),
    [
        (9, 2, 6, 1.0, 3),
        (10, 2, 6, 1.0, 4),
        (10, 2, 6, 1.3, 5),
        (2, 1, 8, 1.5, 1),
        (2, 1, 8, 4.0, 4),
    ],
)
def test_expert_capacity(length, topk, experts, factor, capacity):
    assert expert_capacity(length, topk, experts, factor) == capacity


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["full", "padded"])
@pytest.mark.parametrize("factor", [0.9, 0.5, 0.01])
def test_buffer_drops_the_last_experts(factor, segments):
    """The buffer is filled expert by expert over the batch, in the order of tokens."""
    spec = replace(PLAIN, buffer_factor=factor)
    weights, x = draw_weights(spec), values()
    queue = []

    def record(row, token, expert):
        if segments is None or segments[row, token]:
            queue.append((expert, row, token))
        return False

    reference(spec, weights, x, record)
    rows = max(1, int(BATCH * LENGTH * 2 * factor))
    accepted = set(sorted(queue)[:rows])
    assert (len(accepted) < len(queue)) == (
        segments is None or factor < 0.9
    )  # a third of the batch is padding
    expected = reference(
        spec, weights, x, lambda row, token, expert: (expert, row, token) in accepted
    )
    assert_close(run(spec, weights, x, segments)[0], expected)


# Padding, aux outputs, router inputs and dtypes.


@pytest.mark.parametrize("method", ["sparse", "dense", "dropping"])
def test_padding_is_ignored(method):
    """Routed experts add nothing to padding, and its values do not affect other tokens."""
    spec = replace(LIMITED, method=method, balance_weight=0.5, report_load=True)
    weights, x = draw_weights(spec), values()
    y, aux = run(spec, weights, x, SEGMENTS)
    np.testing.assert_array_equal(np.asarray(y)[SEGMENTS == 0], 0)
    assert np.abs(np.asarray(y)[SEGMENTS > 0]).min() > 0 or method == "dropping"
    changed = np.where((SEGMENTS == 0)[..., None], values(seed=7), x)
    assert_close(run(spec, weights, changed, SEGMENTS), (y, aux), 0)
    assert aux["expert_load"].sum() == 2 * (SEGMENTS > 0).sum()


def test_aux_outputs_match_numpy():
    """The loss of Switch and Mixtral, one sequence at a time."""
    spec = replace(PLAIN, balance_weight=0.3, report_load=True)
    weights, x = draw_weights(spec), values()
    _, aux = run(spec, weights, x, SEGMENTS)
    losses, load = [], np.zeros(EXPERTS)
    for row, real in zip(x, SEGMENTS > 0, strict=True):
        logits = row[real] @ weights["router"]["weight"]
        probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        counts = np.bincount(np.argsort(-logits, axis=-1)[:, :2].reshape(-1), minlength=EXPERTS)
        losses.append(np.mean(counts / real.sum() * probabilities.mean(axis=0)))
        load += counts
    assert aux.keys() == {"load_balance_loss", "expert_load"}
    np.testing.assert_allclose(
        aux["load_balance_loss"], 0.3 * EXPERTS**2 * np.mean(losses), rtol=1e-5
    )
    np.testing.assert_array_equal(aux["expert_load"], load)
    assert {leaf.dtype for leaf in aux.values()} == {jnp.dtype("float32")}


def test_router_input():
    spec = replace(PLAIN, report_load=True)
    weights, x, router_input = draw_weights(spec), values(), values(seed=3)
    assert_close(run(spec, weights, x, router_input=x), run(spec, weights, x), 0)
    y, aux = run(spec, weights, x, router_input=router_input)
    _, expected_aux = run(spec, weights, router_input)
    np.testing.assert_array_equal(aux["expert_load"], expected_aux["expert_load"])
    weights["router"]["weight"][...] = 0  # ties go to the first experts, with equal weights
    uniform = run(spec, weights, x)[0]
    assert np.abs(y - uniform).max() > 0.1
    assert_close(run(spec, weights, x, router_input=router_input)[0], uniform, 0)


@pytest.mark.slow
def test_bfloat16():
    """Results are assert_close to those in float32, and closer with a float32 sum."""
    weights, x = draw_weights(PLAIN), np.asarray(jnp.asarray(values(), jnp.bfloat16), np.float32)
    router = replace(ROUTER, float32=True)  # the same selection
    expected = reference(PLAIN, weights, x, lambda *_: True)
    errors = {}
    for method in ("sparse", "dense", "dropping"):
        for float32_sum in (True, False):
            spec = replace(
                PLAIN, method=method, capacity_factor=9.0, router=router, float32_sum=float32_sum
            )
            y, _ = run(spec, weights, jnp.asarray(x, jnp.bfloat16), dtype="bfloat16")
            assert y.dtype == jnp.bfloat16
            errors[method, float32_sum] = np.abs(np.asarray(y, np.float64) - expected).mean()
            assert errors[method, float32_sum] < 0.02 * np.abs(expected).mean()
    assert errors["sparse", True] < errors["sparse", False]


def test_random_routing_is_balanced():
    spec = replace(PLAIN, router=replace(ROUTER, random=True), report_load=True, method="dropping")
    weights, x = draw_weights(spec), values()
    y, aux = run(spec, weights, x)
    np.testing.assert_array_equal(
        aux["expert_load"], np.full(EXPERTS, BATCH * LENGTH * 2 / EXPERTS)
    )
    assert_close(
        y, run(replace(spec, method="dense"), weights, x)[0]
    )  # a capacity of 1 drops nothing


def test_axes_and_shapes_of_weights():
    spec = replace(PLAIN, bias=True, shared=MlpSpec(7), shared_gate=True)
    up = {"weight": ("exp", "embed_moe", "mlp_moe"), "bias": ("exp", "mlp_moe")}
    down = {"weight": ("exp", "mlp_moe", "embed_moe"), "bias": ("exp", "embed_moe")}
    axes = template(spec).axes
    assert axes["experts"] == {"wi_0": up, "wi_1": up, "wo": down}
    assert axes["router"] == {"weight": ("embed", "exp")}
    assert axes["shared_gate"] == {"weight": ("embed", None)}
    assert set(axes["shared"]) == {"wi_0", "wi_1", "wo"}
    shapes = jax.tree.map(lambda leaf: leaf.shape, template(spec).weights["experts"])
    up, down = (EXPERTS, EMBED_DIM, HIDDEN_DIM), (EXPERTS, HIDDEN_DIM, EMBED_DIM)
    assert {name: layer["weight"] for name, layer in shapes.items()} == {
        "wi_0": up,
        "wi_1": up,
        "wo": down,
    }
    assert shapes["wi_0"]["bias"] == (EXPERTS, HIDDEN_DIM)
    assert shapes["wo"]["bias"] == (EXPERTS, EMBED_DIM)


def test_initial_experts_differ_and_have_the_variance_of_their_fan_in():
    built = MoeSpec(RouterSpec(16, 2), 40).build(
        Initializer(hash_rng.key_from_seed(0), "float32"), 160, "float32"
    )
    for layer, fan_in in (
        (built.experts.wi_0, 160),
        (built.experts.wi_1, 160),
        (built.experts.wo, 40),
    ):
        deviations = np.std(layer.weight[...], axis=(1, 2)) * math.sqrt(fan_in)
        np.testing.assert_allclose(deviations, 1, atol=0.05)
        assert np.abs(layer.weight[0] - layer.weight[1]).max() > 0.1 / math.sqrt(fan_in)
    assert np.abs(built.experts.wi_0.weight[...] - built.experts.wi_1.weight[...]).max() > 0.01


@pytest.mark.parametrize("method", ["sparse", "dense", "dropping"])
def test_intermediates_have_remat_names(method):
    spec = replace(PLAIN, method=method)
    program = str(
        jax.make_jaxpr(lambda weights: apply_layer(spec, weights, values())[0])(draw_weights(spec))
    )
    for name in ("mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"):
        assert f"name={name}]" in program


# Blocks of transformers.

TOPK = 2
SIGMOID = RouterSpec(
    EXPERTS,
    TOPK,
    score="sigmoid",
    normalise=True,
    scaling=2.5,
    bias="selection",
    groups=3,
    topk_groups=2,
)
GATE = {"router.weight": "gate.weight"}
UNGATED = {
    "shared.wi_0.weight": "gate_proj.weight",
    "shared.wi_1.weight": "up_proj.weight",
    "shared.wo.weight": "down_proj.weight",
}


def shared_weights(prefix):
    return {name: f"{prefix}.{hf_name}" for name, hf_name in UNGATED.items()}


# model: (spec, config class, block class, config, HF names of our weights)
BLOCKS = {
    "mixtral": (
        PLAIN,
        "MixtralConfig",
        "MixtralSparseMoeBlock",
        dict(num_local_experts=EXPERTS, num_experts_per_tok=TOPK, intermediate_size=HIDDEN_DIM),
        GATE,
    ),
    "qwen3_moe": (
        replace(PLAIN, router=RouterSpec(EXPERTS, TOPK)),
        "Qwen3MoeConfig",
        "Qwen3MoeSparseMoeBlock",
        dict(
            num_experts=EXPERTS,
            num_experts_per_tok=TOPK,
            moe_intermediate_size=HIDDEN_DIM,
            norm_topk_prob=False,
        ),
        GATE,
    ),
    "qwen3_next": (
        replace(PLAIN, shared=MlpSpec(7), shared_gate=True),
        "Qwen3NextConfig",
        "Qwen3NextSparseMoeBlock",
        dict(
            num_experts=EXPERTS,
            num_experts_per_tok=TOPK,
            moe_intermediate_size=HIDDEN_DIM,
            norm_topk_prob=True,
            shared_expert_intermediate_size=7,
        ),
        GATE
        | {"shared_gate.weight": "shared_expert_gate.weight"}
        | shared_weights("shared_expert"),
    ),
    "deepseek_v3": (
        replace(PLAIN, shared=MlpSpec(2 * HIDDEN_DIM), router=SIGMOID),
        "DeepseekV3Config",
        "DeepseekV3MoE",
        dict(
            n_routed_experts=EXPERTS,
            num_experts_per_tok=TOPK,
            moe_intermediate_size=HIDDEN_DIM,
            n_shared_experts=2,
            n_group=3,
            topk_group=2,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
        ),
        GATE | {"router.bias": "gate.e_score_correction_bias"} | shared_weights("shared_experts"),
    ),
    "gpt_oss": (
        replace(
            PLAIN,
            activations=("sigmoid", "linear"),
            limit=0.9,
            bias=True,
            router=RouterSpec(EXPERTS, TOPK, score="softmax_of_topk", bias="logits"),
        ),
        "GptOssConfig",
        "GptOssMLP",
        dict(
            num_local_experts=EXPERTS,
            num_experts_per_tok=TOPK,
            intermediate_size=HIDDEN_DIM,
            swiglu_limit=0.9,
        ),
        {
            "router.weight": "router.weight",
            "router.bias": "router.bias",
            "experts.wo.bias": "experts.down_proj_bias",
        },
    ),
    "llama4": (
        replace(
            PLAIN,
            apply_router_weight_on_input=True,
            shared=MlpSpec(HIDDEN_DIM),
            router=RouterSpec(EXPERTS, TOPK, score="sigmoid"),
        ),
        "Llama4TextConfig",
        "Llama4TextMoe",
        dict(num_local_experts=EXPERTS, num_experts_per_tok=TOPK, intermediate_size=HIDDEN_DIM),
        {"router.weight": "router.weight"} | shared_weights("shared_expert"),
    ),
}


def leaf(tree, path):
    for name in path.split("."):
        tree = tree[name]
    return tree


def run_hf(model, weights, x):
    """The block's output, and dx of sum(output · values(seed=2))."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    _, config_class, block_class, settings, names = BLOCKS[model]
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    block = getattr(modeling, block_class)(
        getattr(configuration, config_class)(hidden_size=EMBED_DIM, **settings)
    )
    tensors = dict(block.named_parameters()) | dict(block.named_buffers())
    arrays = {hf_name: leaf(weights, name) for name, hf_name in names.items()}
    arrays = {name: array if name.endswith("_bias") else array.T for name, array in arrays.items()}
    experts = weights["experts"]
    gate, up, down = (experts[name]["weight"] for name in ("wi_0", "wi_1", "wo"))
    if model == "gpt_oss":  # gate and up are interleaved
        arrays["experts.gate_up_proj"] = np.stack([gate, up], axis=-1).reshape(
            EXPERTS, EMBED_DIM, 2 * HIDDEN_DIM
        )
        biases = [experts[name]["bias"] for name in ("wi_0", "wi_1")]
        arrays["experts.gate_up_proj_bias"] = np.stack(biases, axis=-1).reshape(
            EXPERTS, 2 * HIDDEN_DIM
        )
        arrays["experts.down_proj"] = down
    else:
        gate_up = np.concatenate([gate, up], axis=-1)
        if model != "llama4":
            gate_up, down = gate_up.transpose(0, 2, 1), down.transpose(0, 2, 1)
        arrays["experts.gate_up_proj"] = gate_up
        arrays["experts.down_proj"] = down
    assert arrays.keys() == tensors.keys()
    with torch.no_grad():
        for name, array in arrays.items():
            tensors[name].copy_(torch.tensor(array))
    x = torch.tensor(x, requires_grad=True)
    y = block(x)
    y = (y[0] if isinstance(y, tuple) else y).reshape(x.shape)
    (y * torch.tensor(values(seed=2))).sum().backward()
    return y.detach().numpy(), x.grad.numpy()


@pytest.mark.parametrize("model", BLOCKS)
def test_output_and_dx_match_transformers(model):
    spec = BLOCKS[model][0]
    weights, x = draw_weights(spec), values()
    expected = run_hf(model, weights, x)
    y, (_, dx) = value_and_gradients(spec, None)
    assert_close((y, dx), expected)
