"""The decoder: number formats, sizes, positions, output head, and add-on blocks."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

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
from maxtext.configs.types.enums import (
    DecoderBlockType,
    DType,
    KvQuantAxis,
    MatmulPrecision,
    QuantizationType,
    RopeType,
)
from maxtext.configs.types.group import CHOSEN, Group, acts_only, in_range, one_of, rule


class DataTypes(Group):
    """Number formats of weights, activations, gradients and matrix products."""

    dtype: DType = DType.BFLOAT16
    grad_dtype: DType = DType.FLOAT32
    weight_dtype: DType = DType.FLOAT32
    matmul_precision: MatmulPrecision = MatmulPrecision.DEFAULT
    activations_in_float32: bool = False
    dtype_mm: str = "float32"


class Quantization(Group):
    """Low-precision arithmetic, quantized KV cache and n:m sparse weights."""

    quantization: None | QuantizationType = QuantizationType.NONE
    replicate_quant_scale: bool = False
    quant_cfg_path: str = ""
    quantize_kvcache: bool = False
    kv_quant_axis: KvQuantAxis = KvQuantAxis.HEADS_AND_DKV
    kv_quant_dtype: Literal["int8", "int4"] = "int8"
    quantization_local_shard_count: int = -1
    use_qwix_quantization: bool = False
    use_manual_quantization: bool = False
    weight_quantization_calibration_method: str = "absmax"
    act_quantization_calibration_method: str = "absmax"
    bwd_quantization_calibration_method: str = "absmax"
    weight_sparsity_n: int | None = None
    weight_sparsity_m: int | None = None
    weight_sparsity_update_step: int = 10
    weight_sparsity_start_step: int = 50


class ModelArchitecture(Group):
    """Depth, widths, heads and basic building blocks of the decoder."""

    decoder_block: DecoderBlockType = DecoderBlockType.LLAMA2
    global_parameter_scale: int = 1
    base_emb_dim: int = 2048
    base_num_query_heads: int = 16
    base_num_kv_heads: int = 16
    base_mlp_dim: int = 7168
    dense_init_scale: float = 1.0
    base_num_decoder_layers: int = 16
    head_dim: int = 128
    attention_output_dim: int = -1
    global_head_dim: int = 0
    mlp_activations: list[str] = ["silu", "linear"]
    mlp_activations_limit: float = -1.0
    normalization_layer_epsilon: float = 1e-05
    fused_qkv: bool = False
    attention_bias: bool = False
    fused_mlp: bool = False
    qk_norm_with_scale: bool = True
    v_norm_with_scale: bool = True


class MTP(Group):
    """Extra layers that learn to predict several tokens ahead."""

    mtp_num_layers: NonNegativeInt = 0
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    mtp_eval_target_module: NonNegativeInt = 0


class Logits(Group):
    """From the last hidden state to the vocabulary scores and loss."""

    logits_via_embedding: bool = False
    normalize_embedding_logits: bool = True
    logits_dot_in_fp32: bool = False
    cast_logits_to_fp32: bool = True
    final_logits_soft_cap: None | NonNegativeFloat = None
    z_loss_multiplier: float = 0.0


class PositionalEmbedding(Group):
    """How positions enter the model other than by rotation."""

    use_iota_embed: bool = False
    use_untrainable_positional_embedding: bool = False
    trainable_position_size: int = -1
    nope_layer_interval: int = -1


class Rope(Group):
    """Base frequencies and scaling of rotary position embeddings."""

    rope_type: RopeType = RopeType.DEFAULT
    rope_use_scale: bool = True
    rope_min_timescale: int = 1
    rope_max_timescale: int = 10000
    rope_linear_scaling_factor: float = 1.0
    local_rope_max_timescale: int = -1
    global_rope_max_timescale: int = -1
    global_rope_proportion: float = 0.25
    local_rope_proportion: float = 1.0


class YarnRope(Group):
    """Context extension of rotary embeddings with the YaRN method."""

    max_position_embeddings: int = 163840
    original_max_position_embeddings: int = 4096
    rope_factor: int = 40
    beta_fast: int = 32
    beta_slow: int = 1
    mscale: float = 1.0
    rope_interleave: bool = True
    rope_truncate: bool = True
    rope_attention_scaling: bool = False


class ManifoldConstrainedHyperConnections(Group):
    """Several residual streams mixed by doubly stochastic matrices (mHC)."""

    mhc_expansion_rate: PositiveInt = 1
    sinkhorn_iterations: PositiveInt = 20


class Engram(Group):
    """Hashed n-gram memory layers beside attention, after the Engram paper."""

    engram_layers: list[int] = Field(default_factory=list)
    engram_num_heads: int = 8
    engram_head_dim: int = 1280
    engram_vocab_bases: list[int] = Field(default_factory=list)
    engram_max_ngram_size: int = 3
    engram_kernel_size: int = 4
    engram_seed: int = 0


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


def stretches(c):
    return c.rope_type.value == "yarn" or (c.rope_type.value == "llama3.1" and c.rope_use_scale)


def yarn(c):
    return rotates(c) and c.rope_type.value == "yarn"


def gemma4(c):
    return block(c) == "gemma4"


acts_only(rotates, "rotary positions (no trainable_position_size or use_untrainable_positional_embedding)",
          "rope_type", "rope_min_timescale", "rope_max_timescale")  # fmt: skip
acts_only(lambda c: rotates(c) and block(c) in SKIPS_POSITIONS,
          f"rotary positions, in one of the decoder_blocks {', '.join(SKIPS_POSITIONS)}",
          "nope_layer_interval")  # fmt: skip
acts_only(lambda c: stretches(c) or (c.rope_type.value == "llama3.1" and c.source("rope_use_scale").kind in CHOSEN),
          "rope_type=yarn, or llama3.1 with rope_use_scale=true", "rope_factor",
          "original_max_position_embeddings")  # fmt: skip
acts_only(yarn, "rope_type=yarn", "beta_fast", "beta_slow", "rope_truncate")
acts_only(lambda c: yarn(c) and block(c) != "llama4", "rope_type=yarn, and not llama4, which always turns neighbours",
          "rope_interleave")  # fmt: skip
acts_only(
    lambda c: yarn(c) and c.rope_factor > 1,
    "rope_type=yarn and a rope_factor above 1",
    "rope_attention_scaling",
)
acts_only(lambda c: yarn(c) and c.rope_factor > 1 and latent(c),
          "rope_type=yarn, a rope_factor above 1 and attention_type=mla", "mscale")  # fmt: skip
acts_only(
    lambda c: rotates(c) and c.rope_type.value == "llama3.1", "rope_type=llama3.1", "rope_use_scale"
)
acts_only(
    lambda c: rotates(c) and not stretches(c), "rope_type=default", "rope_linear_scaling_factor"
)
acts_only(lambda c: rotates(c) and block(c) in ("gemma3", "gemma4"), "decoder_block=gemma3 or gemma4",
          "local_rope_max_timescale")  # fmt: skip
acts_only(lambda c: rotates(c) and gemma4(c), "decoder_block=gemma4", "global_rope_max_timescale",
          "global_rope_proportion", "local_rope_proportion")  # fmt: skip
acts_only(gemma4, "decoder_block=gemma4", "global_head_dim", "v_norm_with_scale")
acts_only(
    lambda c: c.logits_via_embedding, "logits_via_embedding=true", "normalize_embedding_logits"
)
acts_only(plainly_attends, "attention other than MLA, whose sizes are q_lora_rank, kv_lora_rank, qk_nope_head_dim, "
          "qk_rope_head_dim and v_head_dim", "fused_qkv")  # fmt: skip
acts_only(lambda c: not latent(c) or not attends(c), "attention other than MLA, whose sizes are qk_nope_head_dim, "
          "qk_rope_head_dim and v_head_dim", "head_dim")  # fmt: skip
acts_only(attends, "a decoder_block with attention", "attention_bias", "mlp_activations", "mlp_activations_limit",
          "activations_in_float32", "mlpwo", "context", "out_proj", "attention_out")  # fmt: skip
acts_only(dense_mlp, "a layer with an MLP beside or in place of experts", "fused_mlp")
acts_only(lambda c: plainly_attends(c) and c.use_qk_norm and block(c) not in NORMS_QUERIES,
          f"use_qk_norm=true, in a decoder_block other than {', '.join(NORMS_QUERIES)}",
          "qk_norm_with_scale")  # fmt: skip
acts_only(lambda c: block(c) == NARROW, f"decoder_block={NARROW}", "attention_output_dim")
acts_only(lambda c: layered(c) and (c.enable_dropout or c.source("enable_dropout").kind in CHOSEN),
          "enable_dropout=true, and a decoder_block that drops (not simple, simple_mlp or qwen3_custom_moe)",
          "dropout_rate")  # fmt: skip
acts_only(
    lambda c: c.mtp_num_layers > 0,
    "mtp_num_layers",
    "mtp_loss_scaling_factor",
    "mtp_eval_target_module",
)
acts_only(lambda c: c.eval_interval > 0, "eval_interval", "mtp_eval_target_module")
acts_only(lambda c: c.mhc_expansion_rate > 1, "mhc_expansion_rate above 1", "sinkhorn_iterations")
acts_only(lambda c: bool(c.engram_layers), "engram_layers", "engram_num_heads", "engram_head_dim", "engram_vocab_bases",
          "engram_max_ngram_size", "engram_kernel_size", "engram_seed")  # fmt: skip

# Tensors that remat_policy=custom can keep only where they exist.
acts_only(layered, "a decoder_block that keeps what enters its layers", "decoder_layer_input")
acts_only(lambda c: len(c.mlp_activations) == 1 or (c.fused_mlp and dense_mlp(c)), "fused_mlp=true or one activation",
          "mlpwi")  # fmt: skip
acts_only(lambda c: attends(c) and len(c.mlp_activations) == 2 and (not c.fused_mlp or experts(c)),
          "two activations and fused_mlp=false", "mlpwi_0", "mlpwi_1")  # fmt: skip
acts_only(
    lambda c: custom_remat(c) and bool(c.engram_layers),
    "remat_policy=custom and engram_layers",
    "engram",
)

ACTIVATIONS = ("linear", "relu", "silu", "swish", "gelu", "gelu_exact", "sigmoid", "tanh")


@rule
def heads_divide_evenly(c):
    if c.base_num_query_heads % c.base_num_kv_heads:
        return (
            f"base_num_query_heads={c.base_num_query_heads} is not a multiple of base_num_kv_heads="
            f"{c.base_num_kv_heads}: each key/value head serves the same number of query heads"
        )
    return None


@rule
def scale_is_a_power_of_two(c):
    scale = c.global_parameter_scale
    if scale < 1 or scale & (scale - 1):
        return f"global_parameter_scale={scale} is not a power of two: use 1, 2, 4, 8, …"
    return None


@rule
def activations_are_known(c):
    unknown = [name for name in c.mlp_activations if name not in ACTIVATIONS]
    if unknown:
        return (
            f"mlp_activations has unknown names {', '.join(unknown)}: use {', '.join(ACTIVATIONS)}"
        )
    if not 1 <= len(c.mlp_activations) <= 2:
        return "mlp_activations takes one name, or two for a gated MLP such as [silu, linear]"
    return None


@rule
def a_limit_is_on_a_gate_and_a_branch(c):
    limit = c.mlp_activations_limit
    if limit <= 0 and limit != -1:
        return f"mlp_activations_limit={limit:g} is out of range: it must be above 0, or -1"
    if limit > 0 and len(c.mlp_activations) != 2:
        return f"mlp_activations_limit={limit:g} cuts off a gate and its branch: mlp_activations must be two"
    return None


@rule
def mlp_width_is_of_some_mlp(c):
    """Where every layer has experts, their width is base_moe_mlp_dim; base_mlp_dim may only repeat
    it.
    """
    chosen = c.source("base_mlp_dim").kind in CHOSEN
    if (
        chosen
        and experts(c)
        and not dense_layers(c)
        and c.base_moe_mlp_dim not in (-1, c.base_mlp_dim)
    ):
        return (
            f"base_mlp_dim={c.base_mlp_dim} ({c.source('base_mlp_dim')}) would do nothing: all layers have experts, "
            f"which are base_moe_mlp_dim={c.base_moe_mlp_dim} wide; leave one of the two out"
        )
    return None


@rule
def rope_rotates_pairs(c):
    if not rotates(c):
        return None
    key = "qk_rope_head_dim" if latent(c) else "head_dim"
    whole = block(c) == "gemma4"  # which turns by proportions of its own
    rotated = int(getattr(c, key) * (1 if whole else c.partial_rotary_factor))
    if rotated % 2:
        return (
            f"{key}={getattr(c, key)} x partial_rotary_factor={c.partial_rotary_factor:g} makes {rotated} dimensions "
            "that turn, and rotary positions turn pairs: choose values that make an even number"
        )
    if c.global_head_dim % 2:
        return f"global_head_dim={c.global_head_dim} is odd, and rotary positions turn pairs: choose an even number"
    return None


@rule
def latent_attention_has_rotary_positions(c):
    if latent(c) and not rotates(c):
        key = (
            "trainable_position_size"
            if c.trainable_position_size > 0
            else "use_untrainable_positional_embedding"
        )
        return f"{key} does not go with attention_type=mla, which has rotary positions built in: leave it out"
    return None


@rule
def fused_projections_are_of_queries_keys_and_values(c):
    if c.fused_qkv and block(c) in DELTA_NETS:
        return f"fused_qkv=true does not go with decoder_block={block(c)}, whose attention has a gate: leave it out"
    if c.fused_qkv and c.share_kv_projections:
        return "fused_qkv=true does not go with share_kv_projections=true: there are no values to project"
    return None


@rule
def attention_and_experts_are_equally_narrow(c):
    if block(c) == NARROW and c.moe_expert_input_dim != c.attention_output_dim:
        return (
            f"moe_expert_input_dim={c.moe_expert_input_dim} is what experts read, and attention writes "
            f"attention_output_dim={c.attention_output_dim}: give both the same value"
        )
    return None


@rule
def add_ons_fit_the_block(c):
    name = block(c)
    if c.mtp_num_layers and not layered(c):
        return f"mtp_num_layers={c.mtp_num_layers} does not go with decoder_block={name}: its layers cannot look ahead"
    if c.engram_layers and not layered(c):
        return f"engram_layers does not go with decoder_block={name}: its layers have no place for a memory"
    if c.mhc_expansion_rate > 1 and not in_turn(c):
        return (
            f"mhc_expansion_rate={c.mhc_expansion_rate} does not go with decoder_block={name}: streams need a block "
            "whose attention and MLP follow each other"
        )
    return None


@rule
def learned_positions_reach_the_end(c):
    if 0 < c.trainable_position_size < c.max_target_length:
        return (
            f"trainable_position_size={c.trainable_position_size} is below max_target_length={c.max_target_length}: "
            "a token would have no position"
        )
    return None


@rule
def rope_timescales_are_ordered(c):
    if c.rope_min_timescale >= c.rope_max_timescale:
        return f"rope_min_timescale={c.rope_min_timescale} must be below rope_max_timescale={c.rope_max_timescale}"
    return None


@rule
def sparsity_keeps_n_of_m(c):
    n, m = c.weight_sparsity_n, c.weight_sparsity_m
    if (n is None) != (m is None):
        return "weight_sparsity_n and weight_sparsity_m go together: set both or neither"
    if n is not None and n >= m:
        return f"weight_sparsity_n={n} must be below weight_sparsity_m={m}: n of every m weights are kept"
    return None


@rule
def quantization_is_known(c):
    if c.quantization and c.quantization.value not in (
        "int8",
        "int4",
        "fp8",
        "fp8_gpu",
        "fp8_full",
    ):
        return (
            f"quantization={c.quantization.value} is not in this version: use int8, fp8 or fp8_full to train, int8 or "
            "int4 for the weights of a model that is not trained"
        )
    return None


@rule
def full_eight_bits_have_a_head(c):
    if c.quantization and c.quantization.value == "fp8_full" and c.logits_via_embedding:
        return "quantization=fp8_full is fp8 with the head, and with logits_via_embedding=true there is none: use fp8"
    return None


acts_only(
    lambda c: c.quantization and c.quantization.value in ("int8", "int4"), "quantization=int8 or int4",
    "save_quantized_params_path",
)  # fmt: skip


acts_only(lambda c: c.quantize_kvcache, "quantize_kvcache=true", "kv_quant_axis", "kv_quant_dtype")


@rule
def quantized_cache_is_quantized_by_an_axis(c):
    if c.quantize_kvcache and not c.kv_quant_axis.value:
        return "quantize_kvcache=true needs kv_quant_axis: dkv or heads_and_dkv"
    return None


@rule
def mtp_evaluates_a_module_that_exists(c):
    if c.mtp_eval_target_module > c.mtp_num_layers:
        return f"mtp_eval_target_module={c.mtp_eval_target_module} is above mtp_num_layers={c.mtp_num_layers}"
    return None


@rule
def engram_has_a_vocabulary_for_each_order(c):
    if c.engram_layers and len(c.engram_vocab_bases) != c.engram_max_ngram_size - 1:
        return (
            f"engram_vocab_bases needs one size for each n-gram order 2..{c.engram_max_ngram_size}, "
            f"and has {len(c.engram_vocab_bases)}"
        )
    return None


@rule
def engram_layers_exist(c):
    pairs = (
        block(c) == "gemma2" and not c.architecture.layer_kinds
    )  # where base_num_decoder_layers counts pairs
    last = c.base_num_decoder_layers * (2 if pairs else 1) - 1
    outside = [layer for layer in c.engram_layers if not 0 <= layer <= last]
    if outside:
        return f"engram_layers {outside} are outside 0..{last}"
    if len(set(c.engram_layers)) != len(c.engram_layers):
        return f"engram_layers={c.engram_layers} names a layer more than once"
    return None
