"""Rules of the model, attention, mixture-of-experts, vision and audio keys."""

import math

from maxtext.configs.problems import ProblemKind
from maxtext.configs.rules.rule import derived_rule, rule
from maxtext.configs.types import MaxTextConfig, Settings
from maxtext.configs.types.key import uses_mla

# remat_policy=custom can save only tensors that the model has.


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
def mlp_has_one_or_two_activations(settings: Settings) -> str | None:
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
        "mxfp4",
        "fp8",
        "fp8_gpu",
        "fp8_full",
    ):
        return (
            f"quantization={settings.quantization.value} is not implemented: use int8, fp8 or "
            "fp8_full for training, fp8, int8, int4 or mxfp4 for inference"
        )
    return None


@rule("quantization")
def mxfp4_is_for_experts(settings: Settings) -> str | None:
    if settings.quantization is None or settings.quantization.value != "mxfp4":
        return None
    if settings.num_experts <= 1:
        return (
            "quantization=mxfp4 stores the weights of experts, and this model has none: use int4, "
            "int8 or fp8"
        )
    sizes = {"base_emb_dim": settings.base_emb_dim, "base_moe_mlp_dim": settings.base_moe_mlp_dim}
    if settings.base_moe_mlp_dim == -1:
        sizes = {"base_emb_dim": settings.base_emb_dim, "base_mlp_dim": settings.base_mlp_dim}
    for key, size in sizes.items():
        if size % 32:
            return (
                f"quantization=mxfp4 has a scale for each group of 32 inputs, which do not divide "
                f"{key}={size}: use int4, int8 or fp8"
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


@rule("attention", ProblemKind.UNSUPPORTED)
def attention_is_not_of_vllm(settings: Settings) -> str | None:
    if settings.attention != "vllm_rpa":
        return None
    return (
        "attention=vllm_rpa is the attention of a vLLM server, which this package does not use: "
        "leave it out, or set attention=paged to generate text with a paged KV cache"
    )


# remat_policy=custom can save only tensors that the model has.


@rule("base_num_kv_heads")
def mla_has_one_kv_head_per_query_head(settings: Settings) -> str | None:
    if uses_mla(settings) and settings.base_num_kv_heads != settings.base_num_query_heads:
        return (
            f"base_num_kv_heads={settings.base_num_kv_heads} does not fit attention_type=mla, "
            f"where each query head has its own keys: set it to {settings.base_num_query_heads}, "
            "as base_num_query_heads"
        )
    return None


@rule("global_num_kv_heads")
def global_heads_divide_evenly(settings: Settings) -> str | None:
    if (
        settings.global_num_kv_heads
        and settings.base_num_query_heads % settings.global_num_kv_heads
    ):
        return (
            f"base_num_query_heads={settings.base_num_query_heads} is not a multiple of "
            f"global_num_kv_heads={settings.global_num_kv_heads}: every key/value head must serve "
            "the same number of query heads"
        )
    return None


@rule("use_indexer")
def indexer_needs_mla(settings: Settings) -> str | None:
    if settings.use_indexer and settings.attention_type != "mla":
        return "use_indexer=true needs attention_type=mla: the indexer reads MLA's query latent"
    return None


@rule("q_lora_rank")
def indexer_needs_a_query_latent(settings: Settings) -> str | None:
    if settings.use_indexer and settings.q_lora_rank == 0:
        return "use_indexer=true needs q_lora_rank > 0: the indexer reads the query latent"
    return None


@rule("indexer_head_dim")
def indexer_heads_contain_the_rotary_part(settings: Settings) -> str | None:
    if settings.use_indexer and settings.indexer_head_dim < settings.qk_rope_head_dim:
        return (
            f"indexer_head_dim={settings.indexer_head_dim} is below "
            f"qk_rope_head_dim={settings.qk_rope_head_dim}, the rotary part of a head"
        )
    return None


@rule("use_qk_clip")
def qk_clip_needs_mla(settings: Settings) -> str | None:
    if settings.use_qk_clip and settings.attention_type != "mla":
        return "use_qk_clip=true needs attention_type=mla: clipping rescales MLA's projections"
    return None


@rule("gdn_num_value_heads")
def delta_net_heads_divide_evenly(settings: Settings) -> str | None:
    if settings.gdn_num_value_heads % settings.gdn_num_key_heads:
        return (
            f"gdn_num_value_heads={settings.gdn_num_value_heads} is not a multiple of "
            f"gdn_num_key_heads={settings.gdn_num_key_heads}"
        )
    return None


@rule("num_experts_per_tok")
def tokens_choose_among_the_experts(settings: Settings) -> str | None:
    if settings.num_experts_per_tok > settings.num_experts:
        return (
            f"num_experts_per_tok={settings.num_experts_per_tok} is more than "
            f"num_experts={settings.num_experts}"
        )
    return None


@rule("n_routing_groups")
def routing_groups_divide_the_experts(settings: Settings) -> str | None:
    groups, topk = settings.n_routing_groups, settings.topk_routing_group
    if groups == -1 and topk == -1:
        return None
    if groups < 1 or not 1 <= topk <= groups:
        return (
            f"topk_routing_group={topk} must be in 1..n_routing_groups={groups}, or both must be -1"
        )
    if settings.num_experts % groups:
        return f"n_routing_groups={groups} does not divide num_experts={settings.num_experts}"
    if topk * settings.num_experts // groups < settings.num_experts_per_tok:
        return (
            f"topk_routing_group={topk} groups of {settings.num_experts // groups} experts are "
            f"fewer than num_experts_per_tok={settings.num_experts_per_tok}: keep more groups"
        )
    return None


@rule("first_num_dense_layers")
def dense_layers_are_among_the_layers(settings: Settings) -> str | None:
    if settings.first_num_dense_layers > settings.base_num_decoder_layers:
        return (
            f"first_num_dense_layers={settings.first_num_dense_layers} is more than "
            f"base_num_decoder_layers={settings.base_num_decoder_layers}"
        )
    return None


@rule("routed_bias_update_rate")
def loss_free_balancing_needs_a_bias(settings: Settings) -> str | None:
    if settings.routed_bias_update_rate > 0 and not settings.routed_bias:
        return "routed_bias_update_rate updates the router's bias: set routed_bias=true"
    return None


@rule("capacity_factor")
def capacity_needs_dense_matmul(settings: Settings) -> str | None:
    factor = settings.capacity_factor
    if factor <= 0 and factor != -1:
        return (
            f"capacity_factor={factor:g} is out of range: it must be above 0, or -1 to drop no "
            "tokens"
        )
    if factor > 0 and settings.sparse_matmul:
        return (
            f"capacity_factor={factor:g} drops tokens, which sparse_matmul=true never does: "
            "set sparse_matmul=false"
        )
    return None


@rule("ragged_buffer_factor")
def ragged_buffer_factor_is_positive(settings: Settings) -> str | None:
    factor = settings.ragged_buffer_factor
    if factor <= 0 and factor != -1:
        return (
            f"ragged_buffer_factor={factor:g} is out of range: it must be above 0, or -1 for all "
            "tokens"
        )
    return None


@derived_rule("ragged_buffer_factor", ProblemKind.INERT)
def ragged_buffer_bounds_something(config: MaxTextConfig) -> str | None:
    factor, size = config.ragged_buffer_factor, expert_parallel_size(config)
    if factor >= size:
        return (
            f"ragged_buffer_factor={factor:g} would do nothing: with experts over {size} "
            f"device{'s' * (size > 1)}, a buffer factor of {size} already holds all tokens; leave "
            "it -1"
        )
    return None


@derived_rule("use_ring_of_experts", ProblemKind.INERT)
def ring_of_experts_needs_expert_parallelism(config: MaxTextConfig) -> str | None:
    if config.use_ring_of_experts and expert_parallel_size(config) == 1:
        return (
            "use_ring_of_experts=true would do nothing: it needs expert parallelism; set "
            f"ici_expert_parallelism above 1, to a divisor of num_experts={config.num_experts}"
        )
    return None


@derived_rule("moe_fsdp_use_two_stage_all_gather", ProblemKind.INERT)
def two_stage_all_gather_needs_two_axes(config: MaxTextConfig) -> str | None:
    if config.moe_fsdp_use_two_stage_all_gather and not (
        num_shards(config, "fsdp") > 1 and num_shards(config, "fsdp_transpose") > 1
    ):
        return (
            "moe_fsdp_use_two_stage_all_gather=true would do nothing: it needs "
            "ici_fsdp_parallelism and ici_fsdp_transpose_parallelism above 1"
        )
    return None


@derived_rule("shard_exp_on_fsdp", ProblemKind.INERT)
def fsdp_has_several_devices(config: MaxTextConfig) -> str | None:
    if config.shard_exp_on_fsdp and fsdp_splits_nothing(config):
        return "shard_exp_on_fsdp=true would do nothing: it needs ici_fsdp_parallelism above 1"
    return None


@derived_rule("shard_exp_on_fsdp")
def fsdp_splits_the_experts(config: MaxTextConfig) -> str | None:
    if not config.shard_exp_on_fsdp or fsdp_splits_nothing(config):
        return None
    axes = axes_of(config, "exp_with_fsdp")
    shards = num_shards(config, *axes)
    if config.num_experts % shards:
        return (
            f"shard_exp_on_fsdp=true splits experts over {shards} devices, which do not divide "
            f"num_experts={config.num_experts}: change ici_fsdp_parallelism"
        )
    idle = axes_of(config, "exp") - axes
    if num_shards(config, *idle) > 1:
        return (
            f"shard_exp_on_fsdp=true leaves the mesh axis {sorted(idle)[0]!r} without experts: set "
            "its parallelism to 1, or add it to the rule exp_with_fsdp in logical_axis_rules"
        )
    return None


def fsdp_splits_nothing(config: MaxTextConfig) -> bool:
    return "fsdp" in axes_of(config, "exp_with_fsdp") and num_shards(config, "fsdp") == 1


def axes_of(config: MaxTextConfig, name: str) -> set[str]:
    """The mesh axes that may shard the logical axis `name`."""
    return {
        axis for rule_name, axes in config.logical_axis_rules if rule_name == name for axis in axes
    }


def num_shards(config: MaxTextConfig, *axes: str) -> int:
    """The product of the sizes of mesh axes."""
    sizes = zip(config.mesh_axes, config.ici_parallelism, config.dcn_parallelism, strict=True)
    return math.prod(ici * dcn for axis, ici, dcn in sizes if axis in axes)


def expert_parallel_size(config: MaxTextConfig) -> int:
    """The number of devices that divide the experts among them and exchange tokens."""
    named = axes_of(config, "exp_with_fsdp" if config.shard_exp_on_fsdp else "exp")
    count = num_shards(config, *(named & axes_of(config, "activation_exp")))
    return 1 if config.num_experts % count else count


@rule("capacity_factor")
def one_bound_of_expert_buffers(settings: Settings) -> str | None:
    if settings.capacity_factor > 0 and settings.ragged_buffer_factor > 0:
        return (
            "capacity_factor and ragged_buffer_factor both bound the tokens of an expert: set "
            "one, leave the other -1"
        )
    return None


@rule("hidden_size_for_vit")
def vision_heads_divide_the_width(settings: Settings) -> str | None:
    if (
        settings.use_multimodal
        and settings.hidden_size_for_vit % settings.num_attention_heads_for_vit
    ):
        return (
            f"hidden_size_for_vit={settings.hidden_size_for_vit} is not a multiple of "
            f"num_attention_heads_for_vit={settings.num_attention_heads_for_vit}"
        )
    return None


@rule("mrope_section")
def mrope_has_three_sections(settings: Settings) -> str | None:
    if settings.use_mrope and len(settings.mrope_section) != 3:
        return f"mrope_section={settings.mrope_section} needs three numbers: time, height, width"
    return None
