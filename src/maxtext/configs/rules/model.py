"""Cross-checks of the model keys."""

from maxtext.configs.problems import ProblemKind
from maxtext.configs.rules.rule import in_range, inert_unless, one_of, rule
from maxtext.configs.types import Settings
from maxtext.configs.types.blocks import (
    DELTA_NETS,
    NARROW,
    NORMS_QUERIES,
    SKIPS_POSITIONS,
    attends,
    block,
    custom_remat,
    dense_layers,
    dense_mlp,
    experts,
    in_turn,
    latent,
    layered,
    plainly_attends,
    rotates,
)

in_range(
    1,
    None,
    "base_emb_dim",
    "base_num_query_heads",
    "base_num_kv_heads",
    "base_mlp_dim",
    "base_num_decoder_layers",
)
in_range(
    1,
    None,
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rope_factor",
)
in_range(1, None, "rope_min_timescale", "rope_max_timescale")
in_range(0, None, "beta_fast", "beta_slow")
in_range(
    1, None, "trainable_position_size", "nope_layer_interval", "attention_output_dim", special=(-1,)
)
in_range(1, None, "local_rope_max_timescale", "global_rope_max_timescale", special=(-1,))
in_range(
    0,
    None,
    "normalization_layer_epsilon",
    "dense_init_scale",
    "z_loss_multiplier",
    "rope_linear_scaling_factor",
)
in_range(0, 1, "global_rope_proportion", "local_rope_proportion")
in_range(1, None, "weight_sparsity_n", "weight_sparsity_m", "weight_sparsity_update_step")
in_range(2, None, "engram_max_ngram_size")
in_range(1, None, "engram_num_heads", "engram_head_dim", "engram_kernel_size")
in_range(0, None, "engram_seed", "global_head_dim", "mscale")
one_of("dtype_mm", "float32", "bfloat16", "float16")


def stretches(settings: Settings) -> bool:
    return settings.rope_type.value == "yarn" or (
        settings.rope_type.value == "llama3.1" and settings.rope_use_scale
    )


def yarn(settings: Settings) -> bool:
    return rotates(settings) and settings.rope_type.value == "yarn"


def gemma4(settings: Settings) -> bool:
    return block(settings) == "gemma4"


inert_unless(
    rotates,
    "rotary positions (no trainable_position_size or use_untrainable_positional_embedding)",
    "rope_type",
    "rope_min_timescale",
    "rope_max_timescale",
)
inert_unless(
    lambda s: rotates(s) and block(s) in SKIPS_POSITIONS,
    f"rotary positions, in one of the decoder_blocks {', '.join(SKIPS_POSITIONS)}",
    "nope_layer_interval",
)
inert_unless(
    lambda s: (
        stretches(s) or (s.rope_type.value == "llama3.1" and s.source("rope_use_scale").is_user)
    ),
    "rope_type=yarn, or llama3.1 with rope_use_scale=true",
    "rope_factor",
    "original_max_position_embeddings",
)
inert_unless(yarn, "rope_type=yarn", "beta_fast", "beta_slow", "rope_truncate")
inert_unless(
    lambda s: yarn(s) and block(s) != "llama4",
    "rope_type=yarn, and not llama4, which always turns neighbours",
    "rope_interleave",
)
inert_unless(
    lambda s: yarn(s) and s.rope_factor > 1,
    "rope_type=yarn and a rope_factor above 1",
    "rope_attention_scaling",
)
inert_unless(
    lambda s: yarn(s) and s.rope_factor > 1 and latent(s),
    "rope_type=yarn, a rope_factor above 1 and attention_type=mla",
    "mscale",
)
inert_unless(
    lambda s: rotates(s) and s.rope_type.value == "llama3.1", "rope_type=llama3.1", "rope_use_scale"
)
inert_unless(
    lambda s: rotates(s) and not stretches(s), "rope_type=default", "rope_linear_scaling_factor"
)
inert_unless(
    lambda s: rotates(s) and block(s) in ("gemma3", "gemma4"),
    "decoder_block=gemma3 or gemma4",
    "local_rope_max_timescale",
)
inert_unless(
    lambda s: rotates(s) and gemma4(s),
    "decoder_block=gemma4",
    "global_rope_max_timescale",
    "global_rope_proportion",
    "local_rope_proportion",
)
inert_unless(gemma4, "decoder_block=gemma4", "global_head_dim", "v_norm_with_scale")
inert_unless(
    lambda s: s.logits_via_embedding, "logits_via_embedding=true", "normalize_embedding_logits"
)
inert_unless(
    plainly_attends,
    "attention other than MLA, whose sizes are q_lora_rank, kv_lora_rank, qk_nope_head_dim, "
    "qk_rope_head_dim and v_head_dim",
    "fused_qkv",
)
inert_unless(
    lambda s: not latent(s) or not attends(s),
    "attention other than MLA, whose sizes are qk_nope_head_dim, qk_rope_head_dim and v_head_dim",
    "head_dim",
)
inert_unless(
    attends,
    "a decoder_block with attention",
    "attention_bias",
    "mlp_activations",
    "mlp_activations_limit",
    "activations_in_float32",
    "mlpwo",
    "context",
    "out_proj",
    "attention_out",
)
inert_unless(dense_mlp, "a layer with an MLP beside or in place of experts", "fused_mlp")
inert_unless(
    lambda s: plainly_attends(s) and s.use_qk_norm and block(s) not in NORMS_QUERIES,
    f"use_qk_norm=true, in a decoder_block other than {', '.join(NORMS_QUERIES)}",
    "qk_norm_with_scale",
)
inert_unless(lambda s: block(s) == NARROW, f"decoder_block={NARROW}", "attention_output_dim")
inert_unless(
    lambda s: layered(s) and (s.enable_dropout or s.source("enable_dropout").is_user),
    "enable_dropout=true, and a decoder_block that drops (not simple, simple_mlp or "
    "qwen3_custom_moe)",
    "dropout_rate",
)
inert_unless(
    lambda s: s.mtp_num_layers > 0,
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "mtp_eval_target_module",
)
inert_unless(lambda s: s.eval_interval > 0, "eval_interval", "mtp_eval_target_module")
inert_unless(
    lambda s: s.mhc_expansion_rate > 1, "mhc_expansion_rate above 1", "sinkhorn_iterations"
)
inert_unless(
    lambda s: bool(s.engram_layers),
    "engram_layers",
    "engram_num_heads",
    "engram_head_dim",
    "engram_vocab_bases",
    "engram_max_ngram_size",
    "engram_kernel_size",
    "engram_seed",
)

# Tensors that remat_policy=custom can keep only where they exist.
inert_unless(layered, "a decoder_block that keeps what enters its layers", "decoder_layer_input")
inert_unless(
    lambda s: len(s.mlp_activations) == 1 or (s.fused_mlp and dense_mlp(s)),
    "fused_mlp=true or one activation",
    "mlpwi",
)
inert_unless(
    lambda s: attends(s) and len(s.mlp_activations) == 2 and (not s.fused_mlp or experts(s)),
    "two activations and fused_mlp=false",
    "mlpwi_0",
    "mlpwi_1",
)
inert_unless(
    lambda s: custom_remat(s) and bool(s.engram_layers),
    "remat_policy=custom and engram_layers",
    "engram",
)

ACTIVATIONS = ("linear", "relu", "silu", "swish", "gelu", "gelu_exact", "sigmoid", "tanh")


@rule("base_num_query_heads")
def heads_divide_evenly(settings: Settings) -> str | None:
    if settings.base_num_query_heads % settings.base_num_kv_heads:
        return (
            f"base_num_query_heads={settings.base_num_query_heads} is not a multiple of "
            "base_num_kv_heads="
            f"{settings.base_num_kv_heads}: each key/value head serves the same number of query "
            "heads"
        )
    return None


@rule("global_parameter_scale")
def scale_is_a_power_of_two(settings: Settings) -> str | None:
    scale = settings.global_parameter_scale
    if scale < 1 or scale & (scale - 1):
        return f"global_parameter_scale={scale} is not a power of two: use 1, 2, 4, 8, …"
    return None


@rule("mlp_activations")
def activations_are_known(settings: Settings) -> str | None:
    unknown = [name for name in settings.mlp_activations if name not in ACTIVATIONS]
    if unknown:
        return (
            f"mlp_activations has unknown names {', '.join(unknown)}: use {', '.join(ACTIVATIONS)}"
        )
    if not 1 <= len(settings.mlp_activations) <= 2:
        return "mlp_activations takes one name, or two for a gated MLP such as [silu, linear]"
    return None


@rule("mlp_activations_limit")
def a_limit_is_on_a_gate_and_a_branch(settings: Settings) -> str | None:
    limit = settings.mlp_activations_limit
    if limit <= 0 and limit != -1:
        return f"mlp_activations_limit={limit:g} is out of range: it must be above 0, or -1"
    if limit > 0 and len(settings.mlp_activations) != 2:
        return (
            f"mlp_activations_limit={limit:g} cuts off a gate and its branch: mlp_activations "
            "must be two"
        )
    return None


@rule("base_mlp_dim", ProblemKind.INERT)
def mlp_width_is_of_some_mlp(settings: Settings) -> str | None:
    """Where every layer has experts, their width is base_moe_mlp_dim; base_mlp_dim may only repeat
    it.
    """
    chosen = settings.source("base_mlp_dim").is_user
    if (
        chosen
        and experts(settings)
        and not dense_layers(settings)
        and settings.base_moe_mlp_dim not in (-1, settings.base_mlp_dim)
    ):
        return (
            f"base_mlp_dim={settings.base_mlp_dim} ({settings.source('base_mlp_dim')}) would do "
            "nothing: all layers have experts, "
            f"which are base_moe_mlp_dim={settings.base_moe_mlp_dim} wide; leave one of the two out"
        )
    return None


@rule("head_dim")
def rope_rotates_pairs(settings: Settings) -> str | None:
    if not rotates(settings):
        return None
    key = "qk_rope_head_dim" if latent(settings) else "head_dim"
    whole = block(settings) == "gemma4"  # which turns by proportions of its own
    rotated = int(getattr(settings, key) * (1 if whole else settings.partial_rotary_factor))
    if rotated % 2:
        return (
            f"{key}={getattr(settings, key)} x "
            f"partial_rotary_factor={settings.partial_rotary_factor:g} makes {rotated} "
            "dimensions "
            "that turn, and rotary positions turn pairs: choose values that make an even number"
        )
    if settings.global_head_dim % 2:
        return (
            f"global_head_dim={settings.global_head_dim} is odd, and rotary positions turn "
            "pairs: choose an even number"
        )
    return None


@rule("attention_type")
def latent_attention_has_rotary_positions(settings: Settings) -> str | None:
    if latent(settings) and not rotates(settings):
        key = (
            "trainable_position_size"
            if settings.trainable_position_size > 0
            else "use_untrainable_positional_embedding"
        )
        return (
            f"{key} does not go with attention_type=mla, which has rotary positions built in: "
            "leave it out"
        )
    return None


@rule("fused_qkv")
def fused_projections_are_of_queries_keys_and_values(settings: Settings) -> str | None:
    if settings.fused_qkv and block(settings) in DELTA_NETS:
        return (
            f"fused_qkv=true does not go with decoder_block={block(settings)}, whose attention "
            "has a gate: leave it out"
        )
    if settings.fused_qkv and settings.share_kv_projections:
        return (
            "fused_qkv=true does not go with share_kv_projections=true: there are no values to "
            "project"
        )
    return None


@rule("moe_expert_input_dim")
def attention_and_experts_are_equally_narrow(settings: Settings) -> str | None:
    if block(settings) == NARROW and settings.moe_expert_input_dim != settings.attention_output_dim:
        return (
            f"moe_expert_input_dim={settings.moe_expert_input_dim} is what experts read, and "
            "attention writes "
            f"attention_output_dim={settings.attention_output_dim}: give both the same value"
        )
    return None


@rule("decoder_block")
def add_ons_fit_the_block(settings: Settings) -> str | None:
    name = block(settings)
    if settings.mtp_num_layers and not layered(settings):
        return (
            f"mtp_num_layers={settings.mtp_num_layers} does not go with decoder_block={name}: "
            "its layers cannot look ahead"
        )
    if settings.engram_layers and not layered(settings):
        return (
            f"engram_layers does not go with decoder_block={name}: its layers have no place for "
            "a memory"
        )
    if settings.mhc_expansion_rate > 1 and not in_turn(settings):
        return (
            f"mhc_expansion_rate={settings.mhc_expansion_rate} does not go with "
            f"decoder_block={name}: streams need a block "
            "whose attention and MLP follow each other"
        )
    return None


@rule("trainable_position_size")
def learned_positions_reach_the_end(settings: Settings) -> str | None:
    if 0 < settings.trainable_position_size < settings.max_target_length:
        return (
            f"trainable_position_size={settings.trainable_position_size} is below "
            f"max_target_length={settings.max_target_length}: "
            "a token would have no position"
        )
    return None


@rule("rope_min_timescale")
def rope_timescales_are_ordered(settings: Settings) -> str | None:
    if settings.rope_min_timescale >= settings.rope_max_timescale:
        return (
            f"rope_min_timescale={settings.rope_min_timescale} must be below "
            f"rope_max_timescale={settings.rope_max_timescale}"
        )
    return None


@rule("weight_sparsity_n")
def sparsity_keeps_n_of_m(settings: Settings) -> str | None:
    n, m = settings.weight_sparsity_n, settings.weight_sparsity_m
    if (n is None) != (m is None):
        return "weight_sparsity_n and weight_sparsity_m go together: set both or neither"
    if n is not None and m is not None and n >= m:
        return (
            f"weight_sparsity_n={n} must be below weight_sparsity_m={m}: n of every m weights "
            "are kept"
        )
    return None


@rule("quantization")
def quantization_is_known(settings: Settings) -> str | None:
    if settings.quantization and settings.quantization.value not in (
        "int8",
        "int4",
        "fp8",
        "fp8_gpu",
        "fp8_full",
    ):
        return (
            f"quantization={settings.quantization.value} is not in this version: use int8, fp8 "
            "or fp8_full to train, int8 or "
            "int4 for the weights of a model that is not trained"
        )
    return None


@rule("quantization")
def full_eight_bits_have_a_head(settings: Settings) -> str | None:
    if (
        settings.quantization
        and settings.quantization.value == "fp8_full"
        and settings.logits_via_embedding
    ):
        return (
            "quantization=fp8_full is fp8 with the head, and with logits_via_embedding=true "
            "there is none: use fp8"
        )
    return None


inert_unless(
    lambda s: s.quantization and s.quantization.value in ("int8", "int4"),
    "quantization=int8 or int4",
    "save_quantized_params_path",
)


inert_unless(
    lambda s: s.quantize_kvcache, "quantize_kvcache=true", "kv_quant_axis", "kv_quant_dtype"
)


@rule("kv_quant_axis")
def quantized_cache_is_quantized_by_an_axis(settings: Settings) -> str | None:
    if settings.quantize_kvcache and not settings.kv_quant_axis.value:
        return "quantize_kvcache=true needs kv_quant_axis: dkv or heads_and_dkv"
    return None


@rule("mtp_eval_target_module")
def mtp_evaluates_a_module_that_exists(settings: Settings) -> str | None:
    if settings.mtp_eval_target_module > settings.mtp_num_layers:
        return (
            f"mtp_eval_target_module={settings.mtp_eval_target_module} is above "
            f"mtp_num_layers={settings.mtp_num_layers}"
        )
    return None


@rule("engram_vocab_bases")
def engram_has_a_vocabulary_for_each_order(settings: Settings) -> str | None:
    if (
        settings.engram_layers
        and len(settings.engram_vocab_bases) != settings.engram_max_ngram_size - 1
    ):
        return (
            "engram_vocab_bases needs one size for each n-gram order "
            f"2..{settings.engram_max_ngram_size}, "
            f"and has {len(settings.engram_vocab_bases)}"
        )
    return None


@rule("engram_layers")
def engram_layers_exist(settings: Settings) -> str | None:
    pairs = (
        block(settings) == "gemma2" and not settings.architecture.layer_kinds
    )  # where base_num_decoder_layers counts pairs
    last = settings.base_num_decoder_layers * (2 if pairs else 1) - 1
    outside = [layer for layer in settings.engram_layers if not 0 <= layer <= last]
    if outside:
        return f"engram_layers {outside} are outside 0..{last}"
    if len(set(settings.engram_layers)) != len(settings.engram_layers):
        return f"engram_layers={settings.engram_layers} names a layer more than once"
    return None
