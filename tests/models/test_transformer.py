"""The whole model: packed rows, padding, and the ways from hidden states to logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.layers.inputs import LayerInputs
from maxtext.models.configuration import load
from maxtext.models.registry import segments
from maxtext.models.transformer import make_template

VOCABULARY, LENGTH, SIZE = 32, 16, 12
WORDS = [
    f"vocab_size={VOCABULARY}", f"max_target_length={LENGTH}", f"base_emb_dim={SIZE}",
    "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=4", "base_mlp_dim=20",
    "base_num_decoder_layers=2", "dtype=float32", "attention=dot_product",
]  # fmt: skip
GPT = ["decoder_block=gpt3", "trainable_position_size=16", "mlp_activations=[gelu]"]


def configuration(*extra):
    given = {word.partition("=")[0] for word in extra}
    words = [word for word in WORDS if word.partition("=")[0] not in given]
    return load(None, [*words, *extra], environ={}, devices=Devices(1))


def random_weights(template):
    """Every weight is random, so that a forgotten one shows."""
    draw = np.random.default_rng(1).normal
    return jax.tree.map(lambda leaf: draw(size=leaf.shape).astype(leaf.dtype) / 2, template.weights)


# Packing.

KINDS = {
    "causal": [],
    "window": ["attention_type=local_sliding", "sliding_window_size=3"],
    "chunk": ["attention_type=chunk", "chunk_attn_window_size=4"],
    "full": ["attention_type=full"],
    "learned positions": GPT,
    "fixed positions": ["decoder_block=default", "use_untrainable_positional_embedding=true"],
}
FIRST, SECOND = 6, 7  # tokens of the documents; three of padding remain
DRAW = np.random.default_rng(0)
DOCUMENTS = [DRAW.integers(0, VOCABULARY, FIRST), DRAW.integers(0, VOCABULARY, SECOND)]


def row(*pieces):
    """(ids, positions, segments) of one row from (document, number) pieces and padding of token
    5.
    """
    fields = np.zeros((3, LENGTH), np.int32)
    fields[0], at = 5, 0
    for number, document in pieces:
        place = slice(at, at + len(document))
        fields[0, place], fields[1, place], fields[2, place] = (
            document,
            np.arange(len(document)),
            number,
        )
        at += len(document)
    return fields


@pytest.fixture(scope="module", params=KINDS)
def packed(request):
    """Logits [rows, S, V] of: both documents packed, the first alone, the second alone, other
    padding, all padding; and the gradients of the packed row's loss at its documents."""
    config = configuration(*KINDS[request.param])
    template = make_template(config)
    weights = random_weights(template)
    padded = row((1, DOCUMENTS[0]), (2, DOCUMENTS[1]))
    padded[0, FIRST + SECOND :], padded[1, FIRST + SECOND :] = [9, 2, 30], [8, 1, 4]
    rows = [
        row((1, DOCUMENTS[0]), (2, DOCUMENTS[1])),
        row((1, DOCUMENTS[0])),
        row((1, DOCUMENTS[1])),
        padded,
        row(),
    ]
    ids, positions, numbers = np.stack(rows, axis=1)

    def loss(weights):
        logits = template.bind(weights)(ids, positions, numbers)
        real = (numbers != 0)[..., None]
        return jnp.sum(jnp.where(real, jax.nn.log_softmax(logits), 0.0)), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)
    return np.asarray(logits), gradients


def test_packed_documents_do_not_see_each_other(packed):
    logits, _ = packed
    np.testing.assert_allclose(logits[0, :FIRST], logits[1, :FIRST], atol=2e-5)
    np.testing.assert_allclose(logits[0, FIRST : FIRST + SECOND], logits[2, :SECOND], atol=2e-5)


def test_padding_is_finite_and_without_effect(packed):
    logits, gradients = packed
    assert np.isfinite(logits).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    np.testing.assert_allclose(logits[3, : FIRST + SECOND], logits[0, : FIRST + SECOND], atol=1e-6)
    assert (
        np.abs(logits[3, FIRST + SECOND :] - logits[0, FIRST + SECOND :]).max() > 1e-3
    )  # they are other tokens


# Logits.


def model(*extra):
    config = configuration(*extra)
    template = make_template(config)
    weights = random_weights(template)
    return template.bind(weights), weights


HIDDEN = np.random.default_rng(8).normal(size=(2, LENGTH, SIZE)).astype(np.float32)


def test_tied_logits():
    """x E^T, divided by sqrt(E) unless normalize_embedding_logits is off."""
    for words, scale in (([], 1 / np.sqrt(SIZE)), (["normalize_embedding_logits=false"], 1.0)):
        native, weights = model("logits_via_embedding=true", *words)
        assert "head" not in weights
        expected = HIDDEN @ weights["embedder"]["embedding"].T * scale
        np.testing.assert_allclose(native.logits(HIDDEN), expected, atol=1e-5)


def test_untied_logits_are_not_scaled():
    native, weights = model()
    np.testing.assert_allclose(native.logits(HIDDEN), HIDDEN @ weights["head"]["weight"], atol=1e-5)
    np.testing.assert_allclose(
        native.logits(HIDDEN[0]), HIDDEN[0] @ weights["head"]["weight"], atol=1e-5
    )


def test_final_soft_cap():
    native, weights = model("final_logits_soft_cap=2.5")
    logits = HIDDEN.astype(np.float64) @ weights["head"]["weight"]
    assert np.abs(logits).max() > 5
    np.testing.assert_allclose(native.logits(HIDDEN), 2.5 * np.tanh(logits / 2.5), atol=1e-5)


def test_dtype_of_logits():
    """In bfloat16 the product is rounded; logits_dot_in_fp32 keeps it exact, cast_logits_to_fp32
    only casts.
    """
    x = jnp.asarray(HIDDEN, jnp.bfloat16)
    for words, dtype, error in (
        (["cast_logits_to_fp32=false"], "bfloat16", 2**-7),
        ([], "float32", 2**-7),
        (["logits_dot_in_fp32=true"], "float32", 1e-6),
    ):
        template = make_template(configuration("dtype=bfloat16", *words))
        kernel = np.random.default_rng(0).normal(size=(SIZE, VOCABULARY)).astype(np.float32)
        weights = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), template.weights)
        native = template.bind(weights | {"head": {"weight": kernel}}).logits(x)
        assert native.dtype == jnp.dtype(dtype)
        used = (
            kernel if error == 1e-6 else np.asarray(jnp.asarray(kernel, jnp.bfloat16), np.float64)
        )
        exact = np.asarray(x, np.float64) @ used
        off = np.abs(np.asarray(native, np.float64) - exact).max() / np.abs(exact).max()
        assert error / 100 < off < error or off < error == 1e-6


def test_one_hot_is_gather():
    """use_iota_embed changes how, not what."""
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))
    plain, weights = model("decoder_block=simple")
    one_hot = make_template(configuration("decoder_block=simple", "use_iota_embed=true")).bind(
        weights
    )
    assert one_hot.embedder.one_hot
    inputs = LayerInputs(jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)))
    np.testing.assert_allclose(
        one_hot.hidden(ids, inputs)[0], plain.hidden(ids, inputs)[0], atol=1e-6
    )


def test_simple_blocks_are_products():
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))
    inputs = LayerInputs(jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH)))
    for words in (["decoder_block=simple"], ["decoder_block=simple_mlp"]):
        native, weights = model(*words, "scan_layers=false")
        x = weights["embedder"]["embedding"][ids].astype(np.float64)
        for layer in range(2):
            for product in weights["layers"][0]["blocks"][0][layer]["products"].values():
                x = x @ product["weight"]
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights["final_norm"]["scale"]
        np.testing.assert_allclose(native.hidden(ids, inputs)[0], x, rtol=1e-4, atol=1e-4)


# Patterns.


def test_every_fourth_layer_without_rope():
    """Llama 4's and SmolLM 3's rule: layers 4, 8, … (counted from 1) have no rotary positions."""
    (segment,) = segments(configuration("base_num_decoder_layers=8", "nope_layer_interval=4"))
    assert segment.layers == 8
    ropes = [spec.attention.rope is not None for spec in segment.pattern * segment.repeats]
    assert ropes == [True, True, True, False] * 2


def test_cycles_hold_several_layers():
    (segment,) = segments(
        configuration("base_num_decoder_layers=6", "inhomogeneous_layer_cycle_interval=3")
    )
    assert (len(segment.pattern), segment.repeats) == (3, 2)
    cycle, rest = segments(
        configuration("base_num_decoder_layers=6", "inhomogeneous_layer_cycle_interval=4")
    )
    assert [(len(one.pattern), one.repeats) for one in (cycle, rest)] == [(4, 1), (1, 2)]


def test_patterns_are_found():
    """Five sliding layers to a global one, ending in the middle: whole patterns first, then what is
    left.
    """
    words = ("decoder_block=gemma3", "base_num_decoder_layers=20", "sliding_window_size=4")
    whole, rest = segments(configuration(*words))
    assert (len(whole.pattern), whole.repeats, len(rest.pattern), rest.repeats) == (6, 3, 1, 2)
    windows = [
        spec.attention.mask.window for spec in [*whole.pattern * whole.repeats, *rest.pattern * 2]
    ]
    assert windows == ([4] * 5 + [None]) * 3 + [4] * 2
