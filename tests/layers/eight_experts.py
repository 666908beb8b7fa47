"""Run by test_moe_sharded.py in a subprocess with eight CPU devices: prints its results as JSON.

For each case, the errors of y and all gradients of a mixture of experts on a mesh against one
device; and the collectives of its program.
"""

import functools
import json
import math
import re
import sys
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.common import hash_rng
from maxtext.kernels import all_to_all
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import MoeSpec, RouterSpec
from maxtext.models.configuration import load
from maxtext.sharding import AxisRules, use_rules
from tests.support.all_to_all import emulated_ragged_all_to_all

BATCH, LENGTH, EMBED_DIM, EXPERTS, HIDDEN_DIM = 8, 8, 24, 8, 40
ROUTER = RouterSpec(EXPERTS, 2, normalise=True)
PLAIN = MoeSpec(ROUTER, HIDDEN_DIM)


@dataclass(frozen=True)
class Fp8Spec(MoeSpec):
    """With matmuls in fp8."""

    def build(self, initializer, embed_dim, dtype):
        context = replace(initializer.context, precision="fp8")
        return super().build(replace(initializer, context=context), embed_dim, dtype)


LIMITED = replace(PLAIN, activations=("sigmoid", "linear"), limit=0.8, bias=True)
WEIGHED = replace(
    PLAIN,
    apply_router_weight_on_input=True,
    activations=("gelu",),
    router=RouterSpec(EXPERTS, 1, score="sigmoid"),
)
# The options of a single device.
ONE_DEVICE = {
    "ring": False,
    "two_stage_gather": False,
    "experts_on_fsdp": False,
    "custom_sort_vjp": True,
    "buffer_factor": None,
}
RULES = tuple((name, tuple(axes)) for name, axes in load(None, [], environ={}).logical_axis_rules)
TWO_EXPERT_AXES = (("exp", ("fsdp", "expert")), ("activation_exp", ("fsdp", "expert")))
# name: sizes of mesh axes, then what differs from PLAIN and the rules
CASES = {
    "data": ({"data": 8}, {}),
    "fsdp": ({"fsdp": 8}, {}),
    "fsdp_transpose": ({"fsdp_transpose": 8}, {}),
    "tensor": ({"tensor": 8}, {}),
    "tensor_sequence": ({"tensor_sequence": 8}, {}),
    "context": ({"context": 8}, {}),
    "expert": ({"expert": 8}, {}),
    "expert, autodiff": ({"expert": 8}, {"spec": replace(PLAIN, custom_sort_vjp=False)}),
    "fsdp x expert": ({"fsdp": 2, "expert": 4}, {}),
    "all tokens to one expert": ({"expert": 8}, {"skewed": True}),
    "expert x tensor": ({"expert": 4, "tensor": 2}, {}),
    "fsdp x fsdp_transpose x tensor": (
        {"fsdp": 2, "fsdp_transpose": 2, "tensor": 2},
        {"spec": LIMITED},
    ),
    "two stages": (
        {"fsdp": 2, "fsdp_transpose": 4},
        {"spec": replace(PLAIN, two_stage_gather=True)},
    ),
    "biases": ({"expert": 2, "tensor": 2, "tensor_sequence": 2}, {"spec": LIMITED}),
    "weighed input": ({"context": 2, "expert": 4}, {"spec": WEIGHED}),
    "6 experts on 4 devices": (
        {"fsdp": 2, "expert": 4},
        {"spec": replace(PLAIN, router=replace(ROUTER, experts=6))},
    ),
    "6 rows on 8 devices": ({"fsdp": 2, "expert": 4}, {"batch": 6}),
    "ring": ({"fsdp": 2, "expert": 4}, {"spec": replace(PLAIN, ring=True)}),
    "ring x tensor": ({"expert": 4, "tensor": 2}, {"spec": replace(LIMITED, ring=True)}),
    "experts on fsdp": (
        {"fsdp": 4, "fsdp_transpose": 2},
        {"spec": replace(PLAIN, experts_on_fsdp=True)},
    ),
    "two expert axes": ({"fsdp": 2, "expert": 2, "tensor": 2}, {"rules": TWO_EXPERT_AXES}),
    "ragged": ({"fsdp": 2, "expert": 4}, {"ragged": True}),
    "ragged x tensor": ({"expert": 4, "tensor": 2}, {"ragged": True, "spec": LIMITED}),
    "fp8, expert": ({"data": 2, "expert": 4}, {"spec": Fp8Spec(ROUTER, HIDDEN_DIM)}),
    "fp8, fsdp x tensor": ({"fsdp": 4, "tensor": 2}, {"spec": Fp8Spec(ROUTER, HIDDEN_DIM)}),
    "dense": ({"fsdp": 2, "expert": 2, "tensor": 2}, {"spec": replace(PLAIN, method="dense")}),
    "dropping": (
        {"fsdp": 2, "expert": 4},
        {"spec": replace(PLAIN, method="dropping", capacity_factor=1.0)},
    ),
    "dropping, context x expert": (
        {"context": 2, "expert": 4},
        {"spec": replace(LIMITED, method="dropping", capacity_factor=1.0)},
    ),
    "bound": ({"data": 8}, {"spec": replace(PLAIN, buffer_factor=0.6)}),
    "bound, expert": (
        {"data": 2, "expert": 4},
        {"spec": replace(PLAIN, buffer_factor=0.8), "owners": 4},
    ),
    "bound, ring": (
        {"data": 2, "expert": 4},
        {"spec": replace(PLAIN, buffer_factor=0.8, ring=True), "owners": 4},
    ),
    "bound, ragged": (
        {"data": 2, "expert": 4},
        {"spec": replace(PLAIN, buffer_factor=0.8), "owners": 4, "ragged": True},
    ),
}
# Combinations of what other cases test one by one.
FURTHER = (
    "fsdp x fsdp_transpose x tensor",
    "ring x tensor",
    "ragged x tensor",
    "fp8, fsdp x tensor",
    "dropping, context x expert",
    "bound, ring",
    "bound, ragged",
)


def template(spec):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, "float32")
    )


def weights_of(spec, skewed=False):
    draw = np.random.default_rng(0).normal
    weights = jax.tree.map(
        lambda leaf: draw(size=leaf.shape).astype(np.float32) * 0.5, template(spec).weights
    )
    if skewed:
        weights["router"]["weight"] *= 1e-3
        weights["router"]["weight"][:, (3, 5)] += 5
    return weights


def values(batch, seed, skewed=False):
    x = np.random.default_rng(seed).normal(size=(batch, LENGTH, EMBED_DIM)).astype(np.float32)
    return np.abs(x) if skewed else x


def segments(batch):
    """The ends of rows are padding, of different lengths."""
    return (np.arange(LENGTH) < LENGTH - np.arange(batch)[:, None] % 4).astype(np.int32)


def loss(spec, weights, x, real, target):
    positions = jnp.broadcast_to(jnp.arange(LENGTH), x.shape[:2])
    y, _ = template(spec).bind(weights)(x, LayerInputs(positions, real))
    return jnp.sum(y * target), y


def bounded_loss(spec, weights, x, target, accepted):
    """Every expert on every token, and the sum of the accepted choices [B, S, k]."""
    layer = template(spec).bind(weights)
    routing = layer.router(x)
    outputs = layer.experts.batched(jnp.broadcast_to(x, (EXPERTS, *x.shape)))
    one_hot = jax.nn.one_hot(routing.indices, EXPERTS) * accepted[..., None]
    y = jnp.einsum("bsk,bskx,xbse->bse", routing.weights, one_hot, outputs)
    return jnp.sum(y * target), y


@functools.cache
def on_one_device(spec, bounded):
    """Compiled once for all cases of a spec."""

    def run(weights, x, real, target, accepted):
        return (
            bounded_loss(spec, weights, x, target, accepted)
            if bounded
            else loss(spec, weights, x, real, target)
        )

    return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))


def accepted_choices(spec, owners, weights, x, real):
    """A queue for each device; the data axis of the mesh is outermost, and `owners` neighbours
    share the experts.
    """
    indices = np.asarray(template(spec).bind(weights).router(x).indices)
    rows = max(1, int(BATCH // 8 * LENGTH * spec.router.topk * spec.buffer_factor))
    waiting = {}
    for row, token, choice in np.ndindex(indices.shape):
        if real[row, token]:
            expert = indices[row, token, choice]
            device = (row // owners, expert * owners // EXPERTS)
            waiting.setdefault(device, []).append((expert, row, token, choice))
    accepted = np.zeros(indices.shape, np.float32)
    for queue in waiting.values():
        for _, *index in sorted(queue)[:rows]:
            accepted[tuple(index)] = 1
    return accepted, sum(max(0, len(queue) - rows) for queue in waiting.values())


def count_collectives(text):
    """[(kind, elements of the result)] of a compiled program."""
    collectives = []
    for match in re.finditer(
        r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\(", text
    ):
        sizes = [
            math.prod(map(int, filter(None, shape.split(","))))
            for shape in re.findall(r"\[([\d,]*)\]", match[1])
        ]
        collectives.append((match[2], sum(sizes) if match[2] == "all-to-all" else max(sizes)))
    return collectives


def rules_of(sizes, changed):
    mesh = jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes)
    )
    names = {name for name, _ in changed}
    return AxisRules(mesh, tuple(rule for rule in RULES if rule[0] not in names) + changed)


def run(sizes, options):
    spec, batch, skewed = (
        options.get("spec", PLAIN),
        options.get("batch", BATCH),
        options.get("skewed", False),
    )
    weights, x, real, target = (
        weights_of(spec, skewed),
        values(batch, 1, skewed),
        segments(batch),
        values(batch, 2),
    )
    accepted, dropped = None, 0
    if spec.buffer_factor is not None:
        accepted, dropped = accepted_choices(spec, options.get("owners", 1), weights, x, real)
    dense = {} if isinstance(spec, Fp8Spec) else {"method": "dense"}  # which is never fp8
    one_device = replace(spec, **(dense | ONE_DEVICE if spec.method == "sparse" else {}))
    run_one = on_one_device(one_device, accepted is not None)
    (_, expected_y), expected = run_one(weights, x, real, target, accepted)

    rules = rules_of(sizes, options.get("rules", ()))
    weight_shardings = rules.shardings(template(spec).axes, weights)
    x_sharding = rules.sharding(
        ("activation_batch", "activation_norm_length", "activation_embed"), x.shape
    )
    all_to_all.RAGGED_PLATFORMS = ("cpu",) if options.get("ragged") else ("tpu", "gpu")
    loss_and_gradients = jax.value_and_grad(
        lambda *arrays: loss(spec, *arrays), (0, 1), has_aux=True
    )
    with use_rules(rules):
        jitted = jax.jit(
            loss_and_gradients,
            in_shardings=(weight_shardings, x_sharding, None, None),
            out_shardings=((None, x_sharding), (weight_shardings, x_sharding)),
        )
        compiled = jitted.lower(weights, x, real, target).compile()
    sharded = jax.device_put((weights, x), (weight_shardings, x_sharding))
    (_, y), gradients = compiled(*sharded, real, target)
    pairs = {"y": (y, expected_y), "x": (gradients[1], expected[1])}
    pairs |= {
        jax.tree_util.keystr(path): (actual, right)
        for (path, actual), right in zip(
            jax.tree.leaves_with_path(gradients[0]), jax.tree.leaves(expected[0]), strict=True
        )
    }
    return {
        "errors": {
            name: relative_error(np.asarray(actual), np.asarray(right))
            for name, (actual, right) in pairs.items()
        },
        "smallest": min(float(np.abs(right).max()) for _, right in pairs.values()),
        "collectives": count_collectives(compiled.as_text()),
        "dropped": dropped,
    }


def relative_error(actual, right):
    return float(np.linalg.norm(actual - right) / np.linalg.norm(right))


def saved():
    """The number of grouped matmuls of a program with gradients: they are recomputed unless their
    results are saved.
    """
    spec, rules, counts = PLAIN, rules_of({"fsdp": 2, "expert": 4}, ()), {}
    weights, x, real, target = weights_of(spec), values(BATCH, 1), segments(BATCH), values(BATCH, 2)
    for policy, names in {"nothing": (), "tags": ("mlpwi_0", "moe_mlpwi_1", "mlpwo")}.items():
        keep = jax.checkpoint_policies.save_only_these_names(*names)
        run = jax.checkpoint(
            lambda weights, x: loss(spec, weights, x, real, target)[0], policy=keep
        )
        with use_rules(rules):
            counts[policy] = str(jax.make_jaxpr(jax.grad(run))(weights, x)).count(
                "ragged_dot_general["
            )
    return counts


def lowered():
    """The program of platforms that support the ragged all-to-all."""
    counts, spec, rules = {}, PLAIN, rules_of({"fsdp": 2, "expert": 4}, ())
    weights, x, real, target = weights_of(spec), values(BATCH, 1), segments(BATCH), values(BATCH, 2)
    all_to_all.RAGGED_PLATFORMS = ("cpu",)
    jax.lax.ragged_all_to_all = REAL
    with use_rules(rules):
        traced = jax.jit(
            jax.grad(lambda weights, x: loss(spec, weights, x, real, target)[0])
        ).trace(weights, x)
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        counts[platform] = len(re.findall("custom_call @ragged_all_to_all", text))
    return counts


if __name__ == "__main__":
    REAL, jax.lax.ragged_all_to_all = jax.lax.ragged_all_to_all, emulated_ragged_all_to_all
    results = {name: run(*CASES[name]) for name in sys.argv[1:] or CASES}
    print(json.dumps({"cases": results, "saved": saved(), "lowered": lowered()}))
