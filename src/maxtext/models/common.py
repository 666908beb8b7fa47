"""Layer specs from configuration keys: what families start from and change."""

import math
from dataclasses import replace
from typing import Any

from maxtext.common.errors import ConfigError
from maxtext.kernels.attention import BlockSizes, Visibility
from maxtext.layers.attention import AttentionSpec
from maxtext.layers.block import LayerSpec
from maxtext.layers.mlp import MlpSpec
from maxtext.layers.norms import NormSpec
from maxtext.layers.rope import RopeSpec
from maxtext.layers.stack import Segment


def rope_spec(config: Any) -> RopeSpec:
    kind = config.rope_type.value
    shared: dict[str, Any] = {
        "max_timescale": config.rope_max_timescale,
        "min_timescale": config.rope_min_timescale,
        "fraction": config.partial_rotary_factor,
        "linear_factor": config.rope_linear_scaling_factor,
    }
    if kind == "llama3.1" and config.rope_use_scale:
        return RopeSpec(
            "llama3.1", factor=config.rope_factor, original_length=config.original_max_position_embeddings, **shared
        )
    if kind == "yarn":
        return RopeSpec(
            "yarn",
            interleave=config.rope_interleave,
            factor=config.rope_factor,
            original_length=config.original_max_position_embeddings,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            truncate=config.rope_truncate,
            attention_scaling=config.rope_attention_scaling,
            **shared,
        )
    return RopeSpec("default", **shared)


def visibility(config: Any, kind: str | None = None) -> Visibility:
    kind = kind or config.attention_type
    if kind == "local_sliding":
        return Visibility(window=config.sliding_window_size)
    if kind == "chunk":
        return Visibility(chunk=config.chunk_attn_window_size)
    return Visibility(causal=kind != "full")


def attention_spec(config: Any, kind: str | None = None, **changes: Any) -> AttentionSpec:
    learned = config.trainable_position_size > 0 or config.use_untrainable_positional_embedding
    values: dict[str, Any] = {
        "query_heads": config.num_query_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "scale": 1 / math.sqrt(config.head_dim),
        "visibility": visibility(config, kind),
        "rope": None if learned else rope_spec(config),
        "bias": config.attention_bias,
        "fused": config.fused_qkv,
        "qk_norm": norm_spec(config, scaled=config.qk_norm_with_scale) if config.use_qk_norm else None,
        "soft_cap": config.attn_logits_soft_cap or None,
        "sinks": config.attention_sink,
        "backend": config.attention,
        "float32_product": config.float32_qk_product,
        "float32_logits": config.float32_logits,
        "blocks": block_sizes(config),
    }
    return AttentionSpec(**(values | changes))


def block_sizes(config: Any) -> BlockSizes:
    return BlockSizes(
        q=config.sa_block_q,
        kv=config.sa_block_kv,
        kv_compute=config.sa_block_kv_compute,
        q_dkv=config.sa_block_q_dkv,
        kv_dkv=config.sa_block_kv_dkv,
        kv_dkv_compute=config.sa_block_kv_dkv_compute,
        q_dq=config.sa_block_q_dq,
        kv_dq=config.sa_block_kv_dq,
        use_fused_bwd=config.sa_use_fused_bwd_kernel,
        q_layout=config.sa_q_layout,
        k_layout=config.sa_k_layout,
        v_layout=config.sa_v_layout,
    )


def norm_spec(config: Any, **changes: Any) -> NormSpec:
    return NormSpec(**({"kind": "rms", "epsilon": config.normalization_layer_epsilon} | changes))


def mlp_spec(config: Any, **changes: Any) -> MlpSpec:
    values: dict[str, Any] = {
        "width": config.mlp_dim,
        "activations": tuple(config.mlp_activations),
        "bias": config.mlp_bias,
        "fused": config.fused_mlp,
        "dropout_rate": dropout_rate(config),
        "float32": config.activations_in_float32,
    }
    return MlpSpec(**(values | changes))


def dropout_rate(config: Any) -> float:
    return config.dropout_rate if config.enable_dropout else 0.0


def uniform(config: Any, spec: LayerSpec) -> list[Segment]:
    """A stack of one kind of layer, in cycles of inhomogeneous_layer_cycle_interval layers (what one step of the scan
    runs); every nope_layer_interval-th layer goes without rotary positions."""
    layers, cycle, without = (
        config.num_decoder_layers,
        config.inhomogeneous_layer_cycle_interval,
        config.nope_layer_interval,
    )
    cycle = math.lcm(cycle, max(without, 1))
    if layers % cycle:
        raise ConfigError(
            f"{layers} layers do not divide into cycles of {cycle}: change inhomogeneous_layer_cycle_interval="
            f"{config.inhomogeneous_layer_cycle_interval}, nope_layer_interval={without} or base_num_decoder_layers"
        )
    plain = replace(spec, attention=replace(spec.attention, rope=None))
    pattern = tuple(plain if without > 0 and (place + 1) % without == 0 else spec for place in range(cycle))
    return [Segment(pattern, layers // cycle)]


def layer_spec(config: Any, **changes: Any) -> LayerSpec:
    values: dict[str, Any] = {
        "size": config.emb_dim,
        "attention": attention_spec(config),
        "mlp": mlp_spec(config),
        "norm": norm_spec(config),
        "post_attention_norm": config.use_post_attn_norm,
        "post_mlp_norm": config.use_post_ffw_norm,
        "dropout_rate": dropout_rate(config),
    }
    return LayerSpec(**({key: value for key, value in values.items() if key not in changes} | changes))
