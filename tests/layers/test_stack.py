"""The decoder stack: layer by layer in order, scanned the same as unrolled, for patterns, segments
and scan axes.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.common import hash_rng
from maxtext.kernels.attention import AttentionMask, attend, cudnn
from maxtext.layers.block import Block
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import AttentionSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec, Segment
from maxtext.layers.stack import RematTensors, Stack

SIZE, LENGTH, HEAD = 16, 6, 4
jit = jax.jit

LOCAL = LayerSpec(
    SIZE, AttentionSpec(4, 2, HEAD, HEAD**-0.5, AttentionMask(window=3), RopeSpec()), MlpSpec(24),
    NormSpec(),
    dropout_rate=0.3,
)  # fmt: skip
GLOBAL = LayerSpec(
    SIZE, AttentionSpec(2, 2, HEAD, HEAD**-0.5, AttentionMask(), bias=True, out_bias=True),
    MlpSpec(20, ("gelu",), bias=True), NormSpec("layer"), dropout_rate=0.3,
)  # fmt: skip
PATTERNS = {
    "one": [Segment((LOCAL,), 3)],
    "two segments": [Segment((GLOBAL,), 1), Segment((LOCAL, GLOBAL), 2)],
}
ORDER = {"one": [LOCAL] * 3, "two segments": [GLOBAL, LOCAL, GLOBAL, LOCAL, GLOBAL]}
KEYS = {"one": None, "two segments": jax.random.key(5)}  # of dropout


def initializer():
    return Initializer(hash_rng.fold_in(hash_rng.key_from_seed(0), 2), "float32")


def tower(name, scanned, axis=1):
    """All segments of a pattern, one stack each."""
    stacks, first = [], 0
    for segment in PATTERNS[name]:
        stacks.append(
            Stack(
                initializer(),
                segment,
                first_layer=first,
                dtype="float32",
                scanned=scanned,
                scan_axis=axis,
                remat=None,
            )
        )
        first += segment.layers
    return nnx.List(stacks)


def run(stacks, x, inputs):
    for stack in stacks:
        x, _ = stack(x, inputs)
    return x


def values():
    draw = np.random.default_rng(0).normal
    x, back = (draw(size=(2, LENGTH, SIZE)).astype(np.float32) for _ in range(2))
    return jnp.asarray(x), jnp.asarray(back)


def layer_inputs(key=None):
    return LayerInputs(jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)), None, key)


class Built:
    """A tower with its weights, its output, and the gradients of a fixed product with it."""

    def __init__(self, name, scanned, axis=1):
        make = partial(tower, name, scanned, axis)
        self.template = Template.of(make)
        self.weights = jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
        x, back = values()

        def loss(weights, x, key):
            output = run(self.template.bind(weights), x, layer_inputs(key))
            return jnp.vdot(output, back), output

        self.evaluate = jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        (self.loss, self.output), (self.gradients, self.x_gradient) = self.evaluate(
            self.weights, x, KEYS[name]
        )


@pytest.fixture(scope="module")
def built():
    """Each tower is built and compiled once."""
    cache = {}

    def get(name, scanned, axis=1):
        if (name, scanned, axis) not in cache:
            cache[name, scanned, axis] = Built(name, scanned, axis)
        return cache[name, scanned, axis]

    return get


def stacked(unrolled, axis):
    """The tree of an unrolled tower in the form of a scanned one: repeats along `axis`, or last
    where that is less.
    """
    return {
        segment: {
            "blocks": {
                place: jax.tree.map(
                    lambda *leaves: np.stack(leaves, axis=min(axis, leaves[0].ndim)),
                    *(repeats[repeat] for repeat in range(len(repeats))),
                )
                for place, repeats in stack["blocks"].items()
            }
        }
        for segment, stack in unrolled.items()
    }


def close(actual, expected, tolerance=1e-6):
    """Of one structure, and equal within the tolerance times the largest value."""
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale),
        actual,
        expected,
    )


CASES = [("one", 0), ("one", 1), ("one", 2), ("two segments", 1)]


@pytest.mark.parametrize(("name", "axis"), CASES)
def test_scanned_is_unrolled(built, name, axis):
    """With dropout on in the pattern of two segments: a layer's mask is its own, however it is
    run.
    """
    scanned, unrolled = built(name, True, axis), built(name, False)
    jax.tree.map(
        np.testing.assert_array_equal, scanned.weights, stacked(unrolled.weights, axis)
    )  # bit for bit
    np.testing.assert_allclose(scanned.loss, unrolled.loss, rtol=1e-6)
    close(scanned.output, unrolled.output)
    close(scanned.x_gradient, unrolled.x_gradient)
    close(scanned.gradients, stacked(unrolled.gradients, axis))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_scan_axis_is_named(built, axis):
    template = built("one", True, axis).template
    block, axes = template.weights[0]["blocks"][0], template.axes[0]["blocks"][0]
    assert (
        block["attention"]["query"]["weight"].shape
        == {0: (3, 16, 4, 4), 1: (16, 3, 4, 4), 2: (16, 4, 3, 4)}[axis]
    )
    assert axes["attention"]["query"]["weight"].index("layers") == axis
    assert (
        block["mlp"]["wo"]["weight"].shape == {0: (3, 24, 16), 1: (24, 3, 16), 2: (24, 16, 3)}[axis]
    )
    assert axes["mlp"]["wo"]["weight"] == {0: ("layers", "mlp", "embed"),
                                           1: ("mlp", "layers", "embed"),
                                           2: ("mlp", "embed", "layers")}[axis]  # fmt: skip
    assert block["mlp_norm"]["scale"].shape == (
        (3, 16) if axis == 0 else (16, 3)
    )  # last where the axis is too far
    assert axes["mlp_norm"]["scale"] == (("layers", "norm") if axis == 0 else ("norm", "layers"))


@pytest.mark.parametrize("name", PATTERNS)
def test_layers_run_in_order_with_their_own_weights(built, name):
    """Layer i of the model is the i-th spec with stream i, whatever the segments."""
    unrolled = built(name, False)
    x, _ = values()

    @jit
    def by_hand(x):
        for index, spec in enumerate(ORDER[name]):
            x, _ = spec.build(initializer().child(f"layer_{index}"), "float32")(
                x, layer_inputs(KEYS[name]).fold(index)
            )
        return x

    close(unrolled.output, by_hand(x))
    kernels = np.stack(
        [np.ravel(leaf)[:64] for leaf in jax.tree.leaves(unrolled.weights) if leaf.size >= 64]
    )
    assert len(kernels) > 10
    assert (
        np.abs(np.corrcoef(kernels) - np.eye(len(kernels))).max() < 5.5 / 8
    )  # no two weights start alike


@pytest.mark.slow
def test_dropout_differs_between_layers_and_keys(built):
    one, (x, _) = built("two segments", True), values()
    (_, other), _ = one.evaluate(one.weights, x, jax.random.key(6))
    assert np.abs(one.output - other).max() > 0.1
    inputs = layer_inputs(KEYS["two segments"])
    masks = [jax.random.bernoulli(inputs.fold(index).key, 0.5, (64,)) for index in range(4)]
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 4
    assert layer_inputs().fold(3).key is None


@pytest.mark.parametrize(
    ("kept", "times"), [((), 2), (("query_proj",), 2), (("context",), 1), (("attention_out",), 1)]
)
def test_attention_by_cudnn_whose_result_is_kept_runs_once(kept, times, monkeypatch):
    """What its backward pass needs besides is kept, too. Seen in the program; it can be traced
    without a GPU, if JAX believes that there is one."""
    from jax._src.cudnn import fused_attention_stablehlo as private

    monkeypatch.setattr(private, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)

    def layer(q):
        q = checkpoint_name(jnp.sin(q), "query_proj")
        mixed = attend(
            q, q, q, backend="cudnn_flash_jax", mask=AttentionMask(), scale=1.0, platform="gpu"
        )
        return jnp.sum(
            jnp.square(checkpoint_name(checkpoint_name(mixed, "context"), "attention_out"))
        )

    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    program = str(jax.make_jaxpr(jax.grad(RematTensors(kept).wrap(layer, in_scan=False)))(q))
    assert program.count(f"{cudnn.FORWARD_PRIMITIVE}[") == times
    assert program.count("dot_product_attention_bwd_wrapper[") == 1


def test_layers_of_one_kind_are_traced_once(monkeypatch):
    """Unrolled, however many there are, they are one function of the program, and one that makes
    their weights.
    """
    built, run = [], []
    monkeypatch.setattr(
        LayerSpec,
        "build",
        lambda spec, *rest, build=LayerSpec.build: built.append(1) or build(spec, *rest),
    )
    monkeypatch.setattr(
        Block,
        "__call__",
        lambda block, *rest, call=Block.__call__: run.append(1) or call(block, *rest),
    )

    def program(repeats):
        def function(x):
            stack = Stack(
                Initializer(hash_rng.key_from_seed(0), "float32"),
                Segment((LOCAL,), repeats),
                first_layer=0,
                dtype="float32",
                scanned=False,
                scan_axis=0,
                remat=None,
            )
            return stack(x, LayerInputs(jnp.zeros(x.shape[:2], jnp.int32)))[0]

        return jax.jit(function).lower(jnp.zeros((1, LENGTH, SIZE))).as_text()

    text = program(16)
    assert (len(built), len(run)) == (2, 1)  # what a layer is made of, and its weights
    assert text.count("stablehlo.dot_general") == program(2).count("stablehlo.dot_general")
