"""DeepSeek sparse attention against DeepSeek V3.2 of transformers, and the indexer's loss against
numpy.

Shapes: B batch, S sequence, T keys, E embed_dim, H heads.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    DeepseekV32RotaryEmbedding,
)

from maxtext.common import hash_rng
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.specs import IndexerSpec, MlaSpec, NormSpec, RopeSpec

BATCH, LENGTH, EMBED_DIM, HEADS, QUERY_RANK, RANK, NOPE, ROPE, VALUE = (
    2,
    15,
    24,
    4,
    12,
    16,
    10,
    8,
    6,
)
INDEX_HEADS, INDEX_DIM, TOPK = 8, 12, 5
SCALE = (NOPE + ROPE) ** -0.5
SEGMENTS = np.array([[1] * 6 + [2] * 7 + [0] * 2, [1] * LENGTH], np.int32)
PACKED = np.array([[*range(6), *range(7), *range(2)], [*range(LENGTH)]], np.int32)
ROWS = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))


def mla_spec(topk=TOPK, latent=False, **options):
    indexer = IndexerSpec(INDEX_HEADS, INDEX_DIM, ROPE, RopeSpec(), topk, **options)
    return MlaSpec(
        HEADS,
        RANK,
        NOPE,
        ROPE,
        VALUE,
        SCALE,
        RopeSpec(interleave=True),
        NormSpec(epsilon=1e-6),
        AttentionMask(),
        query_rank=QUERY_RANK,
        indexer=indexer,
        latent=latent,
    )


def template(spec):
    return Template.of(
        lambda: spec.build(Initializer(hash_rng.key_from_seed(0), "float32"), EMBED_DIM, "float32")
    )


def hidden(seed=3):
    return np.random.default_rng(seed).normal(size=(BATCH, LENGTH, EMBED_DIM)).astype(np.float32)


def layer_inputs(packed):
    if packed:
        return LayerInputs(jnp.asarray(PACKED), jnp.asarray(SEGMENTS))
    return LayerInputs(jnp.asarray(ROWS))


def visible(packed):
    mask = np.tril(np.ones((BATCH, LENGTH, LENGTH), bool))
    if packed:
        mask &= (SEGMENTS[:, :, None] == SEGMENTS[:, None, :]) & (SEGMENTS[:, :, None] != 0)
    return mask


def run(spec, tree, x, packed=False):
    model = template(spec)
    return jax.jit(lambda tree, x: model.bind(tree)(x, layer_inputs(packed)))(tree, x)


@pytest.fixture(scope="module")
def layer():
    config = DeepseekV32Config(
        hidden_size=EMBED_DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=QUERY_RANK,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROPE,
        qk_nope_head_dim=NOPE,
        v_head_dim=VALUE,
        max_position_embeddings=64,
        index_topk=TOPK,
        index_head_dim=INDEX_DIM,
        index_n_heads=INDEX_HEADS,
        attn_implementation="eager",
        rope_parameters=dict(rope_type="default", rope_theta=10000.0),
    )
    torch.manual_seed(0)
    layer = DeepseekV32Attention(config, 0)
    with torch.no_grad():
        for parameter in layer.parameters():  # all random, so that an unused one is noticed
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return layer.float().eval(), DeepseekV32RotaryEmbedding(config)


def from_hf(named):
    matrices = {
        ("query_a",): ("q_a_proj", (EMBED_DIM, QUERY_RANK)),
        ("query_b",): ("q_b_proj", (QUERY_RANK, HEADS, NOPE + ROPE)),
        ("kv_a",): ("kv_a_proj_with_mqa", (EMBED_DIM, RANK + ROPE)),
        ("kv_b",): ("kv_b_proj", (RANK, HEADS, NOPE + VALUE)),
        ("out",): ("o_proj", (HEADS, VALUE, EMBED_DIM)),
        ("indexer", "query"): ("indexer.wq_b", (QUERY_RANK, INDEX_HEADS, INDEX_DIM)),
        ("indexer", "key"): ("indexer.wk", (EMBED_DIM, INDEX_DIM)),
        ("indexer", "weight"): ("indexer.weights_proj", (EMBED_DIM, INDEX_HEADS)),
    }
    tree = {"indexer": {}}
    for path, (hf_name, shape) in matrices.items():
        branch = tree if len(path) == 1 else tree[path[0]]
        branch[path[-1]] = {"weight": named[f"{hf_name}.weight"].T.reshape(shape)}
    tree["query_norm"] = {"scale": named["q_a_layernorm.weight"]}
    tree["kv_norm"] = {"scale": named["kv_a_layernorm.weight"]}
    tree["indexer"]["key_norm"] = {
        "scale": named["indexer.k_norm.weight"],
        "bias": named["indexer.k_norm.bias"],
    }
    return tree


@pytest.fixture(scope="module")
def weights(layer):
    return from_hf({name: tensor.numpy() for name, tensor in layer[0].state_dict().items()})


def run_hf(layer, x, packed):
    attention, rotary = layer
    x = torch.tensor(x)
    mask = torch.where(torch.tensor(visible(packed))[:, None], 0.0, torch.finfo(torch.float32).min)
    positions = torch.tensor(PACKED if packed else ROWS)
    with torch.no_grad():
        return [part.numpy() for part in attention(x, rotary(x, positions), mask)]


# ---- numpy, from the paper: scores, attention weights and the loss


def apply_rope(x, positions, interleave):
    """x [B, S, H, P]: pairs of neighbours or of halves, as complex numbers times a rotation."""
    half = x.shape[-1] // 2
    pairs = x[..., 0::2] + 1j * x[..., 1::2] if interleave else x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * positions[:, :, None, None] * 10000.0 ** (-np.arange(half) / half))
    # Any order will do: only dot products are taken.
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def reference(tree, x, packed):
    """(scores [B, S, T], logits [B, H, S, T]) in float64."""
    tree, x = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree), x.astype(np.float64)
    positions = PACKED if packed else ROWS

    def normed(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale

    latent = normed(x @ tree["query_a"]["weight"], tree["query_norm"]["scale"])
    q = np.einsum("bsr,rhd->bshd", latent, tree["query_b"]["weight"])
    latent_and_rope = x @ tree["kv_a"]["weight"]
    k = normed(latent_and_rope[..., :RANK], tree["kv_norm"]["scale"])
    k = np.einsum("bsr,rhd->bshd", k, tree["kv_b"]["weight"])[..., :NOPE]
    logits = np.einsum("bshd,bthd->bhst", q[..., :NOPE], k)
    shared = apply_rope(latent_and_rope[:, :, None, RANK:], positions, True)[:, :, 0]
    logits += np.einsum("bshd,btd->bhst", apply_rope(q[..., NOPE:], positions, True), shared)

    index = tree["indexer"]
    query = np.einsum("bsr,rhd->bshd", latent, index["query"]["weight"])
    key = x @ index["key"]["weight"]
    key = key - key.mean(-1, keepdims=True)
    key = (normed(key, index["key_norm"]["scale"]) + index["key_norm"]["bias"])[:, :, None]
    query = np.concatenate([apply_rope(query[..., :ROPE], positions, False), query[..., ROPE:]], -1)
    key = np.concatenate([apply_rope(key[..., :ROPE], positions, False), key[..., ROPE:]], -1)[
        :, :, 0
    ]
    products = np.maximum(np.einsum("bshd,btd->bhst", query, key) * INDEX_DIM**-0.5, 0)
    scores = np.einsum("bsh,bhst->bst", x @ index["weight"]["weight"] * INDEX_HEADS**-0.5, products)
    return scores, SCALE * logits


def select(scores, mask):
    """The top visible keys of each query; no two scores around the cut are equal, so the selection
    is unique.
    """
    result = np.zeros_like(mask)
    for row, query in np.ndindex(mask.shape[:2]):
        keys = np.flatnonzero(mask[row, query])
        order = keys[np.argsort(-scores[row, query, keys])]
        if len(order) > TOPK:
            assert scores[row, query, order[TOPK - 1]] - scores[row, query, order[TOPK]] > 1e-4
        result[row, query, order[:TOPK]] = True
    return result


def loss(scores, logits, mask, real):
    """Token by token: KL between the normalised sum of the heads' softmax and the softmax of the
    scores.
    """
    divergences = []
    for row, query in np.argwhere(real):
        keys = mask[row, query]
        by_head = np.exp(logits[row, :, query, keys].T)
        target = (by_head / by_head.sum(-1, keepdims=True)).sum(0)
        target /= np.abs(target).sum()
        predicted = np.exp(scores[row, query, keys])
        divergences.append((target * np.log(target / (predicted / predicted.sum()))).sum())
    return np.mean(divergences)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_sparse_attention_matches_transformers(layer, weights, packed):
    x = hidden()
    expected, hf_weights = run_hf(layer, x, packed)
    spec = mla_spec()
    assert jax.tree.structure(weights) == jax.tree.structure(template(spec).weights)
    output, aux = run(spec, weights, x, packed)
    real = SEGMENTS != 0 if packed else np.ones_like(SEGMENTS, bool)
    np.testing.assert_allclose(output[real], expected[real], atol=2e-5)
    assert aux == {}
    # Attention is sparse, and the numpy reference selects the same keys.
    selected = select(reference(weights, x, packed)[0], visible(packed))
    assert selected[:, TOPK:].sum(-1).max() == TOPK
    assert ((hf_weights[:, 0] > 0) == selected)[real].all()


def test_weight_absorption_selects_the_same_keys(weights):
    x = hidden()
    plain, _ = run(mla_spec(), weights, x, packed=True)
    absorbed, _ = run(mla_spec(latent=True), weights, x, packed=True)
    np.testing.assert_allclose(absorbed, plain, atol=1e-4)


def test_all_keys_are_selected_if_there_are_few(weights):
    x = hidden()
    for topk in (LENGTH, LENGTH + 3):
        program = jax.make_jaxpr(
            lambda tree, x, k=topk: template(mla_spec(k)).bind(tree)(x, layer_inputs(False))
        )
        assert "top_k" not in str(program(weights, x))
    dense, _ = run(mla_spec(LENGTH), weights, x)
    sparse, _ = run(mla_spec(LENGTH - 1), weights, x)
    assert np.abs(dense - sparse)[:, -1].max() > 1e-5
    np.testing.assert_allclose(dense[:, :-1], sparse[:, :-1], atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
@pytest.mark.parametrize(
    ("packed", "latent"),
    [(False, False), (True, False), (True, True)],
    ids=["rows", "packed", "packed latent"],
)
def test_loss_is_the_kl_divergence(weights, packed, latent, sparse):
    x = hidden()
    output, aux = run(
        mla_spec(sparse_training=sparse, loss_factor=0.3, latent=latent), weights, x, packed
    )
    scores, logits = reference(weights, x, packed)
    mask = visible(packed)
    keys = select(scores, mask) if sparse else mask
    real = SEGMENTS != 0 if packed else np.ones_like(SEGMENTS, bool)
    np.testing.assert_allclose(
        aux["indexer_loss"], 0.3 * loss(scores, logits, keys, real), rtol=1e-5
    )
    # The warm-up attends to all keys.
    expected, _ = run(mla_spec(TOPK if sparse else LENGTH), weights, x, packed)
    np.testing.assert_allclose(output, expected, atol=1e-4)


def test_sparse_training_with_few_keys_uses_all(weights):
    x = hidden()
    _, sparse = run(mla_spec(LENGTH, sparse_training=True, loss_factor=1.0), weights, x)
    _, dense = run(mla_spec(LENGTH, sparse_training=False, loss_factor=1.0), weights, x)
    assert sparse["indexer_loss"] == dense["indexer_loss"] > 0


@pytest.mark.parametrize("sparse", [False, True], ids=["warm-up", "sparse"])
@pytest.mark.slow
def test_gradients_of_the_indexer_come_from_its_loss_alone(weights, sparse):
    """And those of all other weights from the output alone."""
    model = template(mla_spec(sparse_training=sparse, loss_factor=1.0))

    @jax.jit
    def gradients(tree, x):
        def parts(tree, x):
            output, aux = model.bind(tree)(x, layer_inputs(True))
            return (output**2).sum(), aux["indexer_loss"]

        _, vjp = jax.vjp(parts, tree, x)
        return vjp((1.0, 0.0)), vjp((0.0, 1.0))

    (from_output, x_output), (from_loss, x_loss) = gradients(weights, hidden())
    nonzero = jax.tree.map(lambda leaf: bool(jnp.abs(leaf).max() > 1e-6), from_output)
    assert not any(jax.tree.leaves(nonzero.pop("indexer")))
    assert all(jax.tree.leaves(nonzero))
    nonzero = jax.tree.map(lambda leaf: bool(jnp.abs(leaf).max() > 1e-6), from_loss)
    assert all(jax.tree.leaves(nonzero.pop("indexer")))
    assert not any(jax.tree.leaves(nonzero))
    assert jnp.abs(x_output).max() > 1e-6
    assert not jnp.abs(x_loss).any()
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((from_output, from_loss)))


def test_gradient_of_the_loss_matches_finite_differences(weights):
    """In float64 numpy, along one random direction; over all keys, where the loss is continuous."""
    x = hidden()
    model = template(mla_spec(loss_factor=1.0))
    draw = np.random.default_rng(1).normal
    direction = jax.tree.map(lambda leaf: draw(size=leaf.shape), weights["indexer"])

    def slope_of(tree):
        gradient = jax.grad(
            lambda tree: model.bind(tree)(x, layer_inputs(True))[1]["indexer_loss"]
        )(tree)
        return sum(
            jax.tree.leaves(
                jax.tree.map(lambda a, b: (a * b).sum(), gradient["indexer"], direction)
            )
        )

    def value(step):
        moved = jax.tree.map(
            lambda leaf, by: leaf.astype(np.float64) + step * by, weights["indexer"], direction
        )
        scores, logits = reference(weights | {"indexer": moved}, x, True)
        return loss(scores, logits, visible(True), SEGMENTS != 0)

    expected = (value(1e-6) - value(-1e-6)) / 2e-6
    np.testing.assert_allclose(jax.jit(slope_of)(weights), expected, rtol=1e-3)


def test_a_row_of_padding_has_a_finite_loss(weights):
    model = template(mla_spec(sparse_training=True, loss_factor=1.0))
    padding = LayerInputs(jnp.asarray(ROWS), jnp.zeros((BATCH, LENGTH), jnp.int32))

    def total(tree):
        output, aux = model.bind(tree)(hidden(), padding)
        return aux["indexer_loss"] + output.sum()

    value, gradient = jax.jit(jax.value_and_grad(total))(weights)
    assert value == 0
    assert not any(jnp.abs(leaf).any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_long_rows_are_scored_in_blocks(weights):
    """300 queries: two blocks of 128 and a rest; scores do not depend on the length of the row."""
    model = template(mla_spec(sparse_training=True, loss_factor=1.0))
    x = np.random.default_rng(9).normal(size=(1, 300, EMBED_DIM)).astype(np.float32)

    @jax.jit
    def run_row(tree, x):
        positions = jnp.arange(x.shape[1])[None]
        return model.bind(tree)(x, LayerInputs(positions, jnp.ones_like(positions)))

    long, aux = run_row(weights, x)
    short, _ = run_row(weights, x[:, :100])
    np.testing.assert_allclose(long[:, :100], short, atol=2e-5)
    assert jnp.isfinite(aux["indexer_loss"])
