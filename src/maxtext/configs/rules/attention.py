"""Rules of the attention keys."""

from maxtext.configs.problems import ProblemKind
from maxtext.configs.rules.rule import rule
from maxtext.configs.types import Settings
from maxtext.configs.types.needs import uses_mla


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
