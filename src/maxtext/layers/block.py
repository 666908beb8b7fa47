"""A decoder layer: attention and an MLP, each added to the residual.

Shapes: B batch, S sequence, E embedding; with hyper-connections the residual is [B, S, streams, E].
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from maxtext.layers.context import BuildContext
from maxtext.layers.hyper_connections import HyperConnection
from maxtext.layers.inputs import ATTENTION_OUTPUT, Aux, LayerInputs, Sublayer
from maxtext.layers.norms import Norm
from maxtext.layers.parameters import Initializer, dropout
from maxtext.layers.specs import LayerSpec, Spec
from maxtext.sharding import constrain

Forward = Callable[[jax.Array, LayerInputs], tuple[jax.Array, Aux]]


class Block(Sublayer):
    """x = x + attention(norm(x)); x = x + mlp(norm(x))"""

    name = "plain"
    mode: str | None = None

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return None

    def __init__(self, initializer: Initializer, spec: LayerSpec, dtype: DTypeLike):
        self.spec = spec
        dim = spec.embed_dim
        self.attention = spec.attention.build(initializer.child("attention"), dim, dtype)
        self.mlp = spec.mlp.build(initializer.child("mlp"), dim, dtype)

        def norm(present: bool) -> Norm | None:
            return Norm(initializer, spec.norm, dim, dtype) if present else None

        self.attention_norm = norm(spec.attention_norm)
        self.mlp_norm = norm(spec.mlp_norm and not spec.parallel)
        self.post_attention_norm = norm(spec.post_attention_norm)
        self.post_mlp_norm = norm(spec.post_mlp_norm)
        self.scale = (
            initializer.constant((1,), 1.0, (None,), trained=False) if spec.scaled else None
        )

        def optional(part: Spec | None, name: str) -> Any:
            return part.build(initializer.child(name), dim, dtype) if part else None

        self.attention_streams = optional(spec.streams, "attention_streams")
        self.mlp_streams = None if spec.parallel else optional(spec.streams, "mlp_streams")
        self.engram = optional(spec.engram, "engram")

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        x = self.read_residual(x, inputs)
        x, attention_aux = self.attention_residual(x, inputs.fold(0))
        x, mlp_aux = self.mlp_residual(x, inputs.fold(1))
        return self.scale_residual(x), attention_aux | mlp_aux

    def decode(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        x = self.read_residual(x, inputs)
        x, attention_aux = self.decode_attention(x, inputs.fold(0))
        x, mlp_aux = self.decode_mlp(x, inputs.fold(1))
        return self.scale_residual(x), attention_aux | mlp_aux

    def attention_residual(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        return self.add_attention(self.attention, x, inputs)

    def mlp_residual(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        return self.add_mlp(self.mlp, x, inputs)

    def decode_attention(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        return self.add_attention(self.attention.decode, x, inputs)

    def decode_mlp(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        return self.add_mlp(self.mlp.decode, x, inputs)

    def add_attention(
        self, attention: Forward, x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        h, connect = self.connect(self.attention_streams, x)
        attn_out, aux = attention(gather_sequence(normalize(self.attention_norm, h)), inputs)
        aux = report_attention(attn_out, aux, inputs)
        return connect(self.attention_output(attn_out, inputs)), aux

    def add_mlp(self, mlp: Forward, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        h, connect = self.connect(self.mlp_streams, x)
        mlp_out, aux = mlp(gather_sequence(normalize(self.mlp_norm, h)), inputs)
        return connect(self.mlp_output(mlp_out, inputs)), aux

    def attention_output(self, attn_out: jax.Array, inputs: LayerInputs) -> jax.Array:
        """The attention output that is added to the residual, after post-norm and dropout."""
        return self.drop(normalize(self.post_attention_norm, gather_sequence(attn_out)), inputs)

    def mlp_output(self, mlp_out: jax.Array, inputs: LayerInputs) -> jax.Array:
        return self.drop(normalize(self.post_mlp_norm, gather_sequence(mlp_out)), inputs)

    def connect(
        self, streams: HyperConnection | None, x: jax.Array
    ) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
        """The input of a sublayer, read from the residual, and a function that adds its output."""
        if streams is None:
            return x, lambda y: constrain_residual(x + y)
        h, state = streams.read(x)
        return h, lambda y: constrain_residual(streams.write(x, state, y))

    def drop(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        return dropout(x, self.spec.dropout_rate, inputs.fold(2).key)

    def read_residual(self, x: jax.Array, inputs: LayerInputs) -> jax.Array:
        x = constrain_residual(checkpoint_name(x, "decoder_layer_input"))
        return x if self.engram is None else constrain_residual(x + self.engram(x, inputs))

    def scale_residual(self, x: jax.Array) -> jax.Array:
        return (
            x if self.scale is None else x * jax.lax.stop_gradient(self.scale[...]).astype(x.dtype)
        )


class ParallelBlock(Block):
    """x = x + attention(n) + mlp(n), n = norm(x)"""

    name = "parallel"

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return None if spec.parallel else "attention and MLP are sequential"

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        return self.add_both(self.attention, self.mlp, x, inputs)

    def decode(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        return self.add_both(self.attention.decode, self.mlp.decode, x, inputs)

    def add_both(
        self, attention: Forward, mlp: Forward, x: jax.Array, inputs: LayerInputs
    ) -> tuple[jax.Array, Aux]:
        x, inputs = self.read_residual(x, inputs), inputs.fold(0)
        h, connect = self.connect(self.attention_streams, x)
        h = gather_sequence(normalize(self.attention_norm, h))
        attn_out, attention_aux = attention(h, inputs.fold(0))
        attention_aux = report_attention(attn_out, attention_aux, inputs)
        mlp_out, mlp_aux = mlp(h, inputs.fold(1))
        x = connect(self.drop(gather_sequence(attn_out + mlp_out), inputs))
        return self.scale_residual(x), attention_aux | mlp_aux


def report_attention(attn_out: jax.Array, aux: Aux, inputs: LayerInputs) -> Aux:
    """The auxiliary outputs, with that of attention if the inputs ask for it."""
    return aux | {ATTENTION_OUTPUT: attn_out} if inputs.reports_attention else aux


def normalize(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


def gather_sequence(x: jax.Array) -> jax.Array:
    """[B, S, E], sharded for matmuls: gathered along the sequence where norms shard it over devices
    that also shard heads and hidden dimensions. Else XLA may gather the weights instead."""
    return constrain(x, "activation_batch", "activation_length", "activation_embed")


def constrain_residual(x: jax.Array) -> jax.Array:
    """[B, S, E] or [B, S, streams, E], sharded for norms and residual sums."""
    streams = [None] * (x.ndim - 3)
    return constrain(x, "activation_batch", "activation_norm_length", *streams, "activation_embed")
