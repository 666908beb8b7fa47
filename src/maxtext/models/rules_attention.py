"""Rules of the attention keys that need the layers."""

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
