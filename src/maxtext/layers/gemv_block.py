"""Decoder layers whose decode steps extend a single sequence on one NVIDIA GPU: GEMV kernels with
the norm, RoPE, gate and residual sum fused. `kernels/decode/gemv.py` has the formulas.
"""

import math

import jax

from maxtext.kernels.decode import gemv
from maxtext.kernels.decode.gemv_products import NormedInput
from maxtext.layers.attention import QKV, attends_in_place
from maxtext.layers.block import Block, normalize
from maxtext.layers.context import INFERENCE, BuildContext
from maxtext.layers.inputs import Aux, LayerInputs
from maxtext.layers.linear import Linear
from maxtext.layers.mlp import ACTIVATIONS
from maxtext.layers.norms import Norm
from maxtext.layers.rope import rope_cos_sin
from maxtext.layers.specs import AttentionSpec, LayerSpec, MlpSpec
from maxtext.layers.weight_layout import packing_unsupported_reason, supports_gemv

GATES = ("silu", "swish", "gelu", "relu")  # supported by the compiler of the kernels


class GemvAttentionBlock(Block):
    """x + attention(norm(x)) of one token, with the norm, QKV, RoPE and the residual sum fused."""

    name = "GEMV attention"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return attention_unsupported_reason(spec, context)

    def decode_attention(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        attention = self.attention
        if not attends_in_place(inputs):
            return super().decode_attention(x, inputs)
        q, k, v = self.project_qkv(x, inputs)
        context, aux = attention.attend_in_place(q, k, v, inputs)
        if attention.out.bias is None:
            return add_projection(attention.out, context, x, self.post_attention_norm), aux
        attn_out = attention.project_out(context, x)
        return x + normalize(self.post_attention_norm, attn_out), aux

    def project_qkv(self, x: jax.Array, inputs: LayerInputs) -> QKV:
        attention, norm = self.attention, self.attention_norm
        assert norm is not None
        spec: AttentionSpec = attention.spec
        weight, bias = attention.packed_qkv.weight[...], attention.packed_qkv.bias
        if spec.fused_rope_unsupported_reason is not None:
            bias = None if bias is None else bias[...]
            qkv = gemv.norm_gemv(normed_input(norm, x), weight, bias)
            return attention.split(qkv[None], inputs)
        assert spec.rope is not None
        cos_sin = rope_cos_sin(inputs.positions, spec.rope, spec.head_dim)
        cos, sin = (part[0, 0, 0] for part in cos_sin)
        heads = spec.query_heads, spec.kv_heads
        q, k, v = gemv.norm_qkv_rope(normed_input(norm, x), weight, cos, sin, heads)
        return q[None, None], k[None, None], v[None, None]


class GemvMlpBlock(Block):
    """x + mlp(norm(x)) of one token, with the norm, gate and residual sum fused."""

    name = "GEMV MLP"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return mlp_unsupported_reason(spec, context)

    def decode_mlp(self, x: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, Aux]:
        mlp, norm = self.mlp, self.mlp_norm
        assert norm is not None
        activation = ACTIVATIONS[mlp.spec.activations[0]]
        hidden = gemv.norm_gate_up(normed_input(norm, x), mlp.gate_up.weight[...], activation)
        return add_projection(mlp.wo, hidden, x, self.post_mlp_norm), {}


class GemvBlock(GemvAttentionBlock, GemvMlpBlock):
    name = "GEMV"
    mode = INFERENCE

    @classmethod
    def unsupported_reason(cls, spec: LayerSpec, context: BuildContext) -> str | None:
        return attention_unsupported_reason(spec, context) or mlp_unsupported_reason(spec, context)


def attention_spec_reason(spec: LayerSpec) -> str | None:
    """Why no fused decode step computes this attention with its norm; None if one may."""
    attention = spec.attention
    if not isinstance(attention, AttentionSpec):
        return f"fuses softmax attention, not {type(attention).__name__.removesuffix('Spec')}"
    if attention.gated:
        return "fuses attention without gates only"
    if not spec.attention_norm:
        return "fuses a norm before attention"
    return None


def mlp_spec_reason(spec: LayerSpec) -> str | None:
    """As `attention_spec_reason`, for the MLP."""
    mlp = spec.mlp
    if not isinstance(mlp, MlpSpec):
        return f"fuses gated MLPs, not {type(mlp).__name__.removesuffix('Spec')}"
    if not mlp.is_gated or mlp.bias or mlp.activations[0] not in GATES:
        return f"fuses gated MLPs without biases, by {', '.join(GATES)}, only"
    if not spec.mlp_norm:
        return "fuses a norm before the MLP"
    return None


def residual_spec_reason(spec: LayerSpec) -> str | None:
    """As `attention_spec_reason`, for the norms and sums around both."""
    if spec.parallel or spec.streams is not None:
        return "fuses sequential blocks with one residual stream only"
    if spec.norm.kind != "rms" or not spec.norm.scaled:
        return "fuses RMSNorm with a scale only"
    return None


def attention_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    if (reason := attention_spec_reason(spec)) is not None:
        return reason
    attention = spec.attention
    assert isinstance(attention, AttentionSpec)
    inputs, dim = (attention.query_heads, attention.head_dim), attention.output_dim
    outputs = [math.prod(shape) for shape in attention.projections.values()]
    return (
        attention.split_qkv_unsupported_reason
        or fusion_unsupported_reason(spec, context)
        or matmul_unsupported_reason((spec.embed_dim,), outputs, context)
        or matmul_unsupported_reason(inputs, [dim or spec.embed_dim], context)
    )


def mlp_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    if (reason := mlp_spec_reason(spec)) is not None:
        return reason
    mlp = spec.mlp
    assert isinstance(mlp, MlpSpec)
    return (
        fusion_unsupported_reason(spec, context)
        or matmul_unsupported_reason((spec.embed_dim,), [mlp.hidden_dim] * 2, context)
        or matmul_unsupported_reason((mlp.hidden_dim,), [spec.embed_dim], context)
    )


def fusion_unsupported_reason(spec: LayerSpec, context: BuildContext) -> str | None:
    if context.decode_rows != 1:
        return "decodes a single sequence"
    if context.adapters is not None:
        return "has adapters"
    has_weights = bool(context.quantized_weights) or context.weight_dtype == "bfloat16"
    if context.dtype != "bfloat16" or not has_weights:
        return "needs dtype=bfloat16, and weight_dtype=bfloat16 or quantized weights"
    return residual_spec_reason(spec) or packing_unsupported_reason(context)


def matmul_unsupported_reason(
    in_shape: tuple[int, ...], outputs: list[int], context: BuildContext
) -> str | None:
    if supports_gemv(in_shape, outputs, "bfloat16", context):
        return None
    weights = f"{context.quantized_weights or 'bfloat16'} weights"
    return f"the GEMV kernel does not take {weights} of {math.prod(in_shape)} x {outputs}"


def normed_input(norm: Norm, x: jax.Array) -> NormedInput:
    assert norm.scale is not None
    offset = 1.0 if norm.spec.offset else 0.0
    return NormedInput(x[0, 0], norm.scale[...], norm.spec.epsilon, offset)


def add_projection(
    linear: Linear, y: jax.Array, x: jax.Array, post_norm: Norm | None = None
) -> jax.Array:
    """x [1, 1, E] + y weight, with a norm of the product if there is one."""
    y, weight = y.reshape(-1), linear.weight[...]
    if post_norm is not None:
        return x + post_norm(gemv.gemv(y, weight)[None, None])
    return gemv.gemv_add(y, weight, x[0, 0])[None, None]
