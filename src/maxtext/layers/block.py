"""One decoder layer: a mixer and a feed-forward, each added to the stream, which may be several
(hyper-connections).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers import eight_bits, one_token
from maxtext.layers.engram import EngramSpec
from maxtext.layers.hyper_connections import HyperConnectionSpec
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import dropout
from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Initializer
from maxtext.sharding import constrain


@dataclass(frozen=True)
class LayerSpec:
    """What a layer is made of. `attention` and `mlp` are specs of any mixer and any
    feed-forward.
    """

    embed_dim: int
    attention: Any
    mlp: Any
    norm: NormSpec
    parallel: bool = False  # mixer and feed-forward read the same normed input
    attention_norm: bool = True  # a norm on what the mixer reads
    mlp_norm: bool = True
    post_attention_norm: bool = False  # a norm on the mixer's output, before it is added
    post_mlp_norm: bool = False
    scaled: bool = False  # the layer's output times a number that is kept, and not learned
    dropout_rate: float = 0.0
    streams: HyperConnectionSpec | None = None
    engram: EngramSpec | None = None  # a memory of n-grams, added before the mixer

    def build(self, initializer: Initializer, dtype: Any) -> nnx.Module:
        return Block(initializer, self, dtype)


class Block(nnx.Module):
    def __init__(self, initializer: Initializer, spec: LayerSpec, dtype: Any):
        self.spec = spec
        self.attention = spec.attention.build(initializer.child("attention"), spec.embed_dim, dtype)
        self.mlp = spec.mlp.build(initializer.child("mlp"), spec.embed_dim, dtype)

        def norm(present: bool) -> Norm | None:
            return Norm(initializer, spec.norm, spec.embed_dim, dtype) if present else None

        self.attention_norm = norm(spec.attention_norm)
        self.mlp_norm = norm(spec.mlp_norm and not spec.parallel)
        self.post_attention_norm = norm(spec.post_attention_norm)
        self.post_mlp_norm = norm(spec.post_mlp_norm)
        self.scale = (
            initializer.constant((1,), 1.0, (None,), trained=False) if spec.scaled else None
        )
        connect = spec.streams.build if spec.streams else lambda *_: None
        self.attention_streams = connect(
            initializer.child("attention_streams"), spec.embed_dim, dtype
        )
        self.mlp_streams = (
            None
            if spec.parallel
            else connect(initializer.child("mlp_streams"), spec.embed_dim, dtype)
        )
        self.engram = (
            spec.engram.build(initializer.child("engram"), spec.embed_dim, dtype)
            if spec.engram
            else None
        )

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        x = stream(checkpoint_name(x, "decoder_layer_input"))
        if self.engram is not None:
            x = stream(x + self.engram(x, inputs))
        if self.spec.parallel:
            x, aux = self.add(
                x,
                self.attention_streams,
                self.attention_norm,
                lambda x: self.both(x, inputs.fold(0)),
            )
        elif (found := eight_bits.both(self, x, inputs)) is not None:
            x, aux = found
        else:
            x, mixer = (
                one_token.mixed(self, x, inputs)
                or eight_bits.mixed(self, x, inputs.fold(0))
                or self.add(
                    x,
                    self.attention_streams,
                    self.attention_norm,
                    lambda x: self.mix(x, inputs.fold(0)),
                )
            )
            x, feed = (
                one_token.fed(self, x, inputs)
                or eight_bits.fed(self, x, inputs.fold(1))
                or self.add(
                    x, self.mlp_streams, self.mlp_norm, lambda x: self.feed(x, inputs.fold(1))
                )
            )
            aux = mixer | feed
        return x if self.scale is None else x * jax.lax.stop_gradient(self.scale[...]).astype(
            x.dtype
        ), aux

    def add(
        self,
        x: jax.Array,
        streams: Any,
        norm: Norm | None,
        run: Callable[[jax.Array], tuple[jax.Array, Aux]],
    ) -> tuple[jax.Array, Aux]:
        """The stream with what a sub-layer makes of its norm."""
        if streams is None:
            y, aux = run(gathered(normed(norm, x)))
            return stream(x + y), aux
        read, state = streams.read(x)
        y, aux = run(gathered(normed(norm, read)))
        return stream(streams.write(x, state, y)), aux

    def mix(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        """What is added to the stream, of its norm; so do the next two."""
        y, aux = self.attention(x, inputs)
        return self.mixed(y, inputs), aux

    def feed(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        y, aux = self.mlp(x, inputs)
        return self.fed(y, inputs), aux

    def both(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        mixed, mixer = self.attention(x, inputs.fold(0))
        fed, feed = self.mlp(x, inputs.fold(1))
        return self.drop(gathered(mixed + fed), inputs), mixer | feed

    def mixed(self, y: jax.Array, inputs: LayerInputs) -> jax.Array:
        """What the mixer's result adds to the stream."""
        return self.drop(normed(self.post_attention_norm, gathered(y)), inputs)

    def fed(self, y: jax.Array, inputs: LayerInputs) -> jax.Array:
        return self.drop(normed(self.post_mlp_norm, gathered(y)), inputs)

    def drop(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        return dropout(x, self.spec.dropout_rate, inputs.fold(2).key)


def normed(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def gathered(x: jax.Array) -> jax.Array:
    """[B, S, E] as products need it: where norms split the sequence over devices that split heads
    and widths, it comes together here. Left to itself, the compiler may gather the weights
    instead."""
    return constrain(x, "activation_batch", "activation_length", "activation_embed")


def stream(x: jax.Array) -> jax.Array:
    """Lay out [B, S, E], or several streams [B, S, streams, E], as norms and residuals need it."""
    return constrain(
        x, "activation_batch", "activation_norm_length", *[None] * (x.ndim - 3), "activation_embed"
    )
