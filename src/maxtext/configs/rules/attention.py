"""Rules of the attention keys."""

from maxtext.configs.problems import ProblemKind
from maxtext.configs.rules.rule import in_range, inert_unless, one_of, rule
from maxtext.configs.types import Settings

one_of(
    "attention",
    "autoselected",
    "dot_product",
    "flash",
    "cudnn_flash_jax",
    "cudnn_flash_te",
    "paged",
    "vllm_rpa",  # refused below, with the reason
)
in_range(1, None, "moba_chunk_size", "moba_topk", "ragged_block_size", "qk_clip_threshold")
in_range(0, 1, "partial_rotary_factor")
in_range(1, None, "gdn_conv_kernel_dim", "gdn_key_head_dim", "gdn_value_head_dim", "gdn_chunk_size")
in_range(1, None, "gdn_num_key_heads", "gdn_num_value_heads")
in_range(1, None, "kv_lora_rank", "qk_rope_head_dim", "v_head_dim")
in_range(1, None, "indexer_head_dim", "indexer_n_heads", "indexer_topk")
in_range(0, None, "indexer_loss_scaling_factor", "global_num_kv_heads")
in_range(
    1, None, "pagedattn_num_pages", "pagedattn_tokens_per_page", "pagedattn_pages_per_compute_block"
)
in_range(
    1,
    None,
    "sa_block_q",
    "sa_block_kv",
    "sa_block_kv_compute",
    "sa_block_q_dkv",
    "sa_block_kv_dkv",
    "sa_block_kv_dkv_compute",
    "sa_block_q_dq",
    "sa_block_kv_dq",
)
for _layout in ("sa_q_layout", "sa_k_layout", "sa_v_layout"):
    one_of(_layout, "HEAD_DIM_MINOR", "SEQ_MINOR")


def uses_mla(settings: Settings) -> bool:
    return settings.attention_type == "mla"


def saves_custom_tensors(settings: Settings) -> bool:
    return settings.remat_policy == "custom"


@rule("attention", ProblemKind.UNSUPPORTED)
def attention_is_not_of_vllm(settings: Settings) -> str | None:
    if settings.attention != "vllm_rpa":
        return None
    return (
        "attention=vllm_rpa is the attention of a vLLM server, which this package does not use: "
        "leave it out, or set attention=paged to generate text with a paged KV cache"
    )


inert_unless(lambda s: s.use_qk_clip, "use_qk_clip=true", "qk_clip_threshold")
inert_unless(lambda s: s.moba, "moba=true", "moba_chunk_size", "moba_topk")
inert_unless(lambda s: s.use_ragged_attention, "use_ragged_attention=true", "ragged_block_size")
inert_unless(
    uses_mla,
    "attention_type=mla",
    "mla_naive_kvcache",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
inert_unless(
    lambda s: s.use_indexer,
    "use_indexer=true",
    "indexer_head_dim",
    "indexer_n_heads",
    "indexer_topk",
    "indexer_loss_scaling_factor",
)
inert_unless(
    lambda s: s.use_indexer and s.indexer_loss_scaling_factor > 0,
    "use_indexer=true and indexer_loss_scaling_factor",
    "indexer_sparse_training",
)

# remat_policy=custom can save only tensors that the model has.
inert_unless(lambda s: s.fused_qkv, "fused_qkv=true", "qkv_proj")
inert_unless(
    lambda s: saves_custom_tensors(s) and uses_mla(s),
    "remat_policy=custom and attention_type=mla",
    "kv_wa_proj",
    "mla_q",
)
inert_unless(
    lambda s: saves_custom_tensors(s) and uses_mla(s) and s.mla_naive_kvcache,
    "remat_policy=custom, attention_type=mla and mla_naive_kvcache=true",
    "mla_kv",
)
inert_unless(
    lambda s: saves_custom_tensors(s) and uses_mla(s) and s.q_lora_rank > 0,
    "remat_policy=custom, attention_type=mla and q_lora_rank",
    "query_wa_proj",
)


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
