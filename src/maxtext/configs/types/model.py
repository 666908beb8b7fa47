"""The decoder: dtypes, sizes, positions, output head, and add-on blocks."""

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
from maxtext.configs.types.group import Group


class DataTypes(Group):
    """Dtypes of weights, activations, gradients and matmuls."""

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
    """Multi-token prediction: extra layers that predict tokens further ahead."""

    mtp_num_layers: NonNegativeInt = 0
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    mtp_eval_target_module: NonNegativeInt = 0


class Logits(Group):
    """From the last hidden state to the logits and the loss."""

    logits_via_embedding: bool = False
    normalize_embedding_logits: bool = True
    logits_dot_in_fp32: bool = False
    cast_logits_to_fp32: bool = True
    final_logits_soft_cap: None | NonNegativeFloat = None
    z_loss_multiplier: float = 0.0


class PositionalEmbedding(Group):
    """Position embeddings other than RoPE."""

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
    """Residual streams mixed by doubly stochastic matrices."""

    mhc_expansion_rate: PositiveInt = 1
    sinkhorn_iterations: PositiveInt = 20


class Engram(Group):
    """Hashed n-gram memory in addition to attention, after the Engram paper."""

    engram_layers: list[int] = Field(default_factory=list)
    engram_num_heads: int = 8
    engram_head_dim: int = 1280
    engram_vocab_bases: list[int] = Field(default_factory=list)
    engram_max_ngram_size: int = 3
    engram_kernel_size: int = 4
    engram_seed: int = 0
