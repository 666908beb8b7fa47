"""Rules of the attention and position embedding keys that need the layers."""

from maxtext.configs.types.key import rope_is_scaled
from maxtext.models.capabilities import Capabilities, decoder_blocks
from maxtext.models.common import LAYER_KINDS
from maxtext.models.rule import inert_unless, inert_unless_layers_depend, layer_rule


def attention_type_determines_masks(model: Capabilities) -> bool:
    """attention_type may repeat the window that a block has anyway."""
    config = model.config
    listed = config.architecture.layer_kinds
    return not listed and model.layer_kinds == {LAYER_KINDS[config.attention_type]}


inert_unless(
    attention_type_determines_masks,
    "a decoder_block with attention that does not fix the attention type of its layers",
    "attention_type",
)
inert_unless(
    lambda model: "sliding" in model.layer_kinds,
    "attention_type=local_sliding, or a decoder_block with sliding layers",
    "sliding_window_size",
)
inert_unless(
    lambda model: "chunk" in model.layer_kinds,
    "attention_type=chunk, or a decoder_block with chunked layers",
    "chunk_attn_window_size",
)
inert_unless(
    lambda model: model.has_mixers,
    "a decoder_block with attention",
    "float32_qk_product",
    "float32_logits",
    "attn_logits_soft_cap",
    "attention_bias",
    "mlp_activations",
    "mlp_activations_limit",
    "activations_in_float32",
    "mlpwo",
    "context",
    "out_proj",
    "attention_out",
)
inert_unless(
    lambda model: model.has_qkv_projections,
    "attention other than MLA",
    "attention_sink",
    "use_qk_norm",
)
inert_unless(
    lambda model: model.has_qkv_projections,
    "attention other than MLA, whose sizes are q_lora_rank, kv_lora_rank, qk_nope_head_dim, "
    "qk_rope_head_dim and v_head_dim",
    "fused_qkv",
)
inert_unless(
    lambda model: not model.has_mla,
    "attention other than MLA, whose sizes are qk_nope_head_dim, qk_rope_head_dim and v_head_dim",
    "head_dim",
)
inert_unless(
    lambda model: model.has_qkv_projections and not model.config.moba,
    "attention other than MLA and MoBA",
    "use_ragged_attention",
)
inert_unless(
    lambda model: model.has_qkv_projections and model.config.use_qk_norm,
    "use_qk_norm=true",
    "qk_norm_with_scale",
)
inert_unless_layers_depend(
    "a decoder_block other than {block}, whose layers fix it",
    "qk_norm_with_scale",
    given=lambda model: model.has_qkv_projections and model.config.use_qk_norm,
)
inert_unless_layers_depend(
    "{blocks}",
    "share_kv_projections",
    "global_num_kv_heads",
    "global_head_dim",
    "v_norm_with_scale",
)
inert_unless_layers_depend("{blocks} and nope_layer_interval", "temperature_tuning")
inert_unless_layers_depend(
    "{blocks}",
    "gdn_conv_kernel_dim",
    "gdn_key_head_dim",
    "gdn_value_head_dim",
    "gdn_num_key_heads",
    "gdn_num_value_heads",
    "gdn_chunk_size",
    "use_qk_norm_in_gdn",
)
# remat_policy=custom can save only tensors that the model has.
inert_unless(
    lambda model: model.has_mixers and not model.config.fused_qkv,
    "fused_qkv=false",
    "query_proj",
    "key_proj",
    "value_proj",
)


@layer_rule("fused_qkv")
def fused_qkv_needs_plain_projections(model: Capabilities) -> str | None:
    config = model.config
    if config.fused_qkv and model.has_gated_attention:
        return (
            f"fused_qkv=true does not go with decoder_block={config.decoder_block.value}, whose "
            "attention has a gate: leave it out"
        )
    if config.fused_qkv and config.share_kv_projections:
        return (
            "fused_qkv=true does not go with share_kv_projections=true, which has no value "
            "projection"
        )
    return None


@layer_rule("attention_type")
def mla_needs_a_block_with_latents(model: Capabilities) -> str | None:
    config = model.config
    if config.attention_type != "mla" or model.has_mla:
        return None
    blocks = decoder_blocks(config, lambda probe: probe.has_mla)
    return (
        f"attention_type=mla needs decoder_block={' or '.join(blocks)}, not "
        f"{config.decoder_block.value}: no other block implements multi-head latent attention"
    )


@layer_rule("moba")
def moba_needs_causal_attention(model: Capabilities) -> str | None:
    if not model.config.moba:
        return None
    kinds = model.layer_kinds - {"linear"}
    if not model.has_mla and kinds == {"full"}:
        return None
    name = "mla" if model.has_mla else " and ".join(sorted(model.layer_kinds)) or "no"
    return (
        f"moba=true needs causal attention (attention_type=global), and this model has {name} "
        "attention"
    )


def uses_yarn(model: Capabilities) -> bool:
    return model.has_rope and model.config.rope_type.value == "yarn"


inert_unless(
    lambda model: model.has_rope,
    "RoPE (no trainable_position_size or use_untrainable_positional_embedding)",
    "rope_type",
    "rope_min_timescale",
    "rope_max_timescale",
)
inert_unless_layers_depend("RoPE, in {blocks}", "nope_layer_interval")
inert_unless(
    uses_yarn, "rope_type=yarn", "beta_fast", "beta_slow", "rope_truncate", "rope_interleave"
)
inert_unless_layers_depend(
    "a decoder_block other than {block}, which always interleaves",
    "rope_interleave",
    given=uses_yarn,
)
inert_unless(
    lambda model: uses_yarn(model) and model.config.rope_factor > 1,
    "rope_type=yarn and a rope_factor above 1",
    "rope_attention_scaling",
)
inert_unless(
    lambda model: uses_yarn(model) and model.config.rope_factor > 1 and model.has_mla,
    "rope_type=yarn, a rope_factor above 1 and attention_type=mla",
    "mscale",
)
inert_unless(
    lambda model: model.has_rope and model.config.rope_type.value == "llama3.1",
    "rope_type=llama3.1",
    "rope_use_scale",
)
inert_unless(
    lambda model: model.has_rope and not rope_is_scaled(model.config),
    "rope_type=default",
    "rope_linear_scaling_factor",
)
inert_unless_layers_depend(
    "{blocks}",
    "local_rope_max_timescale",
    "global_rope_max_timescale",
    "global_rope_proportion",
    "local_rope_proportion",
)
inert_unless(lambda model: model.has_rope, "RoPE", "partial_rotary_factor")
inert_unless_layers_depend(
    "a decoder_block other than {block}, whose layers fix it",
    "partial_rotary_factor",
    given=lambda model: model.has_rope,
)


@layer_rule("head_dim")
def rope_dimensions_are_even(model: Capabilities) -> str | None:
    config = model.config
    key = "qk_rope_head_dim" if model.has_mla else "head_dim"
    for mixer in model.mixers:
        if getattr(mixer, "rope", None) is None:
            continue
        head_dim = mixer.rope_dim if model.has_mla else mixer.head_dim
        rotary_dim = mixer.rope.rotated(head_dim)
        if rotary_dim % 2 == 0:
            continue
        if head_dim == config.global_head_dim != config.head_dim:
            return (
                f"global_head_dim={config.global_head_dim} is odd, and RoPE rotates pairs: choose "
                "an even number"
            )
        return (
            f"{key}={head_dim} x partial_rotary_factor={config.partial_rotary_factor:g} makes "
            f"{rotary_dim} rotary dimensions, and RoPE rotates pairs: choose values that make an "
            "even number"
        )
    return None


@layer_rule("attention_type")
def mla_needs_rope(model: Capabilities) -> str | None:
    config = model.config
    if config.attention_type != "mla":
        return None
    if config.trainable_position_size > 0:
        key = "trainable_position_size"
    elif config.use_untrainable_positional_embedding:
        key = "use_untrainable_positional_embedding"
    else:
        return None
    return f"{key} does not go with attention_type=mla, which requires RoPE: leave it out"
