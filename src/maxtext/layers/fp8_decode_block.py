"""Decoder layers with fp8 weights whose decode steps extend several sequences on one NVIDIA GPU:
norms and gates are fused into the kernels that quantize rows. `kernels/decode/fp8_rows.py` has the
formulas.

Steps of few rows, which are not quantized, and prefill run as in `Block`.

Shapes: B rows of one token, M = B rows, E embed_dim.
"""

import math

import jax

from maxtext.kernels.decode.fp8_rows import (
    gate_quantize_rows,
    norm_quantize_rows,
    quantize_rows,
)
from maxtext.kernels.fp8.quantize import QuantizedTensor, accum_dtype, contract
from maxtext.kernels.triton.rowwise import MAX_COLUMNS
from maxtext.kernels.weight_matmul import LAST, WEIGHT_ONLY_ROWS, fp8_matmul
from maxtext.kernels.weight_only import FP8, QuantizedWeight
from maxtext.layers.attention import attends_in_place
from maxtext.layers.block import Block, normalize
from maxtext.layers.context import INFERENCE, BuildContext
from maxtext.layers.gemv_block import (
    attention_spec_reason,
    mlp_spec_reason,
    residual_spec_reason,
)
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import Linear, PackedLinear
from maxtext.layers.mlp import ACTIVATIONS
from maxtext.layers.norms import Norm
from maxtext.layers.specs import AttentionSpec, LayerSpec, MlpSpec
from maxtext.layers.weight_layout import packing_unsupported_reason


class Fp8DecodeAttentionBlock(Block):
    """x + attention(norm(x)), with the norm fused into the kernel that quantizes it."""

    name = "fp8 decode attention"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return attention_unsupported_reason(spec, context)

    def decode_attention(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        if not quantizes(x) or not attends_in_place(inputs) or inputs.reports_attention:
            return super().decode_attention(x, inputs)
        attention = self.attention
        qkv = project(attention.packed_qkv, quantize_norm(self.attention_norm, x))
        q, k, v = attention.split(qkv, inputs)
        context, aux = attention.attend_in_place(q, k, v, inputs)
        attn_out = project(attention.out, quantize_rows(context.reshape(len(x), -1)))
        return materialize(x + normalize(self.post_attention_norm, attn_out[:, None])), aux


class Fp8DecodeMlpBlock(Block):
    """x + mlp(norm(x)), with the norm and the gate fused into the kernels that quantize them."""

    name = "fp8 decode MLP"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return mlp_unsupported_reason(spec, context)

    def decode_mlp(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        if not quantizes(x):
            return super().decode_mlp(x, inputs)
        mlp = self.mlp
        h, weight = quantize_norm(self.mlp_norm, x), quantized_weight(mlp.gate_up)
        product = contract(h.qvalue, weight.qvalue, LAST, accum_dtype(x.dtype))
        activation = ACTIVATIONS[mlp.spec.activations[0]]
        hidden = gate_quantize_rows(product, h.scale, weight.scale, activation)
        mlp_out = project(mlp.wo, hidden).reshape(x.shape)
        return materialize(x + normalize(self.post_mlp_norm, mlp_out)), {}


class Fp8DecodeBlock(Fp8DecodeAttentionBlock, Fp8DecodeMlpBlock):
    name = "fp8 decode"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return attention_unsupported_reason(spec, context) or mlp_unsupported_reason(spec, context)


def quantizes(x: jax.Array) -> bool:
    """Whether the rows of x [B, S, E] are quantized for matmuls with fp8 weights."""
    return math.prod(x.shape[:-1]) > WEIGHT_ONLY_ROWS


def materialize(x: jax.Array) -> jax.Array:
    """x, written once: XLA would compute a sum of residuals again wherever it is added to."""
    return jax.lax.optimization_barrier(x)


def quantize_norm(norm: Norm | None, x: jax.Array) -> QuantizedTensor:
    """The norm of x [..., E], quantized by rows, [M, E]."""
    assert norm is not None
    assert norm.scale is not None
    offset = 1.0 if norm.spec.offset else 0.0
    x = x.reshape(-1, x.shape[-1])
    return norm_quantize_rows(x, norm.scale[...], norm.spec.epsilon, offset)


def project(linear: Linear | PackedLinear, x: QuantizedTensor) -> jax.Array:
    """x times the weight plus the bias, [M, N]."""
    y, bias = fp8_matmul(x, quantized_weight(linear), LAST, linear.dtype), linear.bias
    return y if bias is None else y + bias[...].reshape(-1).astype(linear.dtype)


def quantized_weight(linear: Linear | PackedLinear) -> QuantizedTensor:
    """The transposed weight: qvalue [N, K] and scale [N]."""
    weight = linear.weight[...]
    assert isinstance(weight, QuantizedWeight)
    return QuantizedTensor(weight.qvalue, weight.scale[:, 0])


def attention_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    if (reason := attention_spec_reason(spec)) is not None:
        return reason
    attention = spec.attention
    assert isinstance(attention, AttentionSpec)
    inputs = attention.query_heads * attention.head_dim
    return (
        attention.split_qkv_unsupported_reason
        or columns_unsupported_reason([spec.embed_dim, inputs])
        or fusion_unsupported_reason(spec, context)
    )


def mlp_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    if (reason := mlp_spec_reason(spec)) is not None:
        return reason
    mlp = spec.mlp
    assert isinstance(mlp, MlpSpec)
    if mlp.fused:
        return "fuses separate gate and up projections only"
    return columns_unsupported_reason(
        [spec.embed_dim, mlp.hidden_dim]
    ) or fusion_unsupported_reason(spec, context)


def columns_unsupported_reason(sizes: list[int]) -> str | None:
    if max(sizes) > MAX_COLUMNS:
        return f"rows of {max(sizes)} are longer than {MAX_COLUMNS}"
    return None


def fusion_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    if context.decode_rows == 1:
        return "decodes several sequences"
    if context.quantized_weights != FP8:
        return "needs fp8 weights"
    if context.dtype != "bfloat16":
        return f"needs dtype=bfloat16, not {context.dtype}"
    return (
        residual_spec_reason(spec)
        or context.eight_bit_unsupported_reason()
        or packing_unsupported_reason(context)
        or context.single_gpu_unsupported_reason((8, 9))
    )
