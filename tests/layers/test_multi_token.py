"""Multi-token prediction against torch, written from the DeepSeek-V3 report; targets and masks
against rows by hand.
"""

from dataclasses import dataclass, replace
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from maxtext.common import hash_rng
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.linear import build_linear
from maxtext.layers.multi_token import MultiTokenSpec, accepted, mtp_targets, shifted
from maxtext.layers.norms import NormSpec
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.stack import RematPolicy

SIZE, VOCABULARY, EPSILON = 6, 11, 1e-2
BATCH, LENGTH, LAYERS = 2, 9, 3
SEGMENTS = np.array([[1] * 4 + [2] * 5, [1] * 6 + [2] * 2 + [0]], np.int32)


@dataclass(frozen=True)
class MixerSpec:
    """A stand-in for a decoder layer: what came before in the document, summed, through a
    matrix.
    """

    def build(self, initializer, dtype):
        return Mixer(initializer, dtype)


class Mixer(nnx.Module):
    def __init__(self, initializer, dtype):
        self.linear = build_linear(
            initializer,
            "linear",
            in_shape=(SIZE,),
            out_shape=(SIZE,),
            axes=("embed", "mlp"),
            dtype=dtype,
        )

    def __call__(self, x, inputs):
        seen = np.tril(np.ones((LENGTH, LENGTH), np.float32))[None]
        if inputs.segments is not None:
            seen = seen * (inputs.segments[:, :, None] == inputs.segments[:, None])
        past = jnp.einsum("bts,bs...->bt...", seen, x)
        report = {"ids": inputs.tokens.sum().astype(jnp.float32), "width": jnp.float32(x.ndim)}
        return x + jnp.tanh(self.linear(past)), report


def spec(**changes):
    return replace(MultiTokenSpec(LAYERS, MixerSpec(), NormSpec(epsilon=EPSILON)), **changes)


@lru_cache
def template(spec, remat=None, dtype="float32"):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), SIZE, dtype, remat)
    )


def weights(spec):
    draw = np.random.default_rng(0).normal
    return jax.tree.map(
        lambda leaf: draw(size=leaf.shape).astype(np.float32), template(spec).weights
    )


def values():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(BATCH, LENGTH, SIZE)).astype(np.float32)
    table = generator.normal(size=(VOCABULARY, SIZE)).astype(np.float32)
    return x, table, generator.integers(1, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)


@partial(jax.jit, static_argnames=("spec", "remat"), inline=True)
def run(spec, tree, x, table, tokens, segments=None, remat=None):
    module = template(spec, remat).bind(tree)
    return module(
        x,
        lambda ids: table[ids],
        LayerInputs(jnp.zeros_like(tokens), segments, tokens=tokens),
        tokens,
    )


def in_torch(tree, x, table, tokens, segments):
    """Each document by itself. Module k sees only the places i with i + k in the document (the
    report's T - k).
    """
    tree = jax.tree.map(torch.tensor, tree)
    table, tokens = torch.tensor(table), torch.tensor(tokens, dtype=torch.long)
    outputs = [torch.zeros(x.shape) for _ in range(LAYERS)]
    counted = np.zeros((LAYERS, *tokens.shape), bool)

    def norm(x, weight):
        return torch.nn.functional.rms_norm(x, (SIZE,), weight["scale"], EPSILON)

    for row in range(len(tokens)):
        for document in sorted(set(segments[row].tolist()) - {0}):
            places = np.flatnonzero(segments[row] == document)
            ids, hidden = tokens[row, places], x[row, places]
            for k in range(1, LAYERS + 1):
                layer = tree["layers"][k - 1]
                left = len(places) - k
                if left <= 0:
                    break
                embedded = table[ids[k:]]
                joined = torch.cat(
                    [
                        norm(embedded, layer["embedding_norm"]),
                        norm(hidden[:left], layer["hidden_norm"]),
                    ],
                    -1,
                )
                merged = joined @ layer["projection"]["weight"]
                hidden = merged + torch.tanh(merged.cumsum(0) @ layer["block"]["linear"]["weight"])
                outputs[k - 1][row, places[:left]] = norm(hidden, layer["output_norm"])
                counted[k - 1][row, places[:left]] = True
    return outputs, counted


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["rows", "documents"])
def test_torch(segments):
    """Outputs at every place that counts, and the gradient of h_0."""
    tree = weights(spec())
    x, table, tokens = values()
    documents = np.ones_like(SEGMENTS) if segments is None else segments
    leaf = torch.tensor(x, requires_grad=True)
    expected, counted = in_torch(tree, leaf, table, tokens, documents)
    back = (
        np.random.default_rng(4).normal(size=(LAYERS, *x.shape)).astype(np.float32)
        * counted[..., None]
    )
    sum(
        (output * torch.tensor(one)).sum() for output, one in zip(expected, back, strict=True)
    ).backward()

    @jax.jit
    def both(tree, x):
        def loss(tree, x):
            outputs, _ = run(spec(), tree, x, table, tokens, segments)
            return sum(
                (output * one).sum() for output, one in zip(outputs, back, strict=True)
            ), outputs

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(tree, x)

    (_, outputs), (gradients, x_gradient) = both(tree, jnp.asarray(x))
    assert len(outputs) == LAYERS
    assert counted.any(axis=(1, 2)).all()
    for ours, theirs, mask in zip(outputs, expected, counted, strict=True):
        np.testing.assert_allclose(np.asarray(ours)[mask], theirs.detach().numpy()[mask], atol=2e-5)
    np.testing.assert_allclose(x_gradient, leaf.grad, atol=5e-5)
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(gradients))
    for k in range(1, LAYERS + 1):  # the masks of the loss are the report's T - k places
        _, mask = mtp_targets(jnp.asarray(tokens), jnp.asarray(documents), k)
        np.testing.assert_array_equal(mask, counted[k - 1])


def test_what_blocks_see_and_report():
    tree = weights(spec())
    x, table, tokens = values()
    _, aux = run(spec(), tree, jnp.asarray(x), table, tokens)
    np.testing.assert_array_equal(aux["ids"], [tokens[:, k:].sum() for k in range(1, LAYERS + 1)])
    np.testing.assert_array_equal(aux["width"], [3.0] * LAYERS)


def test_causal():
    """Layer k at place t knows the tokens up to t + k, and no more."""
    tree = weights(spec())
    x, table, tokens = values()
    before, _ = run(spec(), tree, jnp.asarray(x), table, tokens)
    at = 6
    tokens[:, at] = (tokens[:, at] + 1) % VOCABULARY
    after, _ = run(spec(), tree, jnp.asarray(x), table, tokens)
    for k, (one, other) in enumerate(zip(before, after, strict=True), start=1):
        changed = np.abs(np.asarray(one) - np.asarray(other)).max(-1) > 1e-6
        assert not changed[:, : at - k].any()
        assert changed[:, at - k].all()


def test_streams_go_in_as_copies_and_come_out_as_a_sum():
    """The stand-in does the same to every stream; norms take the factor away, but for their
    epsilon.
    """
    exact = spec(norm=NormSpec(epsilon=0.0))
    tree = weights(exact)
    x, table, tokens = values()
    plain, _ = run(exact, tree, jnp.asarray(x), table, tokens)
    several, aux = run(replace(exact, streams=4), tree, jnp.asarray(x), table, tokens)
    np.testing.assert_array_equal(aux["width"], [4.0] * LAYERS)
    for one, other in zip(plain, several, strict=True):
        assert other.shape == x.shape
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_rematerialization_changes_no_number():
    tree = weights(spec())
    x, table, tokens = values()

    def loss(tree, remat):
        outputs, _ = run(spec(), tree, jnp.asarray(x), table, tokens, SEGMENTS, remat)
        return sum(jnp.sum(output**3) for output in outputs)

    plain, again = (
        jax.jit(jax.grad(lambda tree, remat=remat: loss(tree, remat)))
        for remat in (None, RematPolicy())
    )
    expected = plain(tree)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda *two: np.testing.assert_allclose(*two, rtol=1e-4, atol=1e-5 * largest),
        expected,
        again(tree),
    )
    tanhs = [str(jax.make_jaxpr(one)(tree)).count(" tanh ") for one in (plain, again)]
    assert tanhs == [LAYERS, 2 * LAYERS]  # computed again in the backward pass


def test_shapes_and_axes():
    abstract = template(spec())
    layer = {
        "embedding_norm": {"scale": (SIZE,)},
        "hidden_norm": {"scale": (SIZE,)},
        "projection": {"weight": (2 * SIZE, SIZE)},
        "block": {"linear": {"weight": (SIZE, SIZE)}},
        "output_norm": {"scale": (SIZE,)},
    }
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract.weights)
    assert shapes == {"layers": dict.fromkeys(range(LAYERS), layer)}
    assert abstract.axes["layers"][0]["projection"] == {"weight": ("embed", "mlp")}
    made = spec().build(Initializer(hash_rng.key_from_seed(0), "float32"), SIZE, "float32")
    kernels = [np.asarray(one.projection.weight[...]) for one in made.layers]
    assert not np.array_equal(kernels[0], kernels[1])


TARGETS = np.array([[11, 12, 13, 21, 22, 23, 24, 0]])
DOCUMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0]])
BY_HAND = {
    1: ([[12, 13, 21, 22, 23, 24, 0, 0]], [[1, 1, 0, 1, 1, 1, 0, 0]]),
    2: ([[13, 21, 22, 23, 24, 0, 0, 0]], [[1, 0, 0, 1, 1, 0, 0, 0]]),
    3: ([[21, 22, 23, 24, 0, 0, 0, 0]], [[0, 0, 0, 1, 0, 0, 0, 0]]),
    9: ([[0] * 8], [[0] * 8]),
}


@pytest.mark.parametrize("steps", BY_HAND)
def test_targets_by_hand(steps):
    targets, mask = mtp_targets(jnp.asarray(TARGETS), jnp.asarray(DOCUMENTS), steps)
    np.testing.assert_array_equal(targets, BY_HAND[steps][0])
    np.testing.assert_array_equal(mask, np.array(BY_HAND[steps][1], bool))
    assert mask.dtype == bool


def test_row_of_one_document_ends():
    _, mask = mtp_targets(jnp.ones((1, 4), jnp.int32), jnp.ones((1, 4), jnp.int32), 1)
    np.testing.assert_array_equal(mask, [[True, True, True, False]])


def test_shifted():
    values = np.arange(24).reshape(2, 4, 3)
    np.testing.assert_array_equal(shifted(jnp.asarray(values), 0), values)
    np.testing.assert_array_equal(shifted(jnp.asarray(values), 1)[:, :3], values[:, 1:])
    assert not np.any(shifted(jnp.asarray(values), 1)[:, 3])
    assert not np.any(shifted(jnp.asarray(values), 5))


def test_accepted_by_hand():
    """The model says 5 6 7 8 at places 0..3; layer 1 drafts for the places after."""
    main, mask = jnp.array([[5, 6, 7, 8]]), jnp.array([[True, True, True, False]])
    drafted = jnp.array([[6, 9, 8, 0]])
    taken, total = accepted(main, drafted, mask, 1)
    assert (float(taken), float(total)) == (2.0, 3.0)
    taken, total = accepted(
        main, jnp.array([[7, 8, 0, 0]]), jnp.array([[True, True, False, False]]), 2
    )
    assert (float(taken), float(total)) == (2.0, 2.0)
