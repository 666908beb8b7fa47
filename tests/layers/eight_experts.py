"""Run by test_moe_sharded.py in a process of its own with eight CPU devices: prints a JSON of what
it found.

For each case, y and all gradients of a mixture of experts on a mesh against one device; and what
its program says of collectives.
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
from maxtext.layers.moe import MoeSpec
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.routers import RouterSpec
from maxtext.models.configuration import load
from maxtext.sharding import AxisRules, use_rules
from tests.compiling import FAST_COMPILE
from tests.kernels.test_all_to_all import emulated_ragged_all_to_all

BATCH, LENGTH, SIZE, EXPERTS, WIDTH = 8, 8, 24, 8, 40
ROUTER = RouterSpec(EXPERTS, 2, normalise=True)
PLAIN = MoeSpec(ROUTER, WIDTH)


@dataclass(frozen=True)
class RoughSpec(MoeSpec):
    """With products in fp8."""

    def build(self, initializer, size, dtype):
        return super().build(replace(initializer, recipe="fp8"), size, dtype)


LIMITED = replace(PLAIN, activations=("sigmoid", "linear"), limit=0.8, bias=True)
WEIGHED = replace(
    PLAIN, weigh_input=True, activations=("gelu",), router=RouterSpec(EXPERTS, 1, score="sigmoid")
)
# What a device alone does not ask for.
ONE_DEVICE = {"ring": False, "two_stage_gather": False, "experts_on_fsdp": False, "custom_sort_vjp": True,
              "buffer_factor": None}  # fmt: skip
RULES = tuple((name, tuple(axes)) for name, axes in load(None, [], environ={}).logical_axis_rules)
TWO_OWNERS = (("exp", ("fsdp", "expert")), ("activation_exp", ("fsdp", "expert")))
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
    "fsdp x fsdp_transpose x tensor": ({"fsdp": 2, "fsdp_transpose": 2, "tensor": 2}, {"spec": LIMITED}),
    "two stages": ({"fsdp": 2, "fsdp_transpose": 4}, {"spec": replace(PLAIN, two_stage_gather=True)}),
    "biases": ({"expert": 2, "tensor": 2, "tensor_sequence": 2}, {"spec": LIMITED}),
    "weighed input": ({"context": 2, "expert": 4}, {"spec": WEIGHED}),
    "6 experts on 4 devices": ({"fsdp": 2, "expert": 4}, {"spec": replace(PLAIN, router=replace(ROUTER, experts=6))}),
    "6 rows on 8 devices": ({"fsdp": 2, "expert": 4}, {"batch": 6}),
    "ring": ({"fsdp": 2, "expert": 4}, {"spec": replace(PLAIN, ring=True)}),
    "ring x tensor": ({"expert": 4, "tensor": 2}, {"spec": replace(LIMITED, ring=True)}),
    "experts on fsdp": ({"fsdp": 4, "fsdp_transpose": 2}, {"spec": replace(PLAIN, experts_on_fsdp=True)}),
    "two owner axes": ({"fsdp": 2, "expert": 2, "tensor": 2}, {"rules": TWO_OWNERS}),
    "ragged": ({"fsdp": 2, "expert": 4}, {"ragged": True}),
    "ragged x tensor": ({"expert": 4, "tensor": 2}, {"ragged": True, "spec": LIMITED}),
    "fp8, expert": ({"data": 2, "expert": 4}, {"spec": RoughSpec(ROUTER, WIDTH)}),
    "fp8, fsdp x tensor": ({"fsdp": 4, "tensor": 2}, {"spec": RoughSpec(ROUTER, WIDTH)}),
    "dense": ({"fsdp": 2, "expert": 2, "tensor": 2}, {"spec": replace(PLAIN, method="dense")}),
    "dropping": ({"fsdp": 2, "expert": 4}, {"spec": replace(PLAIN, method="dropping", capacity_factor=1.0)}),
    "dropping, context x expert": (
        {"context": 2, "expert": 4}, {"spec": replace(LIMITED, method="dropping", capacity_factor=1.0)},
    ),
    "bound": ({"data": 8}, {"spec": replace(PLAIN, buffer_factor=0.6)}),
    "bound, expert": ({"data": 2, "expert": 4}, {"spec": replace(PLAIN, buffer_factor=0.8), "owners": 4}),
    "bound, ring": ({"data": 2, "expert": 4}, {"spec": replace(PLAIN, buffer_factor=0.8, ring=True), "owners": 4}),
    "bound, ragged": (
        {"data": 2, "expert": 4}, {"spec": replace(PLAIN, buffer_factor=0.8), "owners": 4, "ragged": True},
    ),
}  # fmt: skip


def template(spec):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), SIZE, "float32")
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
    x = np.random.default_rng(seed).normal(size=(batch, LENGTH, SIZE)).astype(np.float32)
    return np.abs(x) if skewed else x


def segments(batch):
    """The ends of rows are padding, of one more than of the other."""
    return (np.arange(LENGTH) < LENGTH - np.arange(batch)[:, None] % 4).astype(np.int32)


def loss(spec, weights, x, real, target):
    positions = jnp.broadcast_to(jnp.arange(LENGTH), x.shape[:2])
    y, _ = template(spec).bind(weights)(x, LayerInputs(positions, real))
    return jnp.sum(y * target), y


def bounded_loss(spec, weights, x, target, kept):
    """Every expert on every token, and the sum of the choices that are kept [B, S, k]."""
    layer = template(spec).bind(weights)
    routing = layer.router(x)
    each = layer.experts.on_each(jnp.broadcast_to(x, (EXPERTS, *x.shape)))
    picked = jax.nn.one_hot(routing.indices, EXPERTS) * kept[..., None]
    y = jnp.einsum("bsk,bskx,xbse->bse", routing.weights, picked, each)
    return jnp.sum(y * target), y


@functools.cache
def on_one(spec, bounded):
    """Compiled once for all cases of a spec."""

    def run(weights, x, real, target, kept):
        return (
            bounded_loss(spec, weights, x, target, kept)
            if bounded
            else loss(spec, weights, x, real, target)
        )

    return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True), compiler_options=FAST_COMPILE)


def kept_choices(spec, owners, weights, x, real):
    """A queue for each device; with the mesh's data axis outermost, `owners` neighbours share the
    experts.
    """
    indices = np.asarray(template(spec).bind(weights).router(x).indices)
    rows = max(1, int(BATCH // 8 * LENGTH * spec.router.chosen * spec.buffer_factor))
    waiting = {}
    for row, token, choice in np.ndindex(indices.shape):
        if real[row, token]:
            expert = indices[row, token, choice]
            device = (row // owners, expert * owners // EXPERTS)
            waiting.setdefault(device, []).append((expert, row, token, choice))
    kept = np.zeros(indices.shape, np.float32)
    for queue in waiting.values():
        for _, *place in sorted(queue)[:rows]:
            kept[tuple(place)] = 1
    return kept, sum(max(0, len(queue) - rows) for queue in waiting.values())


def count_collectives(text):
    """[(kind, elements of the result)] of a compiled program."""
    found = []
    for kinds in re.finditer(
        r"= (.*?) (all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute)\(", text
    ):
        sizes = [
            math.prod(map(int, filter(None, shape.split(","))))
            for shape in re.findall(r"\[([\d,]*)\]", kinds[1])
        ]
        found.append((kinds[2], sum(sizes) if kinds[2] == "all-to-all" else max(sizes)))
    return found


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
    kept, dropped = None, 0
    if spec.buffer_factor is not None:
        kept, dropped = kept_choices(spec, options.get("owners", 1), weights, x, real)
    dense = {} if isinstance(spec, RoughSpec) else {"method": "dense"}  # which is not rounded
    one = replace(spec, **(dense | ONE_DEVICE if spec.method == "sparse" else {}))
    (_, expected_y), expected = on_one(one, kept is not None)(weights, x, real, target, kept)

    rules = rules_of(sizes, options.get("rules", ()))
    places = rules.shardings(template(spec).axes, weights)
    stream = rules.sharding(
        ("activation_batch", "activation_norm_length", "activation_embed"), x.shape
    )
    all_to_all.RAGGED_PLATFORMS = ("cpu",) if options.get("ragged") else ("tpu", "gpu")
    both = jax.value_and_grad(lambda *rest: loss(spec, *rest), (0, 1), has_aux=True)
    with use_rules(rules):
        jitted = jax.jit(
            both,
            in_shardings=(places, stream, None, None),
            out_shardings=((None, stream), (places, stream)),
        )
        compiled = jitted.lower(weights, x, real, target).compile(FAST_COMPILE)
    placed = jax.device_put((weights, x), (places, stream))
    (_, y), gradients = compiled(*placed, real, target)
    pairs = {"y": (y, expected_y), "x": (gradients[1], expected[1])}
    pairs |= {
        jax.tree_util.keystr(path): (found, wanted)
        for (path, found), wanted in zip(
            jax.tree.leaves_with_path(gradients[0]), jax.tree.leaves(expected[0]), strict=True
        )
    }
    return {
        "errors": {
            name: error(np.asarray(found), np.asarray(wanted))
            for name, (found, wanted) in pairs.items()
        },
        "smallest": min(float(np.abs(wanted).max()) for _, wanted in pairs.values()),
        "collectives": count_collectives(compiled.as_text()),
        "dropped": dropped,
    }


def error(found, wanted):
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def saved():
    """How often experts multiply, in a program with gradients: recomputed unless their tags are
    saved.
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
    """The program for other platforms, which have the ragged exchange."""
    found, spec, rules = {}, PLAIN, rules_of({"fsdp": 2, "expert": 4}, ())
    weights, x, real, target = weights_of(spec), values(BATCH, 1), segments(BATCH), values(BATCH, 2)
    all_to_all.RAGGED_PLATFORMS = ("cpu",)
    jax.lax.ragged_all_to_all = REAL
    with use_rules(rules):
        traced = jax.jit(
            jax.grad(lambda weights, x: loss(spec, weights, x, real, target)[0])
        ).trace(weights, x)
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        found[platform] = len(re.findall("custom_call @ragged_all_to_all", text))
    return found


if __name__ == "__main__":
    REAL, jax.lax.ragged_all_to_all = jax.lax.ragged_all_to_all, emulated_ragged_all_to_all
    found = {name: run(*CASES[name]) for name in sys.argv[1:] or CASES}
    print(
        json.dumps(
            {"cases": found} | ({} if sys.argv[1:] else {"saved": saved(), "lowered": lowered()})
        )
    )
