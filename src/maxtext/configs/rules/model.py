"""Rules of the model keys."""

from maxtext.configs.problems import ProblemKind
from maxtext.configs.rules.rule import in_range, inert_unless, one_of, rule
from maxtext.configs.types import Settings
from maxtext.configs.types.blocks import (
    DELTA_NETS,
    NARROW,
    NORMS_QUERIES,
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
in_range(1, None, "head_dim")
in_range(1, None, "attention_output_dim", special=(-1,))
in_range(0, None, "normalization_layer_epsilon", "dense_init_scale", "z_loss_multiplier")
in_range(1, None, "weight_sparsity_n", "weight_sparsity_m", "weight_sparsity_update_step")
in_range(2, None, "engram_max_ngram_size")
in_range(1, None, "engram_num_heads", "engram_head_dim", "engram_kernel_size")
in_range(0, None, "engram_seed", "global_head_dim")
one_of("dtype_mm", "float32", "bfloat16", "float16")


def gemma4(settings: Settings) -> bool:
    return block(settings) == "gemma4"


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
inert_unless(dense_mlp, "a layer with a dense MLP", "fused_mlp")
inert_unless(
    lambda s: plainly_attends(s) and s.use_qk_norm and block(s) not in NORMS_QUERIES,
    f"use_qk_norm=true, in a decoder_block other than {', '.join(NORMS_QUERIES)}",
    "qk_norm_with_scale",
)
inert_unless(lambda s: block(s) == NARROW, f"decoder_block={NARROW}", "attention_output_dim")
inert_unless(
    lambda s: layered(s) and (s.enable_dropout or s.source("enable_dropout").is_user),
    "enable_dropout=true and a decoder_block with dropout (not simple, simple_mlp or "
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

# remat_policy=custom can save only tensors that the model has.
inert_unless(layered, "a decoder_block whose layer inputs can be saved", "decoder_layer_input")
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
            f"base_num_kv_heads={settings.base_num_kv_heads}: every key/value head must serve the "
            "same number of query heads"
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
def activation_limit_needs_a_gated_mlp(settings: Settings) -> str | None:
    limit = settings.mlp_activations_limit
    if limit <= 0 and limit != -1:
        return f"mlp_activations_limit={limit:g} is out of range: it must be above 0, or -1"
    if limit > 0 and len(settings.mlp_activations) != 2:
        return (
            f"mlp_activations_limit={limit:g} clips the gate and the linear branch of a gated MLP: "
            "mlp_activations must have two names"
        )
    return None


@rule("base_mlp_dim", ProblemKind.INERT)
def some_layer_has_a_dense_mlp(settings: Settings) -> str | None:
    chosen = settings.source("base_mlp_dim").is_user
    if (
        chosen
        and experts(settings)
        and not dense_layers(settings)
        and settings.base_moe_mlp_dim not in (-1, settings.base_mlp_dim)
    ):
        return (
            f"base_mlp_dim={settings.base_mlp_dim} ({settings.source('base_mlp_dim')}) would do "
            "nothing: all layers have experts, whose width is "
            f"base_moe_mlp_dim={settings.base_moe_mlp_dim}; leave one of the two out"
        )
    return None


@rule("fused_qkv")
def fused_qkv_needs_plain_projections(settings: Settings) -> str | None:
    if settings.fused_qkv and block(settings) in DELTA_NETS:
        return (
            f"fused_qkv=true does not go with decoder_block={block(settings)}, whose attention has "
            "a gate: leave it out"
        )
    if settings.fused_qkv and settings.share_kv_projections:
        return (
            "fused_qkv=true does not go with share_kv_projections=true, which has no value "
            "projection"
        )
    return None


@rule("moe_expert_input_dim")
def experts_read_the_attention_output(settings: Settings) -> str | None:
    if block(settings) == NARROW and settings.moe_expert_input_dim != settings.attention_output_dim:
        return (
            f"moe_expert_input_dim={settings.moe_expert_input_dim} must equal "
            f"attention_output_dim={settings.attention_output_dim}: experts read the output of "
            "attention"
        )
    return None


@rule("decoder_block")
def block_supports_add_ons(settings: Settings) -> str | None:
    name = block(settings)
    if settings.mtp_num_layers and not layered(settings):
        return (
            f"mtp_num_layers={settings.mtp_num_layers} does not go with decoder_block={name}: its "
            "layers do not support multi-token prediction"
        )
    if settings.engram_layers and not layered(settings):
        return (
            f"engram_layers does not go with decoder_block={name}: its layers do not support "
            "engram memory"
        )
    if settings.mhc_expansion_rate > 1 and not in_turn(settings):
        return (
            f"mhc_expansion_rate={settings.mhc_expansion_rate} does not go with "
            f"decoder_block={name}: hyper-connections need a block that applies attention and MLP "
            "in sequence"
        )
    return None


@rule("weight_sparsity_n")
def sparsity_keeps_n_of_m(settings: Settings) -> str | None:
    n, m = settings.weight_sparsity_n, settings.weight_sparsity_m
    if (n is None) != (m is None):
        return "weight_sparsity_n and weight_sparsity_m go together: set both or neither"
    if n is not None and m is not None and n >= m:
        return (
            f"weight_sparsity_n={n} must be below weight_sparsity_m={m}: n of every m weights are "
            "kept"
        )
    return None


@rule("quantization")
def quantization_is_implemented(settings: Settings) -> str | None:
    if settings.quantization and settings.quantization.value not in (
        "int8",
        "int4",
        "fp8",
        "fp8_gpu",
        "fp8_full",
    ):
        return (
            f"quantization={settings.quantization.value} is not implemented: use int8, fp8 or "
            "fp8_full for training, int8 or int4 for weight-only quantization in inference"
        )
    return None


@rule("quantization")
def fp8_full_needs_an_output_head(settings: Settings) -> str | None:
    if (
        settings.quantization
        and settings.quantization.value == "fp8_full"
        and settings.logits_via_embedding
    ):
        return (
            "quantization=fp8_full quantizes the output head, and logits_via_embedding=true "
            "leaves none: use fp8"
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
def quantized_cache_has_an_axis(settings: Settings) -> str | None:
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
            f"2..{settings.engram_max_ngram_size}, and has {len(settings.engram_vocab_bases)}"
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
