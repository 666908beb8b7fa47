"""Layer specs from configuration keys: what families start from and change."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from maxtext.common.errors import ConfigError
from maxtext.common.types import Json
from maxtext.configs.types import MaxTextConfig
from maxtext.kernels.attention_options import AttentionMask, BlockSizes
from maxtext.layers.specs import (
    AttentionSpec,
    EngramSpec,
    HyperConnectionSpec,
    LayerSpec,
    MlpSpec,
    Moba,
    MoeSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)

T = TypeVar("T")
# attention_type -> kind of layer
LAYER_KINDS = {
    "global": "full",
    "mla": "full",
    "local_sliding": "sliding",
    "chunk": "chunk",
    "full": "unmasked",
}


def mixer_kind(mixer: object) -> str:
    """The kind of a layer with this mixer, as `architecture.layer_kinds` names it."""
    mask = getattr(mixer, "mask", None)
    if mask is None:
        return "linear"
    if mask.window:
        return "sliding"
    if mask.chunk:
        return "chunk"
    return "full" if mask.causal else "unmasked"


def layer_kinds(config: MaxTextConfig, layers: int, rule: Callable[[int], str]) -> list[str]:
    """The kind of each layer (full, sliding, chunk or linear), as the checkpoint lists it or by the
    family's rule for the index of a layer.
    """
    return per_layer("layer_kinds", config.architecture.layer_kinds, layers) or [
        rule(i) for i in range(layers)
    ]


def moe_layers(config: MaxTextConfig, layers: int, rule: Callable[[int], bool]) -> list[bool]:
    """Which layers have experts; with num_experts=1, none has."""
    if config.num_experts == 1:
        return [False] * layers
    return per_layer("moe_layers", config.architecture.moe_layers, layers) or [
        rule(i) for i in range(layers)
    ]


def rope_layers(config: MaxTextConfig, layers: int) -> list[bool]:
    """Which layers have RoPE; every nope_layer_interval-th has none."""
    interval = config.nope_layer_interval
    return per_layer("rope_layers", config.architecture.rope_layers, layers) or [
        interval <= 0 or (i + 1) % interval != 0 for i in range(layers)
    ]


def per_layer(name: str, listed: Sequence[T] | None, layers: int) -> list[T]:
    if listed is not None and len(listed) != layers:
        raise ConfigError(
            f"architecture.{name} lists {len(listed)} layers and the model has {layers}: the list "
            "belongs to a checkpoint of another depth, leave it out or keep "
            "base_num_decoder_layers"
        )
    return list(listed or [])


def rope_spec(config: MaxTextConfig, layer_kind: str = "full", **changes: Any) -> RopeSpec:
    """The RoPE of a kind of layer, as the checkpoint states it or by the keys."""
    listed: dict[Any, Json] | None = config.architecture.rope
    fields = None if listed is None else listed.get(layer_kind, listed.get("all"))
    if fields is not None:
        spec = RopeSpec(**{name: as_hashable(value) for name, value in fields.items()})
        # The longest sequence of the run decides, not that of a batch, so that cached keys stay
        # valid.
        long = spec.kind == "longrope" and config.max_target_length > spec.original_length
        return replace(spec, long=long)
    spec = RopeSpec(
        max_timescale=config.rope_max_timescale,
        min_timescale=config.rope_min_timescale,
        fraction=config.partial_rotary_factor,
        linear_factor=config.rope_linear_scaling_factor,
    )
    scaled = replace(
        spec,
        kind=config.rope_type.value,
        factor=config.rope_factor,
        original_length=config.original_max_position_embeddings,
    )
    if config.rope_type.value == "llama3.1" and config.rope_use_scale:
        spec = scaled
    if config.rope_type.value == "yarn":
        spec = replace(
            scaled,
            interleave=config.rope_interleave,
            beta_fast=config.beta_fast,
            beta_slow=config.beta_slow,
            truncate=config.rope_truncate,
            attention_scaling=config.rope_attention_scaling,
        )
    return replace(spec, **changes)


def as_hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def attention_mask(config: MaxTextConfig, kind: str | None = None) -> AttentionMask:
    """The mask of a kind of layer, by default the one of attention_type.

    Raises ConfigError if the size of the window or chunk is not set.
    """
    stated_by = f"decoder_block={config.decoder_block.value}"
    if kind is None or LAYER_KINDS[config.attention_type] == kind != "full":
        stated_by = f"attention_type={config.attention_type}"
    kind = kind or LAYER_KINDS[config.attention_type]
    if kind == "sliding":
        if not config.sliding_window_size:
            raise ConfigError(
                f"{stated_by} needs sliding_window_size: the number of tokens that a "
                "sliding-window layer attends to"
            )
        return AttentionMask(window=config.sliding_window_size)
    if kind == "chunk":
        if not config.chunk_attn_window_size:
            raise ConfigError(f"{stated_by} needs chunk_attn_window_size: the length of a chunk")
        return AttentionMask(chunk=config.chunk_attn_window_size)
    return AttentionMask(causal=kind != "unmasked")


def attention_spec(config: MaxTextConfig, kind: str | None = None, **changes: Any) -> AttentionSpec:
    embeds_positions = (
        config.trainable_position_size > 0 or config.use_untrainable_positional_embedding
    )
    spec = AttentionSpec(
        query_heads=config.num_query_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.architecture.softmax_scale or 1 / math.sqrt(config.head_dim),
        mask=attention_mask(config, kind),
        rope=rope_spec(config, kind or "full"),
        bias=config.attention_bias,
        out_bias=config.attention_bias,
        fused=config.fused_qkv,
        qk_norm=norm_spec(config, scaled=config.qk_norm_with_scale) if config.use_qk_norm else None,
        soft_cap=config.attn_logits_soft_cap or None,
        sinks=config.attention_sink,
        moba=Moba(config.moba_chunk_size, config.moba_topk) if config.moba else None,
        backend=backend(config),
        float32_product=config.float32_qk_product,
        float32_logits=config.float32_logits,
        blocks=block_sizes(config),
        requires_paged_kernel=config.use_ragged_attention,
        paged_kernel_block=config.ragged_block_size if config.use_ragged_attention else None,
    )
    return replace(spec, **(changes | ({"rope": None} if embeds_positions else {})))


def backend(config: MaxTextConfig) -> str:
    """`paged` chooses a KV cache; attention without a cache is autoselected."""
    return "autoselected" if config.attention == "paged" else config.attention


def block_sizes(config: MaxTextConfig) -> BlockSizes:
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


def norm_spec(config: MaxTextConfig, **changes: Any) -> NormSpec:
    return replace(NormSpec(kind="rms", epsilon=config.normalization_layer_epsilon), **changes)


def mlp_spec(config: MaxTextConfig, **changes: Any) -> MlpSpec:
    spec = MlpSpec(
        hidden_dim=config.mlp_dim,
        activations=tuple(config.mlp_activations),
        bias=config.mlp_bias,
        fused=config.fused_mlp,
        dropout_rate=dropout_rate(config),
        float32=config.activations_in_float32,
        limit=activation_limit(config),
    )
    return replace(spec, **changes)


def router_spec(config: MaxTextConfig, **changes: Any) -> RouterSpec:
    """Top-k of a softmax over all experts; groups and scaling by the keys."""
    grouped = config.n_routing_groups > 0
    spec = RouterSpec(
        experts=config.num_experts,
        topk=config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        groups=config.n_routing_groups if grouped else 1,
        topk_groups=config.topk_routing_group if grouped else 1,
        float32=config.float32_gate_logits,
        random=config.use_random_routing,
    )
    if config.architecture.normalise_chosen is not None:
        changes["normalise"] = config.architecture.normalise_chosen
    return replace(spec, **changes)


def moe_spec(config: MaxTextConfig, router: RouterSpec, **changes: Any) -> MoeSpec:
    shared = config.architecture.shared_expert_dim or config.shared_experts * config.moe_mlp_dim
    drops = config.capacity_factor > 0
    spec = MoeSpec(
        router=router,
        hidden_dim=config.moe_mlp_dim,
        activations=tuple(config.mlp_activations),
        limit=activation_limit(config),
        shared=mlp_spec(config, hidden_dim=shared) if shared else None,
        method="dropping" if drops else "sparse" if config.sparse_matmul else "dense",
        capacity_factor=config.capacity_factor if drops else 1.0,
        buffer_factor=config.ragged_buffer_factor if config.ragged_buffer_factor > 0 else None,
        grouped_kernel=config.megablox,
        custom_sort_vjp=config.use_custom_sort_vjp,
        ring=config.use_ring_of_experts,
        two_stage_gather=config.moe_fsdp_use_two_stage_all_gather,
        experts_on_fsdp=config.shard_exp_on_fsdp,
        balance_weight=config.load_balance_loss_weight,
        report_load=config.routed_bias_update_rate > 0,
        float32_sum=config.float32_weight_sum,
        float32=config.activations_in_float32,
    )
    return replace(spec, **changes)


def feed_spec(config: MaxTextConfig, router: RouterSpec, **changes: Any) -> MoeSpec | MlpSpec:
    """Experts, or with num_experts=1 an MLP."""
    return moe_spec(config, router, **changes) if config.num_experts > 1 else mlp_spec(config)


def activation_limit(config: MaxTextConfig) -> float | None:
    return config.mlp_activations_limit if config.mlp_activations_limit > 0 else None


def dropout_rate(config: MaxTextConfig) -> float:
    return config.dropout_rate if config.enable_dropout else 0.0


def uniform(config: MaxTextConfig, spec: LayerSpec) -> list[LayerSpec]:
    """Layers of one kind; every nope_layer_interval-th has no RoPE."""
    without = config.nope_layer_interval
    plain = replace(spec, attention=replace(spec.attention, rope=None))
    return [
        plain if without > 0 and (layer + 1) % without == 0 else spec
        for layer in range(config.num_decoder_layers)
    ]


def layer_spec(config: MaxTextConfig, **changes: Any) -> LayerSpec:
    spec = LayerSpec(
        embed_dim=config.emb_dim,
        attention=changes.pop("attention", None) or attention_spec(config),
        mlp=mlp_spec(config),
        norm=norm_spec(config),
        post_attention_norm=config.use_post_attn_norm,
        post_mlp_norm=config.use_post_ffw_norm,
        dropout_rate=dropout_rate(config),
        streams=streams_spec(config),
    )
    return replace(spec, **changes)


def streams_spec(config: MaxTextConfig) -> HyperConnectionSpec | None:
    if config.mhc_expansion_rate == 1:
        return None
    return HyperConnectionSpec(
        config.mhc_expansion_rate, config.sinkhorn_iterations, norm_spec(config)
    )


def with_engrams(config: MaxTextConfig, layers: list[Any]) -> list[Any]:
    """The layers, those of engram_layers with an n-gram memory."""
    if config.engram_layers and not all(isinstance(layer, LayerSpec) for layer in layers):
        raise ConfigError(
            f"engram_layers does not go with decoder_block={config.decoder_block.value}: its "
            "layers do not support engram memory"
        )

    def memory(layer: int) -> EngramSpec:
        return EngramSpec(
            heads=config.engram_num_heads,
            head_dim=config.engram_head_dim,
            vocabulary_bases=tuple(config.engram_vocab_bases),
            max_ngram=config.engram_max_ngram_size,
            kernel_size=config.engram_kernel_size,
            seed=config.engram_seed,
            layer=layer,
            layers=tuple(sorted(config.engram_layers)),
            vocabulary=config.vocab_size,
            norm=norm_spec(config),
            streams=config.mhc_expansion_rate,
        )

    return [
        replace(spec, engram=memory(number)) if number in config.engram_layers else spec
        for number, spec in enumerate(layers)
    ]
