"""The decoder: dtypes, sizes, positions, output head, and add-on blocks."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from maxtext.configs.types import inert
from maxtext.configs.types.enums import (
    DecoderBlockType,
    DType,
    KvQuantAxis,
    MatmulPrecision,
    QuantizationType,
    RopeType,
)
from maxtext.configs.types.key import (
    ENGRAM_LAYERS,
    EVALUATION,
    HYPER_CONNECTIONS,
    INT64_MAX,
    MTP_LAYERS,
    NO_ADVANTAGES,
    NO_PREFERENCES,
    NO_TEACHER,
    SCALED_ROPE,
    Group,
    key,
)


class DataTypes(Group):
    """Dtypes of weights, activations, gradients and matmuls."""

    dtype: DType = key(
        DType.BFLOAT16, "Dtype of activations and matmuls: bfloat16, float32 or float16"
    )
    grad_dtype: DType = key(
        DType.FLOAT32,
        "Dtype in which gradients of microbatches are accumulated, unless weight_dtype is "
        "wider, and to which they are cast before clipping and the optimizer: bfloat16, "
        "float32 or float16",
    )
    weight_dtype: DType = key(
        DType.FLOAT32,
        "Dtype in which weights are stored: bfloat16, float32 or float16; cast to dtype for "
        "compute",
    )
    matmul_precision: MatmulPrecision = key(
        MatmulPrecision.DEFAULT,
        "XLA precision of matmuls: default, high, highest, bfloat16 or float32; higher is slower",
    )
    activations_in_float32: bool = key(
        False,
        "Run the MLP non-linearities in float32, then cast back to dtype; slower but more exact",
    )
    dtype_mm: str = key(
        "float32",
        "Dtype inside the vision and audio encoders of multimodal models, e.g. float32 or bfloat16",
        choices=("float32", "bfloat16", "float16"),
        status=inert.MULTIMODAL,
    )


class Quantization(Group):
    """Low-precision arithmetic, quantized KV cache and n:m sparse weights."""

    quantization: None | QuantizationType = key(
        QuantizationType.NONE,
        "Training: matmuls in int8, fp8 (alias fp8_gpu) or fp8_full, which also quantizes the"
        " output head. Inference: weights in fp8, int8 or int4, or those of experts "
        "in mxfp4; fp8 and int8 also quantize the activations of more than 16 tokens. Other "
        "formats are refused. Empty: off",
    )
    replicate_quant_scale: bool = key(
        False,
        "Replicate quantization scales on every device; avoids poor fusions when weights are "
        "sharded in 2D",
        status=inert.QUANTIZATION_METHODS,
    )
    quant_cfg_path: str = key(
        "",
        "JSON file that gives a bit width per layer for quantization=intmp; empty: none",
        status=inert.QUANTIZATION_METHODS,
    )
    quantize_kvcache: bool = key(
        False,
        "Store cached keys and values in 8 or 4 bits to save memory; see kv_quant_dtype",
    )
    kv_quant_axis: KvQuantAxis = key(
        KvQuantAxis.HEADS_AND_DKV,
        "Axes that share one KV-cache scale: dkv (one per head), heads_and_dkv (one per "
        "token); empty: no quantized cache",
        needs="quantize_kvcache",
    )
    kv_quant_dtype: Literal["int8", "int4", "fp8"] = key(
        "int8",
        "Type of the quantized KV cache: int8, int4 or fp8 (e4m3); used with quantize_kvcache",
        needs="quantize_kvcache",
    )
    quantization_local_shard_count: int = key(
        -1,
        "Number of shards that compute their own quantization range when weights are sharded;"
        " -1: num_slices",
        status=inert.QUANTIZATION_METHODS,
    )
    use_qwix_quantization: bool = key(
        False,
        "Quantize with the Qwix library, which rewrites matmuls by rule; false: the built-in "
        "quantized matmuls",
        status=inert.QUANTIZATION_METHODS,
    )
    use_manual_quantization: bool = key(
        False,
        "Quantize explicitly inside the batch-split layers rather than by rule; for "
        "use_batch_split_schedule",
        status=inert.QUANTIZATION_METHODS,
    )
    weight_quantization_calibration_method: str = key(
        "absmax",
        "Calibration of the range of weights: absmax, minmax, rms, or fixed,low,high; used by Qwix",
        status=inert.QUANTIZATION_METHODS,
    )
    act_quantization_calibration_method: str = key(
        "absmax",
        "Calibration of the range of activations: absmax, minmax, rms, or fixed,low,high; "
        "used by Qwix",
        status=inert.QUANTIZATION_METHODS,
    )
    bwd_quantization_calibration_method: str = key(
        "absmax",
        "Calibration of the range of gradients in the backward pass: absmax, minmax, rms, or "
        "fixed,low,high",
        status=inert.QUANTIZATION_METHODS,
    )
    weight_sparsity_n: int | None = key(
        None,
        "Weights kept, by magnitude, in every group of weight_sparsity_m (2 of 4 is common); "
        "null: dense",
        low=1,
        status=inert.QUANTIZATION_METHODS,
    )
    weight_sparsity_m: int | None = key(
        None,
        "Group size of n:m weight sparsity; null: dense; set together with weight_sparsity_n",
        low=1,
        status=inert.QUANTIZATION_METHODS,
    )
    weight_sparsity_update_step: int = key(
        10,
        "Steps between two recomputations of the n:m sparsity mask",
        low=1,
        status=inert.QUANTIZATION_METHODS,
    )
    weight_sparsity_start_step: int = key(
        50,
        "Training step from which the n:m sparsity mask is applied; before it the weights are"
        " dense",
        status=inert.QUANTIZATION_METHODS,
    )


class ModelArchitecture(Group):
    """Depth, widths, heads and basic building blocks of the decoder."""

    decoder_block: DecoderBlockType = key(
        DecoderBlockType.LLAMA2,
        "Family whose layers are built: llama2, mistral, mixtral, gemma3, qwen3, deepseek, "
        "gpt_oss and others; simple and simple_mlp are matmul-only stand-ins of the same "
        "sizes",
    )
    global_parameter_scale: int = key(
        1,
        "Scale the model to about this many times its parameters; a power of two, spread over"
        " depth and widths",
    )
    base_emb_dim: int = key(
        2048, "Width of the residual stream, before global_parameter_scale", low=1
    )
    base_num_query_heads: int = key(
        16, "Number of attention query heads per layer, before global_parameter_scale", low=1
    )
    base_num_kv_heads: int = key(
        16,
        "Number of key/value heads; equal to query heads: MHA, fewer: GQA, 1: MQA; scaled by "
        "global_parameter_scale",
        low=1,
    )
    base_mlp_dim: int = key(
        7168, "Hidden width of the dense feed-forward block, before global_parameter_scale", low=1
    )
    dense_init_scale: float = key(
        1.0, "Variance multiplier of the random initial weights of linear layers", low=0
    )
    base_num_decoder_layers: int = key(
        16, "Number of decoder layers, before global_parameter_scale", low=1, limit=10_000
    )
    head_dim: int = key(
        128, "Size of one attention head; need not equal embedding width divided by heads", low=1
    )
    attention_output_dim: int = key(
        -1,
        "Output width of attention in qwen3_custom_moe, equal to moe_expert_input_dim; -1: "
        "the embedding width",
        low=1,
        special=(-1,),
    )
    global_head_dim: int = key(
        0,
        "Head size in full-attention layers where it differs from the local ones (Gemma 4); "
        "0: head_dim",
        low=0,
    )
    mlp_activations: list[str] = key(
        ["silu", "linear"],
        "Activation of each MLP branch; the branches are multiplied; [silu, linear] is "
        "SwiGLU, [gelu] is ungated",
    )
    mlp_activations_limit: float = key(
        -1.0,
        "gpt-oss (7.0): clip the gate from above and up on both sides, then gate x f(1.702 "
        "gate) x (up + 1); -1: f(gate) x up",
    )
    normalization_layer_epsilon: float = key(
        1e-05,
        "Small number added to the variance in RMSNorm and LayerNorm against division by zero",
        low=0,
    )
    fused_qkv: bool = key(
        False, "Compute queries, keys and values with one packed weight matrix instead of three"
    )
    attention_bias: bool = key(
        False, "Add learned bias vectors to the attention projections (as Qwen2.5 and gpt-oss do)"
    )
    fused_mlp: bool = key(
        False,
        "Compute the gate and up branches of MLPs (not of experts) with one packed weight matrix",
    )
    qk_norm_with_scale: bool = key(
        True,
        "Give the query and key norms a learned scale; false: they only normalise; see use_qk_norm",
    )
    v_norm_with_scale: bool = key(
        True, "Give the value norm a learned scale; false: it only normalises (Gemma 4)"
    )


class MTP(Group):
    """Multi-token prediction: extra layers that predict tokens further ahead."""

    mtp_num_layers: NonNegativeInt = key(
        0,
        "Extra layers that learn to predict tokens further ahead (DeepSeek-V3 style); 0: none",
        limit=1_000,
        needs=(NO_TEACHER, NO_PREFERENCES, NO_ADVANTAGES),
    )
    mtp_loss_scaling_factor: NonNegativeFloat = key(
        0.1,
        "Weight of the multi-token-prediction loss when it is added to the main loss",
        needs=(NO_TEACHER, NO_PREFERENCES, MTP_LAYERS, NO_ADVANTAGES),
    )
    mtp_eval_target_module: NonNegativeInt = key(
        0,
        "Which extra layer (1 = first) evaluation reports the acceptance rate of; 0: main "
        "model only",
        needs=(NO_PREFERENCES, MTP_LAYERS, EVALUATION, NO_ADVANTAGES),
    )


class Logits(Group):
    """From the last hidden state to the logits and the loss."""

    logits_via_embedding: bool = key(
        False, "Weight tying: use the transposed token embedding as output head"
    )
    normalize_embedding_logits: bool = key(
        True,
        "Divide tied logits by sqrt(embedding width); acts only with logits_via_embedding",
        needs="logits_via_embedding",
    )
    logits_dot_in_fp32: bool = key(
        False, "Compute the output head in float32; more exact, but slower and larger"
    )
    cast_logits_to_fp32: bool = key(True, "Convert logits to float32 before the loss or sampling")
    final_logits_soft_cap: None | NonNegativeFloat = key(
        None, "Squash logits to +-cap by cap*tanh(x/cap) (Gemma 2 uses 30); null or 0: no cap"
    )
    z_loss_multiplier: float = key(
        0.0,
        "Weight of the squared log-sum-exp added per token, which keeps logits from drifting;"
        " 0: off",
        low=0,
        needs=(NO_PREFERENCES, NO_ADVANTAGES),
    )


class PositionalEmbedding(Group):
    """Position embeddings other than RoPE."""

    use_iota_embed: bool = key(
        False, "Embed tokens by a one-hot matmul instead of a gather; can be faster when sharded"
    )
    use_untrainable_positional_embedding: bool = key(
        False, "Add fixed sinusoidal positions to the token embeddings"
    )
    trainable_position_size: int = key(
        -1,
        "Number of learned absolute positions, as in GPT-3; -1 = no learned positions",
        low=1,
        special=(-1,),
    )
    nope_layer_interval: int = key(
        -1,
        "Every n-th layer has no RoPE (4 in Llama 4, 1: all layers); -1: all layers have RoPE",
        low=1,
        special=(-1,),
    )


class Rope(Group):
    """Base frequencies and scaling of rotary position embeddings."""

    rope_type: RopeType = key(
        RopeType.DEFAULT,
        "Frequency rule of the rotary embedding: default, llama3.1 (scaled for long context) "
        "or yarn",
    )
    rope_use_scale: bool = key(
        True,
        "Apply the long-context frequency scaling when rope_type=llama3.1; false = plain "
        "frequencies",
    )
    rope_min_timescale: int = key(
        1,
        "Shortest rotary wavelength divided by 2 pi, in tokens; almost always 1",
        low=1,
        limit=INT64_MAX,
    )
    rope_max_timescale: int = key(
        10000,
        "Rotary base (theta); larger bases suit longer contexts, 10000 is the original value",
        low=1,
        limit=INT64_MAX,
    )
    rope_linear_scaling_factor: float = key(
        1.0,
        "Divides positions on global layers to extend the context (8 in Gemma 3); 1 = no scaling",
        low=0,
    )
    local_rope_max_timescale: int = key(
        -1,
        "Rotary base of the sliding layers of Gemma 3 and 4; -1 = rope_max_timescale",
        low=1,
        special=(-1,),
        limit=INT64_MAX,
    )
    global_rope_max_timescale: int = key(
        -1,
        "Rotary base of the global attention layers of Gemma 4; -1 = rope_max_timescale",
        low=1,
        special=(-1,),
        limit=INT64_MAX,
    )
    global_rope_proportion: float = key(
        0.25,
        "Fraction of head dims rotated on the global layers of Gemma 4; others have "
        "partial_rotary_factor",
        low=0,
        high=1,
    )
    local_rope_proportion: float = key(
        1.0,
        "Fraction of head dims rotated on the sliding layers of Gemma 4; others have "
        "partial_rotary_factor",
        low=0,
        high=1,
    )


class YarnRope(Group):
    """Context extension of rotary embeddings with the YaRN method."""

    max_position_embeddings: int = key(
        163840,
        "Longest context in tokens that the model supports; only written to config.json on export",
        low=1,
    )
    original_max_position_embeddings: int = key(
        4096,
        "Context in tokens the model was first trained on, which yarn and llama3.1 scaling extend",
        low=1,
        needs=SCALED_ROPE,
    )
    rope_factor: int = key(
        40,
        "Factor by which the original context is extended; used when rope_type is yarn or llama3.1",
        low=1,
        needs=SCALED_ROPE,
    )
    beta_fast: int = key(
        32,
        "YaRN: dims rotating more often than this within the original context keep their frequency",
        low=0,
    )
    beta_slow: int = key(
        1,
        "YaRN: dims rotating less often than this within the original context are fully "
        "interpolated",
        low=0,
    )
    mscale: float = key(
        1.0,
        "Strength of YaRN's softmax scale correction, (0.1 x mscale x ln(rope_factor) + 1) "
        "squared, in MLA",
        low=0,
    )
    rope_interleave: bool = key(
        True,
        "Rotate neighbouring dims as pairs (0,1),(2,3)...; false = pair the two halves of the head",
    )
    rope_truncate: bool = key(
        True,
        "Round the borders of YaRN's blending range to whole dims; false = keep fractions "
        "(gpt-oss)",
    )
    rope_attention_scaling: bool = key(
        False, "Multiply YaRN's sine and cosine by 0.1 x ln(rope_factor) + 1, as gpt-oss does"
    )


class ManifoldConstrainedHyperConnections(Group):
    """Residual streams mixed by doubly stochastic matrices."""

    mhc_expansion_rate: PositiveInt = key(
        1, "Number of residual streams of hyper-connections; 1 = an ordinary residual", limit=1_000
    )
    sinkhorn_iterations: PositiveInt = key(
        20,
        "Row/column normalization passes that make the mHC mixing matrix doubly stochastic",
        limit=10_000,
        needs=HYPER_CONNECTIONS,
    )


class Engram(Group):
    """Hashed n-gram memory in addition to attention, after the Engram paper."""

    engram_layers: list[int] = key(
        list, "Decoder layers, from 0, that get an Engram n-gram memory; empty = Engram is off"
    )
    engram_num_heads: int = key(
        8,
        "Independent hashes, each with its own table, for every n-gram length",
        low=1,
        needs=ENGRAM_LAYERS,
    )
    engram_head_dim: int = key(
        1280, "Width of the vector that each Engram head looks up", low=1, needs=ENGRAM_LAYERS
    )
    engram_vocab_bases: list[int] = key(
        list,
        "Least table size for each n-gram length 2..max; each head takes a distinct prime at "
        "or above it",
        needs=ENGRAM_LAYERS,
    )
    engram_max_ngram_size: int = key(
        3,
        "Longest n-gram hashed, in tokens; lengths 2 up to this are used",
        low=2,
        limit=1_000,
        needs=ENGRAM_LAYERS,
    )
    engram_kernel_size: int = key(
        4,
        "Taps of the dilated causal depthwise convolution after the Engram gate",
        low=1,
        needs=ENGRAM_LAYERS,
    )
    engram_seed: int = key(
        0,
        "Seed of the hash multipliers; 10007 x layer is added, so that every layer differs",
        low=0,
        limit=INT64_MAX,
        needs=ENGRAM_LAYERS,
    )
