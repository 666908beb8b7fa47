"""The MLP against torch's activations, and one joint product against separate ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from maxtext.common import hash_rng
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.mlp import ACTIVATIONS
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import MlpSpec
from tests.tolerance import assert_within_rounding

SIZE, WIDTH = 6, 10
SHOW = {
    "weight": np.eye(WIDTH, SIZE, dtype=np.float32)
}  # as wo: the first hidden values come out as they are
TORCH = {
    "linear": lambda x: x,
    "relu": functional.relu,
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_exact": functional.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def template(spec, dtype="float32"):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), SIZE, dtype)
    )


def apply(mlp, x, key=None):
    y, aux = mlp(x, LayerInputs(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]), key=key))
    assert aux == {}
    return y


def weights(branches, bias, seed=0):
    """Unfused: wi (or wi_0, wi_1 …) and wo."""
    draw = np.random.default_rng(seed).normal
    names = ["wi"] if branches == 1 else [f"wi_{place}" for place in range(branches)]
    shapes = dict.fromkeys(names, (SIZE, WIDTH)) | {"wo": (WIDTH, SIZE)}
    tree = {name: {"weight": draw(size=shape).astype(np.float32)} for name, shape in shapes.items()}
    if bias:
        for name, (_, outputs) in shapes.items():
            tree[name]["bias"] = draw(size=outputs).astype(np.float32)
    return tree


def joined(tree):
    """The fused form of the same weights: branches concatenated."""
    branches = [tree[name] for name in sorted(tree) if name.startswith("wi")]
    wi = {"weight": np.stack([branch["weight"] for branch in branches], axis=1)}
    if "bias" in branches[0]:
        wi["bias"] = np.stack([branch["bias"] for branch in branches])
    return {"wi": wi, "wo": tree["wo"]}


def in_torch(tree, activations, x, dtype=torch.float32):
    x = torch.tensor(x, dtype=dtype)

    def product(layer, x):
        kernel, bias = (
            torch.tensor(part, dtype=dtype) for part in (layer["weight"], layer.get("bias", 0.0))
        )
        return x @ kernel + bias

    branches = [tree[name] for name in sorted(tree) if name.startswith("wi")]
    hidden = torch.ones(())
    for name, branch in zip(activations, branches, strict=True):
        hidden = hidden * TORCH[name](product(branch, x))
    return product(tree["wo"], hidden).numpy()


def in_both(tree, activations):
    return [
        in_torch(tree, activations, values(), dtype) for dtype in (torch.float32, torch.float64)
    ]


def values():
    return np.random.default_rng(5).normal(size=(2, 3, SIZE)).astype(np.float32)


CASES = [(name,) for name in TORCH] + [
    ("silu", "linear"),
    ("gelu", "linear"),
    ("relu", "tanh", "linear"),
]


def test_every_activation_is_tested():
    assert set(ACTIVATIONS) == set(TORCH)


@pytest.mark.parametrize("activations", CASES, ids="-".join)
def test_torch(activations):
    bias = len(activations) == 1
    tree = weights(len(activations), bias)
    abstract = template(MlpSpec(WIDTH, activations, bias=bias))
    assert jax.tree.map(np.shape, tree) == jax.tree.map(lambda leaf: leaf.shape, abstract.weights)
    assert_within_rounding(apply(abstract.bind(tree), values()), *in_both(tree, activations))


@pytest.mark.parametrize(
    "activations", [("gelu",), ("silu", "linear"), ("relu", "tanh", "linear")], ids="-".join
)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_fused_is_unfused(activations, bias):
    tree = weights(len(activations), bias)
    abstract = template(MlpSpec(WIDTH, activations, bias=bias, fused=True))
    assert jax.tree.map(np.shape, joined(tree)) == jax.tree.map(
        lambda leaf: leaf.shape, abstract.weights
    )
    assert_within_rounding(
        apply(abstract.bind(joined(tree)), values()), *in_both(tree, activations)
    )


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
def test_limit(fused):
    """gpt-oss: values below and above the limit on either side, in both branches."""
    tree = weights(2, True) | {"wo": SHOW | {"bias": np.zeros(SIZE, np.float32)}}
    spec = MlpSpec(WIDTH, ("sigmoid", "linear"), bias=True, fused=fused, limit=1.5)
    y = apply(template(spec).bind(joined(tree) if fused else tree), values())
    gate, up = (values() @ tree[name]["weight"] + tree[name]["bias"] for name in ("wi_0", "wi_1"))
    for branch in (gate, up):
        assert branch.min() < -1.5
        assert branch.max() > 1.5
        assert abs(branch).min() < 1.5
    gate, up = np.minimum(gate, 1.5), np.clip(up, -1.5, 1.5)
    np.testing.assert_allclose(
        y, (gate / (1 + np.exp(-1.702 * gate)) * (up + 1))[..., :SIZE], atol=2e-5
    )


def test_float32_activations():
    """In bfloat16 the two branches are rounded before they meet; in float32 only their product
    is.
    """
    tree = weights(2, False) | {"wo": SHOW}
    x = jnp.asarray(values(), jnp.bfloat16)
    gate, up = (
        np.asarray(x @ jnp.asarray(tree[name]["weight"], jnp.bfloat16), np.float64)
        for name in ("wi_0", "wi_1")
    )
    exact = (gate / (1 + np.exp(-gate)) * up)[..., :SIZE]
    off = {}
    for float32 in (False, True):
        spec = MlpSpec(WIDTH, ("silu", "linear"), float32=float32)
        y = apply(template(spec, "bfloat16").bind(tree), x)
        assert y.dtype == jnp.bfloat16
        off[float32] = np.abs(np.asarray(y, np.float64) / exact - 1).max()
    assert off[True] <= 2**-8 < off[False]


def test_dropout_is_on_the_hidden_values():
    """Kept ones are scaled by 1 / (1 - rate)."""
    tree = weights(1, False) | {"wo": SHOW}
    mlp = template(MlpSpec(WIDTH, ("relu",), dropout_rate=0.25)).bind(tree)
    plain = np.asarray(apply(mlp, values()))
    np.testing.assert_allclose(
        plain, np.maximum(values() @ tree["wi"]["weight"], 0)[..., :SIZE], atol=1e-5
    )
    dropped = np.asarray(apply(mlp, values(), jax.random.key(0)))
    kept = dropped != 0
    np.testing.assert_allclose(dropped[kept], plain[kept] / 0.75, rtol=1e-5)
    assert 0 < (~kept & (plain > 0)).sum() < (plain > 0).sum()
    np.testing.assert_array_equal(dropped, apply(mlp, values(), jax.random.key(0)))
