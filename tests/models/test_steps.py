"""A model that is given a sequence in pieces, with what its layers keep, computes what it computes
of the whole.
"""

from functools import partial
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides
from maxtext.kernels.attention import AttentionMask
from maxtext.layers.cache import CacheConfig, SlidingWindowKVCache, empty_kv_cache
from maxtext.layers.inputs import LayerInputs
from maxtext.models.configuration import load
from maxtext.models.transformer import empty_caches, make_template
from tests.support.decoded_models import MODELS, SIZES

LENGTHS = (18, 12)  # of two rows
PIECES = (6, 5, 1, 1, 5)
LAYOUTS = {
    "a block each": (CacheConfig(2, 20, jnp.float32), [[0], [1]]),
    "blocks": (
        CacheConfig(2, 20, jnp.float32, block_size=4, num_blocks=12),
        [[3, 11, 0, 5, 7], [2, 4, 1, 9, 8]],
    ),
}


def stirred(path, leaf):
    """Values of a size that shows; to draw them as models do takes a program for each shape."""
    draw = np.random.default_rng(crc32(jax.tree_util.keystr(path).encode()))
    return np.float32(draw.normal(1.0 if path[-1].key == "scale" else 0.0, 0.2, leaf.shape))


# The parity tests generate with every family, in chunks, too.
@pytest.mark.representative(
    "causal-a block each",
    "window-a block each",
    "chunks-a block each",
    "delta-a block each",
    "streams-a block each",
    "learned positions-a block each",
    "causal-blocks",
    "latent-blocks",
)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(
            name, "a block each", marks=() if name in ("window", "causal") else pytest.mark.slow
        )
        for name in MODELS
    ]
    + [("causal", "blocks"), pytest.param("latent", "blocks", marks=pytest.mark.slow)],
)
def test_pieces_make_the_whole(name, layout):
    check_pieces(MODELS[name], layout, stirred)


def check_pieces(settings, layout, draw_weights):
    words = {word.partition("=")[0]: word for word in (*SIZES, *settings)}
    config = load(None, from_overrides(words.values()), environ={}, devices=Devices(1))
    template = make_template(config)
    weights = jax.tree.map_with_path(draw_weights, template.weights)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 41, (2, sum(PIECES))))
    places = jnp.broadcast_to(jnp.arange(sum(PIECES)), ids.shape)
    expected, _ = jax.jit(lambda weights: template.bind(weights).hidden(ids, LayerInputs(places)))(
        weights
    )

    cache_config, table = LAYOUTS[layout]
    caches = empty_caches(config, cache_config)
    found, start = [], 0

    @partial(jax.jit, static_argnums=4)
    def step(weights, ids, positions, caches, fresh):
        aligned = cache_config.block_size is None and ids.shape[1] == 1
        inputs = LayerInputs(
            positions,
            is_first_chunk=fresh,
            block_table=jnp.array(table),
            contiguous=aligned,
        )
        return template.bind(weights).step(ids, inputs, caches)[:2]

    for number, size in enumerate(PIECES):
        positions = places[:, start : start + size]
        # The shorter row has no more tokens in its last pieces.
        positions = jnp.where(positions < jnp.asarray(LENGTHS)[:, None], positions, -1)
        hidden, caches = step(weights, ids[:, start : start + size], positions, caches, number == 0)
        found.append(hidden)
        start += size
    found = jnp.concatenate(found, axis=1)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(
            found[row, :length], expected[row, :length], atol=2e-5, rtol=1e-4
        )


TIED = {
    # One scoring head: every key that it does not like has the score 0.
    "indexer": [
        *MODELS["keys and values of latents"],
        "use_indexer=true",
        "indexer_n_heads=1",
        "indexer_head_dim=8",
        "indexer_topk=4",
    ],
    "indexer of latents": [
        *MODELS["latent"],
        "use_indexer=true",
        "indexer_n_heads=1",
        "indexer_head_dim=8",
        "indexer_topk=4",
    ],
    "grouped experts": [
        *MODELS["latent"],
        "num_experts=8",
        "num_experts_per_tok=3",
        "n_routing_groups=4",
        "topk_routing_group=2",
        "routed_score_func=sigmoid",
        "routed_bias=true",
    ],
    "experts": [*MODELS["sinks, windows and experts"], "num_experts_per_tok=3"],
}


@pytest.mark.slow
@pytest.mark.representative("indexer of latents", "grouped experts")
@pytest.mark.parametrize("name", TIED)
def test_ties_are_broken_alike_in_pieces(name, monkeypatch):
    """Where many scores are equal: each pair of experts has one router weight, and keys score zero.

    On CPUs an indexer's ties need all tokens, so the rule of accelerators is put in its place.
    """
    monkeypatch.setattr("maxtext.layers.indexer.ties_depend_on_length", lambda: False)
    monkeypatch.setattr("maxtext.kernels.attention.topk.ties_depend_on_length", lambda: False)

    def tied(path, leaf):
        values = stirred(path, leaf)
        if any(getattr(key, "key", None) == "router" for key in path):
            values[..., 1::2] = values[..., ::2]
        return values

    check_pieces(TIED[name], "blocks", tied)


def test_a_sliding_window_cache_holds_the_last_tokens():
    """The token at position p is at p modulo the window; padding is not written."""
    cache_config = CacheConfig(2, 9, jnp.float32)
    cache = empty_kv_cache(AttentionMask(window=4), cache_config, {"key": (1,)})
    assert isinstance(cache, SlidingWindowKVCache)

    def update(cache, positions):
        new = {"key": positions[..., None].astype(jnp.float32) * 10}
        return cache.update(new, LayerInputs(positions, cache=cache))

    view, cache = update(cache, jnp.array([[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1]]))
    assert view.positions.shape == (2, 4 + 6)
    assert cache.position.tolist() == [[4, 5, 2, 3], [0, 1, -1, -1]]
    assert cache.arrays["key"][..., 0].tolist() == [[40, 50, 20, 30], [0, 10, 0, 0]]
    view, cache = update(cache, jnp.array([[6], [-1]]))
    assert cache.position.tolist() == [[4, 5, 6, 3], [0, 1, -1, -1]]
    assert view["key"][..., 0].tolist() == [[40, 50, 60, 30], [0, 10, 0, 0]]
    assert view.positions.tolist() == cache.position.tolist()


def test_layers_that_keep_nothing_say_so():
    for words in (["moba=true", "moba_chunk_size=4", "moba_topk=2"], ["decoder_block=simple"]):
        config = load(None, from_overrides([*SIZES, *words]), environ={}, devices=Devices(1))
        assert empty_caches(config, CacheConfig(1, 8, jnp.float32)) is None


def test_an_indexer_keeps_nothing_where_ties_depend_on_the_length(monkeypatch):
    words = {word.partition("=")[0]: word for word in (*SIZES, *TIED["indexer"])}
    config = load(None, from_overrides(words.values()), environ={}, devices=Devices(1))
    assert empty_caches(config, CacheConfig(1, 5, jnp.float32)) is None
    assert empty_caches(config, CacheConfig(1, 4, jnp.float32)) is not None  # it selects all keys
    monkeypatch.setattr("maxtext.layers.indexer.ties_depend_on_length", lambda: False)
    assert empty_caches(config, CacheConfig(1, 5, jnp.float32)) is not None
