"""One decoder layer: a mixer and a feed-forward, each behind a norm and added to the stream."""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxtext.layers.attention import Attention, AttentionSpec
from maxtext.layers.inputs import LayerInputs
from maxtext.layers.linear import dropout
from maxtext.layers.mlp import Mlp, MlpSpec
from maxtext.layers.norms import Norm, NormSpec
from maxtext.layers.parameters import Maker
from maxtext.sharding import constrain


@dataclass(frozen=True)
class LayerSpec:
    """What a layer is made of. `parallel`: mixer and feed-forward read the same normed input."""

    size: int
    attention: AttentionSpec
    mlp: MlpSpec
    norm: NormSpec
    parallel: bool = False
    post_attention_norm: bool = False  # a norm on the mixer's output, before it is added
    post_mlp_norm: bool = False
    dropout_rate: float = 0.0

    def build(self, maker: Maker, dtype: Any) -> nnx.Module:
        return Block(maker, self, dtype)


class Block(nnx.Module):
    def __init__(self, maker: Maker, spec: LayerSpec, dtype: Any):
        self.spec = spec
        self.attention_norm = Norm(maker, spec.norm, spec.size, dtype)
        self.attention = Attention(maker.child(0), spec.attention, spec.size, dtype)
        self.mlp = Mlp(maker.child(1), spec.mlp, spec.size, dtype)
        if not spec.parallel:
            self.mlp_norm = Norm(maker, spec.norm, spec.size, dtype)
        if spec.post_attention_norm:
            self.post_attention_norm = Norm(maker, spec.norm, spec.size, dtype)
        if spec.post_mlp_norm:
            self.post_mlp_norm = Norm(maker, spec.norm, spec.size, dtype)

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        x = stream(checkpoint_name(x, "decoder_layer_input"))
        keys = (None, None, None) if inputs.key is None else jax.random.split(inputs.key, 3)
        if self.spec.parallel:
            normed = self.attention_norm(x)
            return stream(x + self.drop(self.attention(normed, inputs) + self.mlp(normed, keys[2]), keys[0]))
        x = stream(x + self.drop(self.mix(self.attention_norm(x), inputs), keys[0]))
        return stream(x + self.drop(self.feed(self.mlp_norm(x), keys[2]), keys[1]))

    def mix(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        x = self.attention(x, inputs)
        return self.post_attention_norm(x) if self.spec.post_attention_norm else x

    def feed(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        x = self.mlp(x, key)
        return self.post_mlp_norm(x) if self.spec.post_mlp_norm else x

    def drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return dropout(x, self.spec.dropout_rate, key)


def stream(x: jax.Array) -> jax.Array:
    return constrain(x, "activation_batch", "activation_norm_length", "activation_embed")
