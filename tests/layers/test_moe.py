"""The mixture of experts against transformers' blocks, and each method against a numpy loop over
tokens and choices.
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
from maxtext.layers.mlp import MlpSpec
from maxtext.layers.moe import MoeSpec, expert_capacity
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.routers import RouterSpec

pytestmark = pytest.mark.usefixtures("fast_compilation")

BATCH, LENGTH, SIZE, EXPERTS, WIDTH = 2, 9, 8, 6, 10
ROUTER = RouterSpec(EXPERTS, 2, normalise=True)
PLAIN = MoeSpec(ROUTER, WIDTH)
LIMITED = replace(PLAIN, activations=("sigmoid", "linear"), limit=0.8, bias=True)
SPECS = {
    "limit and biases": LIMITED,
    "weighed input": replace(
        PLAIN,
        weigh_input=True,
        bias=True,
        activations=("gelu",),
        float32=True,
        router=RouterSpec(EXPERTS, 1),
    ),
    "shared": replace(
        PLAIN,
        shared=MlpSpec(7),
        shared_gate=True,
        router=replace(ROUTER, bias="selection", chosen=4),
    ),
}
SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0, 0, 0], [0, 1, 1, 1, 0, 2, 2, 2, 2]], np.int32)


def template(spec, dtype="float32"):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), SIZE, dtype)
    )


def draw_weights(spec, seed=0):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(
        lambda leaf: draw(size=leaf.shape).astype(np.float32) * 0.7, template(spec).weights
    )


def values(*shape, seed=1):
    return (
        np.random.default_rng(seed).normal(size=shape or (BATCH, LENGTH, SIZE)).astype(np.float32)
    )


def inputs(segments=None):
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (BATCH, LENGTH))
    return LayerInputs(positions, None if segments is None else jnp.asarray(segments))


def applied(spec, weights, x, segments=None, dtype="float32", router_input=None):
    return template(spec, dtype).bind(weights)(x, inputs(segments), router_input)


def run(spec, weights, x, segments=None, dtype="float32", router_input=None):
    """In one program: the operations of one layer alone are many small ones."""
    program = jax.jit(
        lambda weights, x, router_input: applied(spec, weights, x, segments, dtype, router_input)
    )
    return program(weights, x, router_input)


def close(ours, theirs, tolerance=2e-5, **options):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance, **options),
        ours,
        theirs,
    )


# Numpy, one token and one choice at a time.


def activated(name, x):
    return {"silu": x / (1 + np.exp(-x)), "sigmoid": 1 / (1 + np.exp(-x)), "linear": x}[name]


def by_hand(spec, weights, x, kept):
    """Sum over the choices for which kept(row, token, expert) is true, in the order of rows, tokens
    and choices.

    For a softmax router, normalised, and gated experts.
    """
    x, weights = x.astype(np.float64), jax.tree.map(lambda leaf: leaf.astype(np.float64), weights)
    experts, y = weights["experts"], np.zeros_like(x)
    for row in range(len(x)):
        for token, value in enumerate(x[row]):
            logits = value @ weights["router"]["weight"]
            chosen = np.argsort(-logits, kind="stable")[: spec.router.chosen]
            share = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
            for expert, weight in zip(chosen, share, strict=True):
                if kept(row, token, expert):
                    gate, up = (
                        value @ experts["wi_0"]["weight"][expert],
                        value @ experts["wi_1"]["weight"][expert],
                    )
                    y[row, token] += (
                        weight * (activated("silu", gate) * up) @ experts["wo"]["weight"][expert]
                    )
    return y


def test_numpy():
    weights, x = draw_weights(PLAIN), values()
    expected = by_hand(PLAIN, weights, x, lambda *_: True)
    for method in ("sparse", "dense"):
        y, aux = run(replace(PLAIN, method=method), weights, x)
        close(y, expected)
        assert aux == {}


# Three methods, one sum.


def value_and_gradients(spec, segments):
    def loss(weights, x):
        y, _ = applied(spec, weights, x, segments)
        return jnp.sum(y * values(seed=2)), y

    (_, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(
        draw_weights(spec), values()
    )
    return y, gradients


@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_methods_agree(spec):
    """Values and gradients of all weights and of the input; where there is room for all, nothing is
    dropped.
    """
    expected = value_and_gradients(replace(spec, method="dense"), SEGMENTS)
    close(value_and_gradients(spec, SEGMENTS), expected)
    close(
        value_and_gradients(replace(spec, method="dropping", capacity_factor=9.0), SEGMENTS),
        expected,
    )
    gradients = expected[1][0]
    bias = gradients["router"].pop("bias", None)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradients))
    assert bias is None or not bias.any()  # it selects, and nothing else


def test_sparse_options_that_change_nothing():
    expected = value_and_gradients(PLAIN, SEGMENTS)
    for options in ({"custom_sort_vjp": False}, {"buffer_factor": 3.0}):
        close(value_and_gradients(replace(PLAIN, **options), SEGMENTS), expected)


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
    close(value_and_gradients(spec, SEGMENTS), expected)


def test_sparse_says_for_which_device_products_are(monkeypatch):
    said = []

    def run_anywhere(x, weights, group_sizes, platform, real=grouped_matmul.grouped_matmul):
        said.append(platform)
        return real(x, weights, group_sizes)

    monkeypatch.setattr(grouped_matmul, "grouped_matmul", run_anywhere)
    initializer = Initializer(None, "float32", context=BuildContext("gpu"))
    layer = Template.of(lambda: PLAIN.build(initializer, SIZE, "float32"))
    positions = jnp.zeros(values().shape[:2], jnp.int32)
    jax.eval_shape(
        lambda weights, x: layer.bind(weights)(x, LayerInputs(positions))[0],
        draw_weights(PLAIN),
        values(),
    )
    assert said == ["gpu"] * 3


def test_sparse_handles_skewed_loads():
    """All tokens at the same two experts, the others idle."""
    weights = draw_weights(PLAIN)
    weights["router"]["weight"] *= 1e-3
    weights["router"]["weight"][:, (1, 4)] += 5
    x = np.abs(values())
    spec = replace(PLAIN, report_load=True)
    y, aux = run(spec, weights, x)
    np.testing.assert_array_equal(aux["expert_load"], [0, BATCH * LENGTH, 0, 0, BATCH * LENGTH, 0])
    close(y, by_hand(spec, weights, x, lambda *_: True))


# Dropping.


class Places:
    """Counts an expert's places in a sequence, or all rows of one buffer."""

    def __init__(self, capacity, segments=None):
        self.capacity, self.segments, self.taken, self.dropped = capacity, segments, {}, 0

    def __call__(self, row, token, expert):
        if self.segments is not None and self.segments[row, token] == 0:
            return False
        taken = self.taken[row, expert] = self.taken.get((row, expert), 0) + 1
        self.dropped += taken > self.capacity
        return taken <= self.capacity


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25])
@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["full", "padded"])
def test_dropping(factor, segments):
    spec = replace(PLAIN, method="dropping", capacity_factor=factor)
    weights, x = draw_weights(spec), values()
    places = Places(int(max(math.ceil(LENGTH * 2 / EXPERTS) * factor, factor)), segments)
    expected = by_hand(spec, weights, x, places)
    assert places.dropped > 0
    close(run(spec, weights, x, segments)[0], expected)


@pytest.mark.parametrize(
    ("length", "chosen", "experts", "factor", "capacity"),
    [
        (9, 2, 6, 1.0, 3),
        (10, 2, 6, 1.0, 4),
        (10, 2, 6, 1.3, 5),
        (2, 1, 8, 1.5, 1),
        (2, 1, 8, 4.0, 4),
    ],
)
def test_capacity(length, chosen, experts, factor, capacity):
    assert expert_capacity(length, chosen, experts, factor) == capacity


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["full", "padded"])
@pytest.mark.parametrize("factor", [0.9, 0.5, 0.01])
def test_buffer_drops_the_last_experts(factor, segments):
    """Rows are filled expert by expert over the whole batch, tokens in order."""
    spec = replace(PLAIN, buffer_factor=factor)
    weights, x = draw_weights(spec), values()
    queue = []

    def note(row, token, expert):
        if segments is None or segments[row, token]:
            queue.append((expert, row, token))
        return False

    by_hand(spec, weights, x, note)
    rows = max(1, int(BATCH * LENGTH * 2 * factor))
    kept = set(sorted(queue)[:rows])
    assert (len(kept) < len(queue)) == (
        segments is None or factor < 0.9
    )  # a third of the batch is padding
    expected = by_hand(spec, weights, x, lambda row, token, expert: (expert, row, token) in kept)
    close(run(spec, weights, x, segments)[0], expected)


# Padding, reports, and what else goes in and out.


@pytest.mark.parametrize("method", ["sparse", "dense", "dropping"])
def test_padding(method):
    """It gets nothing from the routed experts, and what stands there changes nothing elsewhere."""
    spec = replace(LIMITED, method=method, balance_weight=0.5, report_load=True)
    weights, x = draw_weights(spec), values()
    y, aux = run(spec, weights, x, SEGMENTS)
    np.testing.assert_array_equal(np.asarray(y)[SEGMENTS == 0], 0)
    assert np.abs(np.asarray(y)[SEGMENTS > 0]).min() > 0 or method == "dropping"
    other = np.where((SEGMENTS == 0)[..., None], values(seed=7), x)
    close(run(spec, weights, other, SEGMENTS), (y, aux), 0)
    assert aux["expert_load"].sum() == 2 * (SEGMENTS > 0).sum()


def test_reports():
    """Loss of Switch and Mixtral in numpy, one sequence at a time."""
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


def test_router_may_read_something_else():
    spec = replace(PLAIN, report_load=True)
    weights, x, other = draw_weights(spec), values(), values(seed=3)
    close(run(spec, weights, x, router_input=x), run(spec, weights, x), 0)
    y, aux = run(spec, weights, x, router_input=other)
    np.testing.assert_array_equal(aux["expert_load"], run(spec, weights, other)[1]["expert_load"])
    weights["router"]["weight"][...] = 0  # ties go to the first experts, with equal weights
    first = run(spec, weights, x)[0]
    assert np.abs(y - first).max() > 0.1
    close(run(spec, weights, x, router_input=other)[0], first, 0)


def test_bfloat16():
    """Weights stay in float32; results are close to those in float32, closer with the sum in
    float32.
    """
    weights, x = draw_weights(PLAIN), np.asarray(jnp.asarray(values(), jnp.bfloat16), np.float32)
    router = replace(ROUTER, float32=True)  # the same choices
    expected = by_hand(PLAIN, weights, x, lambda *_: True)
    off = {}
    for method in ("sparse", "dense", "dropping"):
        for float32_sum in (True, False):
            spec = replace(
                PLAIN, method=method, capacity_factor=9.0, router=router, float32_sum=float32_sum
            )
            y, _ = run(spec, weights, jnp.asarray(x, jnp.bfloat16), dtype="bfloat16")
            assert y.dtype == jnp.bfloat16
            off[method, float32_sum] = np.abs(np.asarray(y, np.float64) - expected).mean()
            assert off[method, float32_sum] < 0.02 * np.abs(expected).mean()
    assert off["sparse", True] < off["sparse", False]


def test_random_routing_is_balanced():
    spec = replace(PLAIN, router=replace(ROUTER, random=True), report_load=True, method="dropping")
    weights, x = draw_weights(spec), values()
    y, aux = run(spec, weights, x)
    np.testing.assert_array_equal(
        aux["expert_load"], np.full(EXPERTS, BATCH * LENGTH * 2 / EXPERTS)
    )
    close(y, run(replace(spec, method="dense"), weights, x)[0])  # a capacity of 1 drops nothing


def test_weights():
    spec = replace(PLAIN, bias=True, shared=MlpSpec(7), shared_gate=True)
    wide = {"weight": ("exp", "embed_moe", "mlp_moe"), "bias": ("exp", "mlp_moe")}
    narrow = {"weight": ("exp", "mlp_moe", "embed_moe"), "bias": ("exp", "embed_moe")}
    axes = template(spec).axes
    assert axes["experts"] == {"wi_0": wide, "wi_1": wide, "wo": narrow}
    assert axes["router"] == {"weight": ("embed", "exp")}
    assert axes["shared_gate"] == {"weight": ("embed", None)}
    assert set(axes["shared"]) == {"wi_0", "wi_1", "wo"}
    shapes = jax.tree.map(lambda leaf: leaf.shape, template(spec).weights["experts"])
    wide, narrow = (EXPERTS, SIZE, WIDTH), (EXPERTS, WIDTH, SIZE)
    assert {name: layer["weight"] for name, layer in shapes.items()} == {
        "wi_0": wide,
        "wi_1": wide,
        "wo": narrow,
    }
    assert shapes["wi_0"]["bias"] == (EXPERTS, WIDTH)
    assert shapes["wo"]["bias"] == (EXPERTS, SIZE)


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
def test_tags(method):
    spec = replace(PLAIN, method=method)
    program = str(
        jax.make_jaxpr(lambda weights: applied(spec, weights, values())[0])(draw_weights(spec))
    )
    for name in ("mlpwi_0", "mlpwi_1", "mlpwo", "moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo"):
        assert f"name={name}]" in program


# Whole blocks of transformers.

CHOSEN = 2
SIGMOID = RouterSpec(
    EXPERTS,
    CHOSEN,
    score="sigmoid",
    normalise=True,
    scaling=2.5,
    bias="selection",
    groups=3,
    kept_groups=2,
)
GATE = {"router.weight": "gate.weight"}
UNGATED = {"shared.wi_0.weight": "gate_proj.weight", "shared.wi_1.weight": "up_proj.weight",
           "shared.wo.weight": "down_proj.weight"}  # fmt: skip


def shared_weights(prefix):
    return {ours: f"{prefix}.{name}" for ours, name in UNGATED.items()}


# model: (spec, class of config, class of block, config, names of weights by ours)
BLOCKS = {
    "mixtral": (
        PLAIN, "MixtralConfig", "MixtralSparseMoeBlock",
        dict(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, intermediate_size=WIDTH), GATE,
    ),
    "qwen3_moe": (
        replace(PLAIN, router=RouterSpec(EXPERTS, CHOSEN)), "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock",
        dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, norm_topk_prob=False), GATE,
    ),
    "qwen3_next": (
        replace(PLAIN, shared=MlpSpec(7), shared_gate=True), "Qwen3NextConfig", "Qwen3NextSparseMoeBlock",
        dict(num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, norm_topk_prob=True,
             shared_expert_intermediate_size=7),
        GATE | {"shared_gate.weight": "shared_expert_gate.weight"} | shared_weights("shared_expert"),
    ),
    "deepseek_v3": (
        replace(PLAIN, shared=MlpSpec(2 * WIDTH), router=SIGMOID), "DeepseekV3Config", "DeepseekV3MoE",
        dict(n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=WIDTH, n_shared_experts=2,
             n_group=3, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True),
        GATE | {"router.bias": "gate.e_score_correction_bias"} | shared_weights("shared_experts"),
    ),
    "gpt_oss": (
        replace(PLAIN, activations=("sigmoid", "linear"), limit=0.9, bias=True,
                router=RouterSpec(EXPERTS, CHOSEN, score="softmax_of_chosen", bias="logits")),
        "GptOssConfig", "GptOssMLP",
        dict(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, intermediate_size=WIDTH, swiglu_limit=0.9),
        {"router.weight": "router.weight", "router.bias": "router.bias", "experts.wo.bias": "experts.down_proj_bias"},
    ),
    "llama4": (
        replace(PLAIN, weigh_input=True, shared=MlpSpec(WIDTH), router=RouterSpec(EXPERTS, CHOSEN, score="sigmoid")),
        "Llama4TextConfig", "Llama4TextMoe",
        dict(num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, intermediate_size=WIDTH),
        {"router.weight": "router.weight"} | shared_weights("shared_expert"),
    ),
}  # fmt: skip


def leaf(tree, path):
    for name in path.split("."):
        tree = tree[name]
    return tree


def in_transformers(model, weights, x):
    """The block's output, and the gradient for x of sum(output · values(seed=2))."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    _, config_class, block_class, settings, names = BLOCKS[model]
    configuration = importlib.import_module(f"transformers.models.{model}.configuration_{model}")
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    block = getattr(modeling, block_class)(
        getattr(configuration, config_class)(hidden_size=SIZE, **settings)
    )
    tensors = dict(block.named_parameters()) | dict(block.named_buffers())
    arrays = {theirs: leaf(weights, ours) for ours, theirs in names.items()}
    arrays = {name: array if name.endswith("_bias") else array.T for name, array in arrays.items()}
    experts = weights["experts"]
    gate, up, down = (experts[name]["weight"] for name in ("wi_0", "wi_1", "wo"))
    if model == "gpt_oss":  # gate and up take turns
        arrays["experts.gate_up_proj"] = np.stack([gate, up], axis=-1).reshape(
            EXPERTS, SIZE, 2 * WIDTH
        )
        biases = [experts[name]["bias"] for name in ("wi_0", "wi_1")]
        arrays["experts.gate_up_proj_bias"] = np.stack(biases, axis=-1).reshape(EXPERTS, 2 * WIDTH)
        arrays["experts.down_proj"] = down
    else:
        joined = np.concatenate([gate, up], axis=-1)
        turned = model != "llama4"
        arrays["experts.gate_up_proj"] = joined.transpose(0, 2, 1) if turned else joined
        arrays["experts.down_proj"] = down.transpose(0, 2, 1) if turned else down
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
def test_transformers(model):
    spec = BLOCKS[model][0]
    weights, x = draw_weights(spec), values()
    expected = in_transformers(model, weights, x)
    y, (_, gradient) = value_and_gradients(spec, None)
    close((y, gradient), expected)
