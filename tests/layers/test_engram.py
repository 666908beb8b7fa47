"""Engram against the paper, token by token in Python integers and in torch; compression against
`tokenizers`.
"""

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tokenizers import Regex, normalizers

from maxtext.common import hash_rng
from maxtext.layers.engram import compressed_ids, mod_uint64, multiply_uint64
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import Compression, EngramSpec, NormSpec
from maxtext.layers.specs.layer import head_primes

EMBED_DIM, VOCABULARY, EPSILON = 8, 50, 1e-2
BATCH, LENGTH = 2, 14
SEGMENTS = np.array([[1] * 5 + [2] * 1 + [3] * 6 + [0] * 2, [1] * 14], np.int32)


def spec(**changes):
    values = dict(
        heads=2,
        head_dim=3,
        vocabulary_bases=(20, 24),
        max_ngram=3,
        kernel_size=3,
        seed=5,
        layer=4,
        vocabulary=VOCABULARY,
        norm=NormSpec(epsilon=EPSILON),
        pad=7,
    )
    return EngramSpec(**(values | changes))


@lru_cache
def template(spec, dtype="float32"):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, dtype)
    )


def weights(spec, seed=0):
    draw = np.random.default_rng(seed).normal
    return jax.tree.map(
        lambda leaf: draw(size=leaf.shape).astype(np.float32), template(spec).weights
    )


def values(streams=None, seed=1):
    generator = np.random.default_rng(seed)
    shape = (BATCH, LENGTH, EMBED_DIM) if streams is None else (BATCH, LENGTH, streams, EMBED_DIM)
    return generator.normal(size=shape).astype(np.float32), tokens()


def tokens(vocabulary=VOCABULARY, seed=2):
    return np.random.default_rng(seed).integers(0, vocabulary, (BATCH, LENGTH)).astype(np.int32)


def inputs(tokens, segments=None):
    segments = None if segments is None else jnp.asarray(segments)
    return LayerInputs(jnp.zeros(tokens.shape, jnp.int32), segments, tokens=jnp.asarray(tokens))


def prime(number):
    return number > 1 and all(number % divisor for divisor in range(2, number))


def expected_rows(spec, ids, segments, pad):
    """Every n-gram in Python integers, which do not overflow."""
    vocabulary = spec.compression.size if spec.compression else spec.vocabulary
    draw = np.random.default_rng(spec.seed + 10007 * spec.layer)
    multipliers = [
        2 * int(r) + 1
        for r in draw.integers(0, ((2**63 - 1) // vocabulary) // 2, spec.max_ngram, dtype=np.int64)
    ]
    rows = np.zeros((*ids.shape, spec.heads * (spec.max_ngram - 1)), np.int64)
    for row, position in np.ndindex(*ids.shape):
        start, head = 0, 0
        for order in range(2, spec.max_ngram + 1):
            hashed = 0
            for back in range(order):
                at = position - back
                inside = at >= 0 and (
                    segments is None or segments[row, at] == segments[row, position]
                )
                hashed ^= (int(ids[row, at]) if inside else pad) * multipliers[back]
            assert 0 <= hashed < 2**63
            for _ in range(spec.heads):
                rows[row, position, head] = start + hashed % spec.primes[head]
                start += spec.primes[head]
                head += 1
    return rows


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(vocabulary_bases=(30, 20, 25), max_ngram=4, heads=3),
        dict(vocabulary=129280, vocabulary_bases=(226240, 226240), heads=8),
        dict(vocabulary=2**20, vocabulary_bases=(2**28, 2**20), heads=1, seed=2**40),
    ],
    ids=["small", "four-grams", "deepseek", "huge"],
)
def test_rows_match_python_integers(changes, segments):
    given = spec(**changes)
    ids = tokens(given.vocabulary)
    module = template(given).bind(template(given).weights)  # rows need no values
    rows = jax.jit(module.rows)(
        jnp.asarray(ids), None if segments is None else jnp.asarray(segments)
    )
    assert rows.dtype == jnp.int32
    np.testing.assert_array_equal(rows, expected_rows(given, ids, segments, given.pad))


def test_rows_of_compressed_ids():
    table = np.random.default_rng(3).integers(0, 9, VOCABULARY)
    given = spec(compression=Compression(table))
    rows = template(given).bind(template(given).weights).rows(jnp.asarray(tokens()), None)
    np.testing.assert_array_equal(
        rows, expected_rows(given, table[tokens()], None, int(table[given.pad]))
    )


def test_uint64_arithmetic_matches_numpy():
    """Products, and remainders by moduli of every size."""
    draw = np.random.default_rng(0).integers
    operands = np.concatenate([draw(0, 2**32, 500), [0, 1, 2**32 - 1, 2**16, 2**16 - 1]]).astype(
        np.uint32
    )
    for factor in (
        1,
        3,
        2**16 + 1,
        2**32 - 1,
        2**32 + 1,
        2**64 - 1,
        *(int(x) for x in draw(0, 2**63, 5)),
    ):
        high, low = multiply_uint64(jnp.asarray(operands), factor)
        expected = operands.astype(np.uint64) * np.uint64(factor)
        np.testing.assert_array_equal(
            np.asarray(high, np.uint64) << np.uint64(32) | np.asarray(low), expected
        )
        for moduli in ([2, 3], [65521, 65537], [226241, 1131203], [2**30 + 3, 2**31 - 1]):
            remainder = mod_uint64((high, low), np.array(moduli, np.uint32))
            np.testing.assert_array_equal(
                remainder, expected[:, None] % np.array(moduli, np.uint64)
            )


def test_head_primes_are_the_first_unused_ones():
    """All primes of a model differ, and none between the base and the last is skipped."""
    bases, heads, layers = (20, 24, 100), 3, 2
    primes = head_primes(bases, heads, layers)
    flat = [number for layer in primes for number in layer]
    assert all(prime(number) for number in flat)
    assert len(set(flat)) == len(flat) == layers * heads * len(bases)
    used = []
    for layer in primes:
        for order, base in enumerate(bases):
            for number in layer[order * heads : (order + 1) * heads]:
                skipped = [n for n in range(base, number) if prime(n) and n not in used]
                assert number >= base
                assert not skipped
                used.append(number)
    assert primes[0][:3] == (23, 29, 31)
    assert primes[0][3:6] == (37, 41, 43)
    assert (
        spec(layers=(1, 4)).primes
        == head_primes((20, 24), 2, 2)[1]
        != spec().primes
        == head_primes((20, 24), 2, 1)[0]
    )


def test_layers_hash_differently():
    assert spec(layer=1).multipliers != spec(layer=2).multipliers
    assert spec(seed=1).multipliers != spec(seed=2).multipliers
    assert spec(seed=10007, layer=1).multipliers == spec(seed=0, layer=2).multipliers
    assert all(number % 2 == 1 for number in spec().multipliers)


def torch_reference(spec, weights, x, ids, segments):
    """The paper for [B, S, k, E], residual stream by stream and document by document."""
    weights = jax.tree.map(torch.tensor, weights)
    rows = torch.tensor(expected_rows(spec, ids, segments, spec.pad))
    memory = weights["table"][rows].flatten(-2)
    streams = []

    def norm(x, name, stream):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)
        return x * weights[name]["scale"][stream]

    for stream in range(x.shape[2]):
        key = memory @ weights["key"]["weight"][:, stream] + weights["key"]["bias"][stream]
        query = norm(x[:, :, stream], "query_norm", stream)
        score = (query * norm(key, "key_norm", stream)).sum(-1) / math.sqrt(EMBED_DIM)
        gate = torch.sigmoid(torch.sign(score) * score.abs().sqrt())
        value = gate[..., None] * (memory @ weights["value"]["weight"] + weights["value"]["bias"])
        normed = norm(value, "convolution_norm", stream)
        convolution = torch.zeros_like(normed)
        weight = weights["convolution"][:, stream].T[:, None]  # [E, 1, taps]
        for row in range(len(ids)):
            documents = [torch.ones(LENGTH, dtype=bool)] if segments is None else []
            documents = documents or [
                torch.tensor(segments[row] == document) for document in set(segments[row].tolist())
            ]
            for inside in documents:
                padding = (spec.kernel_size - 1) * spec.max_ngram
                document = torch.nn.functional.pad(normed[row, inside].T, (padding, 0))
                convolved = torch.nn.functional.conv1d(
                    document[None], weight, dilation=spec.max_ngram, groups=EMBED_DIM
                )
                convolution[row, inside] = convolved[0].T
        streams.append(value + torch.nn.functional.silu(convolution))
    return torch.stack(streams, dim=2)


@pytest.mark.parametrize(
    ("streams", "segments"), [(1, None), (3, SEGMENTS)], ids=["plain", "streams"]
)
def test_output_and_gradients_match_torch(streams, segments):
    """Gradients of the residual streams."""
    given = spec(streams=streams)
    tree = weights(given)
    x, ids = values(streams)
    leaf = torch.tensor(x, requires_grad=True)
    expected = torch_reference(given, tree, leaf, ids, segments)
    dy = np.random.default_rng(9).normal(size=x.shape).astype(np.float32)
    expected.backward(torch.tensor(dy))

    abstract = template(given)

    @jax.jit
    def run(tree, x, dy):
        output, vjp = jax.vjp(
            lambda tree, x: abstract.bind(tree)(x, inputs(ids, segments)), tree, x
        )
        return output, *vjp(dy)

    output, dweights, dx = run(tree, jnp.asarray(x), jnp.asarray(dy))
    np.testing.assert_allclose(output, expected.detach(), atol=2e-5)
    np.testing.assert_allclose(dx, leaf.grad, atol=1e-4)
    assert all(np.all(np.isfinite(leaf)) and np.any(leaf) for leaf in jax.tree.leaves(dweights))
    used = np.unique(expected_rows(given, ids, segments, given.pad))
    np.testing.assert_array_equal(np.flatnonzero(np.abs(dweights["table"]).sum(-1)), used)


def test_one_stream_may_omit_its_dimension():
    given = spec()
    x, ids = values()
    module = jax.jit(template(given).bind(weights(given)))
    flat = module(jnp.asarray(x), inputs(ids))
    assert flat.shape == x.shape
    np.testing.assert_allclose(
        flat, module(jnp.asarray(x)[:, :, None], inputs(ids))[:, :, 0], atol=1e-6
    )


def test_shapes_and_axes():
    given = spec(streams=3)
    abstract = template(given)
    total = sum(given.primes)
    assert len(given.primes) == 4
    norm = {"scale": (3, EMBED_DIM)}
    assert jax.tree.map(lambda leaf: leaf.shape, abstract.weights) == {
        "table": (total, 3),
        "key": {"weight": (12, 3, EMBED_DIM), "bias": (3, EMBED_DIM)},
        "value": {"weight": (12, EMBED_DIM), "bias": (EMBED_DIM,)},
        "key_norm": norm,
        "query_norm": norm,
        "convolution_norm": norm,
        "convolution": (3, 3, EMBED_DIM),
    }
    assert abstract.axes["table"] == ("vocab", "embed_vocab")
    assert abstract.axes["key"] == {
        "weight": ("engram_dim", "mhc", "embed"),
        "bias": ("mhc", "embed"),
    }
    assert abstract.axes["value"] == {"weight": ("engram_dim", "embed"), "bias": ("embed",)}
    assert abstract.axes["key_norm"] == {"scale": ("mhc", "norm")}
    assert abstract.axes["convolution"] == (None, "mhc", "norm")


def test_causal():
    given = spec()
    x, ids = values()
    run = jax.jit(template(given).bind(weights(given)))
    before = np.asarray(run(jnp.asarray(x), inputs(ids)))
    at = 6
    for changed_x, changed_ids in ((x, ids.copy()), (x.copy(), ids)):
        if changed_x is x:
            changed_ids[:, at] = (changed_ids[:, at] + 1) % VOCABULARY
        else:
            changed_x[:, at] += 1
        after = np.asarray(run(jnp.asarray(changed_x), inputs(changed_ids)))
        changed = np.abs(after - before).max(-1) > 1e-6
        assert not changed[:, :at].any()
        assert changed[:, at].all()
        assert changed[:, at + given.max_ngram].any()  # the next tap of the convolution


def test_documents_do_not_affect_each_other():
    """The output of a document does not depend on its position in the row, nor on what precedes."""
    given = spec()
    x, ids = values()
    run = jax.jit(template(given).bind(weights(given)))
    packed = np.asarray(run(jnp.asarray(x), inputs(ids, SEGMENTS)))
    alone = np.asarray(run(jnp.asarray(x[:1, 6:12]), inputs(ids[:1, 6:12])))
    np.testing.assert_allclose(packed[:1, 6:12], alone, atol=1e-5)
    assert np.abs(np.asarray(run(jnp.asarray(x), inputs(ids)))[:1, 6:12] - alone).max() > 1e-2


def test_initialisation():
    """The convolution is zero, norms have scale 1, and gates are around one half."""
    module = spec().build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, "float32")
    assert not np.any(module.convolution[...])
    np.testing.assert_array_equal(module.key_norm.scale[...], np.ones((1, EMBED_DIM)))
    offset = spec(norm=NormSpec(epsilon=EPSILON, offset=True)).build(
        Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, "float32"
    )
    np.testing.assert_array_equal(offset.key_norm.scale[...], np.zeros((1, EMBED_DIM)))
    x, ids = values()
    np.testing.assert_allclose(
        offset(jnp.asarray(x), inputs(ids)), module(jnp.asarray(x), inputs(ids)), rtol=1e-5
    )
    value = np.asarray(module.value(module.lookup(jnp.asarray(ids), None)))
    gate = np.asarray(module(jnp.asarray(x), inputs(ids))) / value
    np.testing.assert_allclose(
        gate, gate[..., :1] + np.zeros(EMBED_DIM), atol=1e-5
    )  # one gate for all dimensions
    assert 0.1 < gate.min() < 0.5 < gate.max() < 0.9


def test_gradients_are_finite_at_a_score_of_zero():
    """Where the root has an infinite slope."""
    given = spec()
    tree = weights(given)
    _, ids = values()

    def total(tree, x):
        return template(given).bind(tree)(x, inputs(ids)).sum()

    gradients = jax.jit(jax.grad(total, argnums=(0, 1)))(
        tree, jnp.zeros((BATCH, LENGTH, EMBED_DIM))
    )
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


def test_bfloat16():
    given = spec(streams=2)
    tree = weights(given)
    x, ids = values(2)
    rounded = jnp.asarray(x, jnp.bfloat16)
    output = jax.jit(template(given, "bfloat16").bind(tree))(rounded, inputs(ids))
    assert output.dtype == jnp.bfloat16
    exact = np.asarray(
        jax.jit(template(given).bind(tree))(rounded.astype(jnp.float32), inputs(ids))
    )
    assert np.abs(np.asarray(output, np.float32) - exact).max() < 0.05 * np.abs(exact).max()


TEXTS = [
    "apple",
    " Apple",
    "APPLE ",
    "Äpple",
    "A\u0308pple",
    "\uff41\uff50\uff50\uff4c\uff45",
    "ﬁne",
    "fine",
    " ",
    "\n\n",
    "  \t",
    "",
    "\u0301",
    "½",
    "1⁄2",
    "a  b",
    "A\tb",
    "\u00a0x",
    "x",
    "\ufffd",
    "\ufffd",
    "é",
    "E",
    "İ",
    "ß",
    "ẞ",
    "日本",
    "Ω",
    "Ω",
    "\u200b",
    "a\u200b",
]


def test_compressed_ids():
    """Against the normalizers of `tokenizers`; parts of characters (�) are never merged."""
    pipeline = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        ]
    )
    strip, classes, expected = normalizers.Strip(), {}, []
    for index, text in enumerate(TEXTS):
        form = pipeline.normalize_str(text)
        form = form if form == " " else strip.normalize_str(form)
        key = index if "\ufffd" in text else form or text
        expected.append(classes.setdefault(key, len(classes)))
    ids = compressed_ids(TEXTS)
    assert ids.dtype == np.int32
    assert ids.tolist() == expected
    assert ids[:6].tolist() == [0] * 6
    assert ids[19] != ids[20]


def test_compression_compares_by_its_table():
    table = compressed_ids(TEXTS)
    assert (
        spec(compression=Compression(table))
        == spec(compression=Compression(table.copy()))
        != spec()
    )
    assert hash(Compression(table)) == hash(Compression(table.copy()))
    assert Compression(table) != Compression(table[::-1])
    assert Compression(table).size == len(set(table.tolist()))


@pytest.mark.parametrize(
    "changes",
    [
        dict(vocabulary_bases=(20,)),
        dict(max_ngram=1, vocabulary_bases=()),
        dict(layers=(1, 2)),
        dict(norm=NormSpec("layer")),
        dict(vocabulary_bases=(2**30, 2**30)),
    ],
)
def test_invalid_specs_raise(changes):
    with pytest.raises(ValueError, match="bases|not among|rms|31 bits"):
        spec(**changes)


def test_tokens_are_needed():
    x, ids = values()
    module = template(spec()).bind(weights(spec()))
    with pytest.raises(ValueError, match="token ids"):
        module(jnp.asarray(x), LayerInputs(jnp.zeros(ids.shape, jnp.int32)))
