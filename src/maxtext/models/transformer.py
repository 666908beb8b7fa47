"""The model: embed, run the layers, normalise, score the vocabulary."""

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxtext.common import hash_rng
from maxtext.configs.types import MaxTextConfig
from maxtext.kernels.cross_entropy import tiled_cross_entropy
from maxtext.layers import eight_bits
from maxtext.layers.block import LayerSpec
from maxtext.layers.cache import CacheSize
from maxtext.layers.embeddings import Embedding, Positions, sinusoids
from maxtext.layers.hyper_connections import collapse, expand
from maxtext.layers.inputs import Cache, LayerInputs
from maxtext.layers.linear import Linear, together, weights_first
from maxtext.layers.multi_token import MultiToken, MultiTokenSpec
from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Initializer, Template
from maxtext.layers.stack import STREAM, RematPolicy, Stack
from maxtext.models.common import norm_spec
from maxtext.models.registry import family, layers, segments
from maxtext.sharding import constrain
from maxtext.sharding.explicit import auto_sharded
from maxtext.sharding.manual import only_platform

Caches = list[Cache]
# Of products in eight bits, by `quantization`. Where weights are kept as integers, for inference,
# there is none.
RECIPES = {"int8": "int8", "fp8": "fp8", "fp8_gpu": "fp8", "fp8_full": "fp8"}


class Transformer(nnx.Module):
    def __init__(self, config: MaxTextConfig, key: jax.Array | None, loop: bool = False):
        quantization = config.quantization.value if config.quantization else ""
        recipe = RECIPES.get(quantization, "")
        initializer = Initializer(
            key, config.weight_dtype.value, config.dense_init_scale, recipe, loop
        )
        self.dtype = config.dtype.value
        self.embed_dim = config.emb_dim
        self.logit_dtype = "float32" if config.logits_dot_in_fp32 else self.dtype
        self.float32_logits = config.cast_logits_to_fp32
        self.logit_cap = config.final_logits_soft_cap or None
        self.logit_scale = (
            1 / math.sqrt(config.emb_dim) if config.normalize_embedding_logits else 1.0
        )
        self.fixed_positions = config.use_untrainable_positional_embedding
        self.embedding_scale = (
            math.sqrt(config.emb_dim) if family(config).scaled_embedding else None
        )
        self.streams = config.mhc_expansion_rate

        self.embedder = Embedding(
            initializer.child("embedder"),
            config.vocab_size,
            self.embed_dim,
            self.dtype,
            config.use_iota_embed,
        )
        learned = config.trainable_position_size
        self.positions = (
            Positions(initializer.child("positions"), learned, self.embed_dim, self.dtype)
            if learned > 0
            else None
        )
        stacks, first = [], 0
        layer_initializer = initializer.child("layers")
        for segment in segments(config):
            stacks.append(
                Stack(
                    layer_initializer,
                    segment,
                    first,
                    self.dtype,
                    config.scan_layers,
                    config.param_scan_axis,
                    remat(config),
                    config.parameter_memory_host_offload,
                )
            )
            first += segment.layers
        self.layers = nnx.List(stacks)
        self.mtp = multi_token(config, initializer.child("mtp"), self.dtype)
        self.final_norm = Norm(initializer, final_norm(config), self.embed_dim, self.dtype)
        if config.logits_via_embedding:
            self.head = None
        else:
            axes = ("embed_vocab", "vocab")
            exact = quantization != "fp8_full"
            self.head = Linear(
                initializer.child("head"),
                in_shape=(self.embed_dim,),
                out_shape=(config.vocab_size,),
                axes=axes,
                dtype=self.logit_dtype,
                exact=exact,
            )

    def __call__(
        self, inputs: jax.Array, positions: jax.Array, segments: jax.Array | None = None
    ) -> jax.Array:
        """Token ids [B, S] to logits [B, S, V]."""
        x, _ = self.hidden(inputs, LayerInputs(positions, segments))
        return self.logits(x)

    def hidden(self, ids: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict]:
        """Token ids [B, S] to the normed output of the last layer [B, S, E], and what the layers
        report.
        """
        x, reports = self.run(ids, inputs)
        return self.final_norm(x), reports

    def run(self, ids: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, dict]:
        """The output of the last layer, and {"layers": {segment: {"blocks": {place: {name:
        [repeats, ...]}}}}}.
        """
        graph, state = nnx.split((self.embedder, self.positions))
        x = auto_sharded(
            lambda state, ids, positions: self.enter(*nnx.merge(graph, state), ids, positions),
            state,
            ids,
            inputs.positions,
            out_axes=STREAM[3 if self.streams == 1 else 4],
        )
        inputs = replace(inputs, tokens=ids)
        reports = {}
        for number, stack in enumerate(self.layers):
            x, report = stack(x, inputs)
            reports[number] = {"blocks": report}
        if self.streams > 1:
            x = auto_sharded(collapse, x, out_axes=STREAM[3])
        return x, {"layers": reports}

    def step(self, ids: jax.Array, inputs: LayerInputs, caches: Caches) -> tuple[jax.Array, Caches]:
        """As `hidden`, for tokens that follow those in the caches, one a layer; and the caches with
        them.
        """
        x = self.enter(self.embedder, self.positions, ids, jnp.maximum(inputs.positions, 0))
        inputs = replace(inputs, tokens=ids)
        after, first = [], 0
        for stack in self.layers:
            x, extended = stack.step(x, inputs, caches[first : first + stack.segment.layers])
            after += extended
            first += stack.segment.layers
        return self.final_norm(x if self.streams == 1 else collapse(x)), after

    def enter(
        self, embedder: Embedding, positions: Positions | None, ids: jax.Array, places: jax.Array
    ) -> jax.Array:
        """What the first layer reads."""
        x = self.scaled(embedder(ids))
        if positions is not None:
            x = x + positions(places)
        if self.fixed_positions:
            x = x + sinusoids(places, self.embed_dim, self.dtype)
        return x if self.streams == 1 else expand(x, self.streams)

    def embed(self, ids: jax.Array) -> jax.Array:
        return self.scaled(self.embedder(ids))

    def scaled(self, x: jax.Array) -> jax.Array:
        return x if self.embedding_scale is None else x * jnp.asarray(self.embedding_scale, x.dtype)

    def logits(self, x: jax.Array) -> jax.Array:
        """[..., E] to [..., V]."""
        logits = self.scores(x)
        if self.float32_logits:
            logits = logits.astype(jnp.float32)
        return (
            logits if self.logit_cap is None else self.logit_cap * jnp.tanh(logits / self.logit_cap)
        )

    def scores(self, x: jax.Array) -> jax.Array:
        """Logits as the head gives them."""
        x = x.astype(self.logit_dtype)
        if x.ndim == 3:
            x = constrain(
                x, "activation_embed_and_logits_batch", "activation_length", "activation_embed"
            )
        if self.head is not None:
            [logits] = together(x, self.head, weights_early=True)
        else:
            x, table = weights_first(x, self.embedder.embedding[...].astype(self.logit_dtype))
            logits = x @ table.T * self.logit_scale
        if x.ndim == 3:
            logits = constrain(
                logits, "activation_embed_and_logits_batch", "activation_length", "activation_vocab"
            )
        return logits

    def losses(self, x: jax.Array, targets: jax.Array, tiles: int) -> tuple[jax.Array, jax.Array]:
        """`tiled_cross_entropy` of the logits of x [B, S, E]."""
        if self.logit_cap is not None:  # a kernel would need capped logits as an array of their own
            return tiled_cross_entropy(self.logits, x, targets, tiles)
        if tiles == 1 and self.head is not None:
            found = eight_bits.scored(self.head, x.astype(self.logit_dtype), targets)
            if found is not None:
                return found
        return tiled_cross_entropy(self.scores, x, targets, tiles, only_platform())


def empty_caches(config: MaxTextConfig, size: CacheSize) -> Caches | None:
    """One a layer; None: some layer needs all tokens anew."""
    caches = []
    for layer in layers(config):
        if not isinstance(layer, LayerSpec) or layer.engram is not None:
            return None
        cache = layer.attention.cache(size)
        if cache is None:
            return None
        caches.append(cache)
    return caches


def final_norm(config: MaxTextConfig) -> NormSpec:
    """The last norm is of the layers' kind; layers without norms get a plain one."""
    return getattr(layers(config)[-1], "norm", None) or norm_spec(config)


def multi_token(config: MaxTextConfig, initializer: Initializer, dtype: Any) -> MultiToken | None:
    """Layers like the last one that predict further tokens."""
    if not config.mtp_num_layers:
        return None
    block = replace(layers(config)[-1], engram=None)
    spec = MultiTokenSpec(
        config.mtp_num_layers, block, norm_spec(config), config.mhc_expansion_rate
    )
    return spec.build(initializer, config.emb_dim, dtype, remat(config))


def remat(config: MaxTextConfig) -> RematPolicy | None:
    if config.tensors_on_device is None or config.tensors_to_offload is None:
        return None
    return RematPolicy(tuple(config.tensors_on_device), tuple(config.tensors_to_offload))


def make_template(config: MaxTextConfig) -> Template:
    """The abstract model of a configuration."""
    return Template.of(lambda: Transformer(config, None))


def initial_weights(config: MaxTextConfig, loop: bool = False) -> Any:
    """Fresh weights as a nested dict; to be called under jit, so that they are born where they
    belong. `loop`: compiled faster, but not to be used one by one."""
    return nnx.to_pure_dict(
        nnx.state(Transformer(config, hash_rng.key_from_seed(config.init_weights_seed), loop))
    )
