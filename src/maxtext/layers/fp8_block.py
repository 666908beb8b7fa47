"""Decoder layers in fp8 on one NVIDIA GPU, with norms, RoPE, gates and residual sums fused into the
kernels that quantize. `kernels/fp8/fused.py` has the formulas.

The fused kernels work on tiles of tokens, so tokens are padded to a multiple of the tile.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxtext.kernels.fp8 import fused, matmul
from maxtext.kernels.triton.rowwise import MAX_COLUMNS, TILE
from maxtext.layers import rope
from maxtext.layers.attention import PROJECTED
from maxtext.layers.block import Block
from maxtext.layers.context import TRAIN, BuildContext
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import Linear, order_weight_grads
from maxtext.layers.mlp import ACTIVATIONS
from maxtext.layers.specs import AttentionSpec, LayerSpec, MlpSpec

UNSUPPORTED_ACTIVATIONS = ("gelu_exact",)  # by the compiler of the kernels
# Names of intermediates for rematerialization.
OUT_TAG = partial(checkpoint_name, name="out_proj")
GATE_TAGS = partial(checkpoint_name, name="mlpwi_0"), partial(checkpoint_name, name="mlpwi_1")


class Fp8AttentionBlock(Block):
    """Attention with the norm, QKV and RoPE fused."""

    name = "fp8 attention"
    mode = TRAIN

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return attention_unsupported_reason(spec, context)

    def attention_residual(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        x, context, aux = self.attend(x, inputs)
        attn_out = self.attention.project_out(context, x)
        return x + self.attention_output(attn_out, inputs), aux

    def attend(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, jax.Array, Aux]:
        """x unchanged, for its gradient to pass through the fused kernel, and the context
        [B, S, H, D]."""
        attention, norm = self.attention, self.attention_norm
        assert norm is not None
        spec: AttentionSpec = attention.spec
        weights = [cast_weight(getattr(attention, name)) for name in spec.projections]
        tokens = x.shape[:-1]
        cos_sin: tuple[jax.Array, ...] = ()
        if fuses_rope(spec):
            assert spec.rope is not None
            cos_sin = rope.rope_cos_sin(inputs.positions, spec.rope, spec.head_dim)
        x, outputs = fused.norm_qkv(
            pad_tokens(x, tokens),
            norm.factors,
            tuple(weights),
            tuple(pad_tokens(part, tokens) for part in cos_sin),
            rope.rotate_pairs if cos_sin else None,
            norm.spec.epsilon,
            norm.dtype,
        )
        x = remove_padding(x, tokens)
        q, k, v = (
            checkpoint_name(remove_padding(y, tokens), name)
            for y, name in zip(outputs, PROJECTED, strict=True)
        )
        if not cos_sin:
            q, k, v = attention.norm_and_rotate(q, k, v, inputs)
        return x, *attention.attend(q, k, v, inputs)


class Fp8MlpBlock(Block):
    """The MLP with its norm and gate fused."""

    name = "fp8 MLP"
    mode = TRAIN

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return mlp_unsupported_reason(spec, context)

    def mlp_residual(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        mlp, norm = self.mlp, self.mlp_norm
        assert norm is not None
        tokens = x.shape[:-1]
        # The activations that dw needs are freed before the gradients of earlier layers.
        x, weights = order_weight_grads(x, self.mlp_weights())
        activation = ACTIVATIONS[mlp.spec.activations[0]]
        x, mlp_out = fused.norm_mlp(
            pad_tokens(x, tokens),
            norm.factors,
            tuple(weights),
            norm.spec.epsilon,
            activation,
            GATE_TAGS,
            mlp.dtype,
        )
        x, mlp_out = remove_padding(x, tokens), remove_padding(mlp_out, tokens)
        return x + self.mlp_output(checkpoint_name(mlp_out, "mlpwo"), inputs), {}

    def mlp_weights(self) -> list[jax.Array]:
        mlp = self.mlp
        return [cast_weight(linear) for linear in (mlp.wi_0, mlp.wi_1, mlp.wo)]


class Fp8SublayersBlock(Fp8AttentionBlock, Fp8MlpBlock):
    """Both sublayers, each with its norm fused."""

    name = "fp8 attention and MLP"
    mode = TRAIN

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return attention_unsupported_reason(spec, context) or mlp_unsupported_reason(spec, context)


class Fp8FusedBlock(Fp8SublayersBlock):
    """The output projection, the residual sum, the norm and the MLP fused as well."""

    name = "fp8 fused"
    mode = TRAIN

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return (
            attention_unsupported_reason(spec, context)
            or mlp_unsupported_reason(spec, context)
            or ("has a post-attention norm" if spec.post_attention_norm else None)
            or ("has dropout" if spec.dropout_rate else None)
            or output_unsupported_reason(spec, context)
        )

    def __call__(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        x = self.read_residual(x, inputs)
        x, context, aux = self.attend(x, inputs.fold(0))
        mlp, norm = self.mlp, self.mlp_norm
        assert norm is not None
        tokens = x.shape[:-1]
        (x, context), (out, *weights) = order_weight_grads(
            (x, context), [cast_weight(self.attention.out), *self.mlp_weights()]
        )
        x, mlp_out = fused.out_norm_mlp(
            pad_tokens(x, tokens),
            pad_tokens(context, tokens),
            out,
            norm.factors,
            tuple(weights),
            norm.spec.epsilon,
            ACTIVATIONS[mlp.spec.activations[0]],
            (OUT_TAG, *GATE_TAGS),
            mlp.dtype,
        )
        x, mlp_out = remove_padding(x, tokens), remove_padding(mlp_out, tokens)
        x = x + self.mlp_output(checkpoint_name(mlp_out, "mlpwo"), inputs.fold(1))
        return self.scale_residual(x), aux


def attention_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    attention = spec.attention
    if not isinstance(attention, AttentionSpec):
        return f"fuses softmax attention, not {type(attention).__name__.removesuffix('Spec')}"
    if attention.fused or attention.shared_kv or attention.gated or attention.bias:
        return "fuses separate q, k and v projections without biases and gates only"
    outputs = [math.prod(shape) for shape in attention.projections.values()]
    reason = fusion_unsupported_reason(spec, spec.attention_norm, context)
    return reason or matmul_unsupported_reason(spec.embed_dim, outputs, context)


def mlp_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    mlp = spec.mlp
    if not isinstance(mlp, MlpSpec):
        return f"fuses gated MLPs, not {type(mlp).__name__.removesuffix('Spec')}"
    if not mlp.is_gated or mlp.bias or mlp.dropout_rate:
        return "fuses gated MLPs without biases, limits and dropout only"
    if mlp.activations[0] in UNSUPPORTED_ACTIVATIONS:
        return f"does not compute {mlp.activations[0]}"
    if 2 * mlp.hidden_dim > MAX_COLUMNS:
        return f"2 x {mlp.hidden_dim} hidden features are more than {MAX_COLUMNS}"
    return (
        fusion_unsupported_reason(spec, spec.mlp_norm, context)
        or matmul_unsupported_reason(spec.embed_dim, [mlp.hidden_dim] * 2, context)
        or matmul_unsupported_reason(mlp.hidden_dim, [spec.embed_dim], context)
    )


def output_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    attention: AttentionSpec = spec.attention
    if attention.out_bias or attention.output_dim not in (None, spec.embed_dim):
        return "fuses output projections to the residual's width without biases only"
    inputs = attention.query_heads * attention.head_dim
    return matmul_unsupported_reason(inputs, [spec.embed_dim], context)


def fusion_unsupported_reason(spec: LayerSpec, has_norm: bool, context: BuildContext) -> str | None:
    """Why the norm and the residual of a sublayer cannot be fused with its matmuls."""
    if context.precision != "fp8":
        return "needs quantization=fp8_full or fp8"
    if context.dtype != "bfloat16":
        return f"needs dtype=bfloat16, not {context.dtype}"
    if spec.parallel or spec.streams is not None:
        return "fuses sequential blocks with one residual stream only"
    if not has_norm or spec.norm.kind != "rms" or not spec.norm.scaled:
        return "needs RMSNorm with a scale before the sublayer"
    if spec.embed_dim > MAX_COLUMNS:
        return f"{spec.embed_dim} features are more than {MAX_COLUMNS}"
    return context.single_gpu_unsupported_reason((8, 9))


def matmul_unsupported_reason(inputs: int, outputs: list[int], context: BuildContext) -> str | None:
    shapes = [(inputs, size) for size in outputs]
    if matmul.supports((TILE, inputs), shapes, 1, context.only_platform):
        return None
    return f"a matmul {inputs} x {outputs} is not in tiles of {TILE}"


def fuses_rope(spec: AttentionSpec) -> bool:
    """Whether RoPE is all that queries and keys need, in a form that the kernels compute."""
    dim = spec.head_dim
    columns = (spec.query_heads + 2 * spec.kv_heads) * dim
    return (
        spec.fused_rope_unsupported_reason is None
        and dim.bit_count() == 1
        and columns <= MAX_COLUMNS
    )


def cast_weight(linear: Linear) -> jax.Array:
    return linear.weight[...].astype(linear.dtype)


def pad_tokens(x: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    """x [*tokens, ...], padded to whole tiles as [T, ...] if it does not have them."""
    count = math.prod(tokens)
    missing = -count % TILE
    if not missing:
        return x
    flat = x.reshape(count, *x.shape[len(tokens) :])
    return jnp.pad(flat, [(0, missing), *[(0, 0)] * (flat.ndim - 1)])


def remove_padding(x: jax.Array, tokens: tuple[int, ...]) -> jax.Array:
    count = math.prod(tokens)
    return x if not count % TILE else x[:count].reshape(*tokens, *x.shape[1:])
