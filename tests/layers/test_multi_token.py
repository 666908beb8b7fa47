"""Multi-token prediction against torch, written from the DeepSeek-V3 report; targets and masks
against written-out rows.
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
from maxtext.layers.multi_token import MultiTokenSpec, count_accepted, mtp_targets, shift_left
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import NormSpec
from maxtext.layers.stack import RematTensors

EMBED_DIM, VOCABULARY, EPSILON = 6, 11, 1e-2
BATCH, LENGTH, LAYERS = 2, 9, 3
SEGMENTS = np.array([[1] * 4 + [2] * 5, [1] * 6 + [2] * 2 + [0]], np.int32)


@dataclass(frozen=True)
class MixerSpec:
    """A stand-in for a decoder layer: a linear map of the sum over the document so far."""

    def build(self, initializer, dtype):
        return Mixer(initializer, dtype)


class Mixer(nnx.Module):
    def __init__(self, initializer, dtype):
        self.linear = build_linear(
            initializer,
            "linear",
            in_shape=(EMBED_DIM,),
            out_shape=(EMBED_DIM,),
            axes=("embed", "mlp"),
            dtype=dtype,
        )

    def __call__(self, x, inputs):
        visible = np.tril(np.ones((LENGTH, LENGTH), np.float32))[None]
        if inputs.segments is not None:
            visible = visible * (inputs.segments[:, :, None] == inputs.segments[:, None])
        past = jnp.einsum("bts,bs...->bt...", visible, x)
        report = {"ids": inputs.tokens.sum().astype(jnp.float32), "ndim": jnp.float32(x.ndim)}
        return x + jnp.tanh(self.linear(past)), report


def spec(**changes):
    return replace(MultiTokenSpec(LAYERS, MixerSpec(), NormSpec(epsilon=EPSILON)), **changes)


@lru_cache
def template(spec, remat=None, dtype="float32"):
    return Template.of(
        lambda: spec.build(
            Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, dtype, remat
        )
    )


def weights(spec):
    draw = np.random.default_rng(0).normal
    return jax.tree.map(
        lambda leaf: draw(size=leaf.shape).astype(np.float32), template(spec).weights
    )


def values():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(BATCH, LENGTH, EMBED_DIM)).astype(np.float32)
    table = generator.normal(size=(VOCABULARY, EMBED_DIM)).astype(np.float32)
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


def torch_reference(tree, x, table, tokens, segments):
    """Document by document. Module k sees only the positions i with i + k in the document (the
    report's T - k).
    """
    tree = jax.tree.map(torch.tensor, tree)
    table, tokens = torch.tensor(table), torch.tensor(tokens, dtype=torch.long)
    outputs = [torch.zeros(x.shape) for _ in range(LAYERS)]
    counted = np.zeros((LAYERS, *tokens.shape), bool)

    def norm(x, weight):
        return torch.nn.functional.rms_norm(x, (EMBED_DIM,), weight["scale"], EPSILON)

    for row in range(len(tokens)):
        for document in sorted(set(segments[row].tolist()) - {0}):
            positions = np.flatnonzero(segments[row] == document)
            ids, hidden = tokens[row, positions], x[row, positions]
            for k in range(1, LAYERS + 1):
                layer = tree["layers"][k - 1]
                length = len(positions) - k
                if length <= 0:
                    break
                embedded = table[ids[k:]]
                concatenated = torch.cat(
                    [
                        norm(embedded, layer["embedding_norm"]),
                        norm(hidden[:length], layer["hidden_norm"]),
                    ],
                    -1,
                )
                projected = concatenated @ layer["projection"]["weight"]
                hidden = projected + torch.tanh(
                    projected.cumsum(0) @ layer["block"]["linear"]["weight"]
                )
                outputs[k - 1][row, positions[:length]] = norm(hidden, layer["output_norm"])
                counted[k - 1][row, positions[:length]] = True
    return outputs, counted


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["rows", "documents"])
def test_outputs_and_gradients_match_torch(segments):
    """Outputs at every unmasked position, and the gradient of h_0."""
    tree = weights(spec())
    x, table, tokens = values()
    documents = np.ones_like(SEGMENTS) if segments is None else segments
    leaf = torch.tensor(x, requires_grad=True)
    expected, counted = torch_reference(tree, leaf, table, tokens, documents)
    cotangents = (
        np.random.default_rng(4).normal(size=(LAYERS, *x.shape)).astype(np.float32)
        * counted[..., None]
    )
    sum(
        (output * torch.tensor(dy)).sum() for output, dy in zip(expected, cotangents, strict=True)
    ).backward()

    @jax.jit
    def loss_and_gradients(tree, x):
        def loss(tree, x):
            outputs, _ = run(spec(), tree, x, table, tokens, segments)
            return sum(
                (output * dy).sum() for output, dy in zip(outputs, cotangents, strict=True)
            ), outputs

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(tree, x)

    (_, outputs), (dweights, dx) = loss_and_gradients(tree, jnp.asarray(x))
    assert len(outputs) == LAYERS
    assert counted.any(axis=(1, 2)).all()
    for output, right, mask in zip(outputs, expected, counted, strict=True):
        np.testing.assert_allclose(
            np.asarray(output)[mask], right.detach().numpy()[mask], atol=2e-5
        )
    np.testing.assert_allclose(dx, leaf.grad, atol=5e-5)
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(dweights))
    for k in range(1, LAYERS + 1):  # the loss masks are the report's T - k positions
        segments = jnp.asarray(documents)
        _, mask = mtp_targets(jnp.asarray(tokens), segments, segments, k)
        np.testing.assert_array_equal(mask, counted[k - 1])


def test_blocks_receive_shifted_tokens_and_report_aux():
    tree = weights(spec())
    x, table, tokens = values()
    _, aux = run(spec(), tree, jnp.asarray(x), table, tokens)
    np.testing.assert_array_equal(aux["ids"], [tokens[:, k:].sum() for k in range(1, LAYERS + 1)])
    np.testing.assert_array_equal(aux["ndim"], [3.0] * LAYERS)


def test_causal():
    """Layer k at position t sees the tokens up to t + k, and no more."""
    tree = weights(spec())
    x, table, tokens = values()
    before, _ = run(spec(), tree, jnp.asarray(x), table, tokens)
    at = 6
    tokens[:, at] = (tokens[:, at] + 1) % VOCABULARY
    after, _ = run(spec(), tree, jnp.asarray(x), table, tokens)
    for k, (old, new) in enumerate(zip(before, after, strict=True), start=1):
        changed = np.abs(np.asarray(old) - np.asarray(new)).max(-1) > 1e-6
        assert not changed[:, : at - k].any()
        assert changed[:, at - k].all()


def test_streams_are_expanded_and_collapsed():
    """The stand-in treats all streams alike; norms remove the factor, but for their epsilon."""
    exact = spec(norm=NormSpec(epsilon=0.0))
    tree = weights(exact)
    x, table, tokens = values()
    plain, _ = run(exact, tree, jnp.asarray(x), table, tokens)
    several, aux = run(replace(exact, streams=4), tree, jnp.asarray(x), table, tokens)
    np.testing.assert_array_equal(aux["ndim"], [4.0] * LAYERS)
    for expected, actual in zip(plain, several, strict=True):
        assert actual.shape == x.shape
        np.testing.assert_allclose(actual, expected, atol=1e-4)


def test_remat_does_not_change_gradients():
    tree = weights(spec())
    x, table, tokens = values()

    def loss(tree, remat):
        outputs, _ = run(spec(), tree, jnp.asarray(x), table, tokens, SEGMENTS, remat)
        return sum(jnp.sum(output**3) for output in outputs)

    plain, rematerialized = (
        jax.jit(jax.grad(lambda tree, remat=remat: loss(tree, remat)))
        for remat in (None, RematTensors())
    )
    expected = plain(tree)
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    jax.tree.map(
        lambda *pair: np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5 * largest),
        expected,
        rematerialized(tree),
    )
    tanhs = [str(jax.make_jaxpr(f)(tree)).count(" tanh ") for f in (plain, rematerialized)]
    assert tanhs == [LAYERS, 2 * LAYERS]  # recomputed in the backward pass


def test_shapes_and_axes():
    abstract = template(spec())
    layer = {
        "embedding_norm": {"scale": (EMBED_DIM,)},
        "hidden_norm": {"scale": (EMBED_DIM,)},
        "projection": {"weight": (2 * EMBED_DIM, EMBED_DIM)},
        "block": {"linear": {"weight": (EMBED_DIM, EMBED_DIM)}},
        "output_norm": {"scale": (EMBED_DIM,)},
    }
    shapes = jax.tree.map(lambda leaf: leaf.shape, abstract.weights)
    assert shapes == {"layers": dict.fromkeys(range(LAYERS), layer)}
    assert abstract.axes["layers"][0]["projection"] == {"weight": ("embed", "mlp")}
    module = spec().build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, "float32")
    weights = [np.asarray(layer.projection.weight[...]) for layer in module.layers]
    assert not np.array_equal(weights[0], weights[1])


TARGETS = np.array([[11, 12, 13, 21, 22, 23, 24, 0]])
DOCUMENTS = np.array([[1, 1, 1, 2, 2, 2, 2, 0]])
EXPECTED_TARGETS = {
    1: ([[12, 13, 21, 22, 23, 24, 0, 0]], [[1, 1, 0, 1, 1, 1, 0, 0]]),
    2: ([[13, 21, 22, 23, 24, 0, 0, 0]], [[1, 0, 0, 1, 1, 0, 0, 0]]),
    3: ([[21, 22, 23, 24, 0, 0, 0, 0]], [[0, 0, 0, 1, 0, 0, 0, 0]]),
    9: ([[0] * 8], [[0] * 8]),
}


@pytest.mark.parametrize("steps", EXPECTED_TARGETS)
def test_targets_and_masks(steps):
    segments = jnp.asarray(DOCUMENTS)
    targets, mask = mtp_targets(jnp.asarray(TARGETS), segments, segments, steps)
    np.testing.assert_array_equal(targets, EXPECTED_TARGETS[steps][0])
    np.testing.assert_array_equal(mask, np.array(EXPECTED_TARGETS[steps][1], bool))
    assert mask.dtype == bool


def test_last_position_of_a_row_is_masked():
    ones = jnp.ones((1, 4), jnp.int32)
    _, mask = mtp_targets(ones, ones, ones, 1)
    np.testing.assert_array_equal(mask, [[True, True, True, False]])


def test_first_learned_tokens_of_a_turn_are_targets():
    """A conversation of a prompt, a reply, a prompt and a reply: position t predicts token t+1+k,
    whatever the target of t itself is."""
    learned = jnp.array([[0, 0, 1, 1, 0, 0, 1, 1, 0, 0]])
    segments = jnp.array([[1, 1, 1, 1, 1, 1, 1, 1, 2, 2]])
    for steps, expected in {
        1: [[0, 1, 1, 0, 0, 1, 1, 0, 0, 0]],
        3: [[1, 0, 0, 1, 1, 0, 0, 0, 0, 0]],
    }.items():
        _, mask = mtp_targets(jnp.ones((1, 10), jnp.int32), learned, segments, steps)
        np.testing.assert_array_equal(mask, np.array(expected, bool))


def test_shift_left():
    values = np.arange(24).reshape(2, 4, 3)
    np.testing.assert_array_equal(shift_left(jnp.asarray(values), 0), values)
    np.testing.assert_array_equal(shift_left(jnp.asarray(values), 1)[:, :3], values[:, 1:])
    assert not np.any(shift_left(jnp.asarray(values), 1)[:, 3])
    assert not np.any(shift_left(jnp.asarray(values), 5))


def test_count_accepted():
    """The model predicts 5 6 7 8 at positions 0..3; layer 1 drafts for the next positions."""
    main, mask = jnp.array([[5, 6, 7, 8]]), jnp.array([[True, True, True, False]])
    drafts = jnp.array([[6, 9, 8, 0]])
    accepted, total = count_accepted(main, drafts, mask, 1)
    assert (float(accepted), float(total)) == (2.0, 3.0)
    accepted, total = count_accepted(
        main, jnp.array([[7, 8, 0, 0]]), jnp.array([[True, True, False, False]]), 2
    )
    assert (float(accepted), float(total)) == (2.0, 2.0)
