"""The decoder: number formats, sizes, positions, output head, and add-on blocks."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from maxtext.configs.types.enums import (
    DecoderBlockType,
    DType,
    KvQuantAxis,
    MatmulPrecision,
    QuantizationType,
    RopeType,
)
from maxtext.configs.types.group import Group, acts_only, in_range, one_of, rule


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
    1, None, "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers"
)
in_range(1, None, "head_dim", "max_position_embeddings", "original_max_position_embeddings", "rope_factor")
in_range(1, None, "rope_min_timescale", "rope_max_timescale")
in_range(1, None, "trainable_position_size", "nope_layer_interval", "attention_output_dim", special=(-1,))
in_range(1, None, "local_rope_max_timescale", "global_rope_max_timescale", special=(-1,))
in_range(0, None, "normalization_layer_epsilon", "dense_init_scale", "z_loss_multiplier", "rope_linear_scaling_factor")
in_range(0, 1, "global_rope_proportion", "local_rope_proportion")
in_range(0, None, "mlp_activations_limit", special=(-1.0,))
in_range(1, None, "weight_sparsity_n", "weight_sparsity_m", "weight_sparsity_update_step")
in_range(2, None, "engram_max_ngram_size")
one_of("dtype_mm", "float32", "bfloat16", "float16")


def rotates(c):
    return c.trainable_position_size < 0 and not c.use_untrainable_positional_embedding


def scales_rope(c):
    return c.rope_type.value in ("yarn", "llama3.1")


def has_layers_of_attention(c):
    return c.decoder_block.value not in ("simple", "simple_mlp")


acts_only(rotates, "rotary positions (no trainable_position_size or use_untrainable_positional_embedding)",
          "rope_type", "rope_min_timescale", "rope_max_timescale", "nope_layer_interval")  # fmt: skip
acts_only(scales_rope, "rope_type=yarn or llama3.1", "rope_factor", "original_max_position_embeddings")
acts_only(lambda c: c.rope_type.value == "yarn", "rope_type=yarn", "beta_fast", "beta_slow", "rope_interleave",
          "rope_truncate", "rope_attention_scaling")  # fmt: skip
acts_only(lambda c: c.rope_type.value == "llama3.1", "rope_type=llama3.1", "rope_use_scale")
acts_only(lambda c: c.rope_type.value == "default", "rope_type=default", "rope_linear_scaling_factor")
acts_only(lambda c: c.logits_via_embedding, "logits_via_embedding=true", "normalize_embedding_logits")
acts_only(has_layers_of_attention, "a decoder_block with attention", "fused_qkv", "attention_bias", "fused_mlp")

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
        return f"mlp_activations has unknown names {', '.join(unknown)}: use {', '.join(ACTIVATIONS)}"
    if not 1 <= len(c.mlp_activations) <= 2:
        return "mlp_activations takes one name, or two for a gated MLP such as [silu, linear]"
    return None


@rule
def rope_rotates_pairs(c):
    rotated = int(c.head_dim * c.partial_rotary_factor)
    if rotated % 2 and rotates(c):
        return (
            f"head_dim={c.head_dim} x partial_rotary_factor={c.partial_rotary_factor:g} makes {rotated} dimensions "
            "that turn, and rotary positions turn pairs: choose values that make an even number"
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
    outside = [layer for layer in c.engram_layers if not 0 <= layer < c.base_num_decoder_layers]
    return f"engram_layers {outside} are outside 0..{c.base_num_decoder_layers - 1}" if outside else None
