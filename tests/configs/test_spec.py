"""Every group, key, type, default and choice is the published one."""

import json
import typing
from enum import Enum
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from maxtext.configs import fields, types
from maxtext.configs.load import base_values
from maxtext.configs.types import GROUPS

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "spec" / "config_keys.json"
PUBLISHED = json.loads((HERE / "published_keys.json").read_text())
# The published default of the cache folder is the home of the machine that listed the keys.
HOME_DEFAULTS = {"jax_cache_dir": "~/jax_cache"}
# Keys that only this project has.
ADDED_KEYS = {
    "BadData": ["max_bad_records"],
    "InterimCheckpoints": ["checkpoint_period_minutes"],
    "MemoryCheck": ["check_memory"],
    "DataOrder": ["data_streams", "mixture_stopping_strategy"],
    "Preferences": [
        "dpo_loss_type",
        "orpo_lambda",
        "simpo_gamma",
        "max_prompt_length",
        "precompute_reference_logps",
    ],
    "RewardModeling": ["num_labels", "center_rewards_coefficient"],
    "Adapters": [
        "enable_lora",
        "lora_rank",
        "lora_alpha",
        "lora_module_path",
        "lora_target_modules",
        "lora_dropout",
        "lora_use_rslora",
        "lora_use_dora",
        "lora_init",
        "lora_weight_qtype",
        "lora_tile_size",
        "lora_restore_path",
        "max_adapters",
    ],
    "GeneralizedDistillation": [
        "use_gkd",
        "gkd_lambda",
        "gkd_beta",
        "gkd_max_new_tokens",
        "gkd_seq_kd",
    ],
    "PolicyOptimization": [
        "loss_agg_mode",
        "scale_rewards",
        "kl_estimator",
        "kl_correction",
        "dual_clip",
        "sampler_correction",
        "sampler_correction_cap",
        "sampler_trainer_tolerance",
        "mask_truncated",
        "reasoning_start_token_in_prompt",
        "reward_functions_path",
        "reward_functions",
        "reward_weights",
        "reward_model_path",
        "max_turns",
        "eval_batch_size",
        "dataset_processor_path",
        "data_template_path",
    ],
    "RunControl": [
        "save_checkpoint_on_start",
        "max_inflight_computations",
        "eval_start_step",
        "custom_mesh_and_rule_for_eval",
        "logical_axis_rules_for_eval",
    ],
    "WeightsAndBiases": ["enable_wandb", "wandb_project_name", "wandb_run_name"],
    "LaterReleases": [
        "moe_dispatch_no_expert_sharding",
        "ici_context_usp_ulysses_parallelism",
        "dcn_context_usp_ulysses_parallelism",
        "ulysses_context_sharding",
        "use_gmm_v2",
        "use_ragged_sort",
        "ragged_gather_fallback",
        "ragged_gather_reduce_fallback",
        "ragged_gather_cost_estimate_flops",
        "ragged_gather_reduce_cost_estimate_flops",
        "ragged_gather_cost_estimate_bytes_accessed",
        "ragged_gather_reduce_cost_estimate_bytes_accessed",
        "sa_bwd_dkv_megacore",
        "ring_scan_unroll",
        "sa_fuse_reciprocal",
        "sa_use_base2_exp",
        "local_sa_block_q",
        "local_sa_block_kv",
        "local_sa_block_kv_compute",
        "local_sa_block_q_dkv",
        "local_sa_block_kv_dkv",
        "local_sa_block_kv_dkv_compute",
        "local_sa_block_q_dq",
        "local_sa_block_kv_dq",
        "local_sa_use_fused_bwd_kernel",
        "local_sa_q_layout",
        "local_sa_k_layout",
        "local_sa_v_layout",
        "local_use_splash_scheduler",
        "local_sa_fuse_reciprocal",
        "local_sa_use_base2_exp",
        "experimental_sa_quant_q_fp8",
        "experimental_sa_quant_k_fp8",
        "video_max_grid_t",
        "video_max_grid_h",
        "video_max_grid_w",
        "num_moe_token_chunks",
        "moe_chunk_barrier",
        "num_moe_emb_chunks",
        "first_num_hash_layers",
        "o_lora_rank",
        "o_groups",
        "compress_ratios",
        "compressed_rope_max_timescale",
        "hidden_size_per_layer_input",
        "vocab_size_per_layer_input",
        "num_kv_shared_layers",
        "use_double_wide_mlp",
        "training_objective",
        "causal_block_size",
        "block_diffusion_mask_id",
        "block_diffusion_min_noise",
        "block_diffusion_logit_alignment",
        "block_diffusion_canvas_policy",
        "indexer_use_approx_top_k",
        "indexer_approx_top_k_recall",
        "indexer_mask_exact_topk",
        "mla_qk_head_chunk_size",
        "indexer_cutoff_threshold",
        "kv_proj",
        "enable_mhc_lite",
        "dense_fsdp_use_two_stage_all_gather",
        "multi_tier_checkpointing_backup_interval_steps",
        "managed_mldiagnostics_on_demand_profiling",
        "managed_mldiagnostics_region",
        "elastic_backup_kind",
        "te_comm_gemm_overlap",
        "dcn_bandwidth_limit",
        "dcn_bandwidth_burst",
        "dcn_bandwidth_latency",
        "dcn_bandwidth_interface",
        "rope_pairwise",
        "check_vma",
        "use_sliced_mla_proj",
        "write_estimator_result",
    ],
}
# Filled by base.yml; the type's own default is empty.
BASE_ONLY = {"logical_axis_rules", "data_sharding"}


def type_text(field) -> str:
    """A type as the published list spells it: constraints as Annotated[…], choices and classes by
    name.
    """

    def spell(part) -> str:
        if part is type(None):
            return "None"
        if isinstance(part, type) and not hasattr(part, "__origin__"):
            return part.__name__
        text = str(part).replace("typing.", "").replace("NoneType", "None")
        return text.replace("annotated_types.", "")

    if fields.is_union(field.annotation):
        text = " | ".join(spell(part) for part in typing.get_args(field.annotation))
    else:
        text = spell(field.annotation)
    for bound in field.metadata:
        text = f"Annotated[{text}, {bound!r}]"
    return text


def default_text(field):
    if field.default is PydanticUndefined:
        return "<factory>"
    if isinstance(field.default, types.DecoderBlockType | types.ShardMode):
        return field.default.value
    if isinstance(field.default, Enum):
        return str(field.default)
    return field.default


def described():
    return {
        group.__name__: {
            key: [type_text(group.model_fields[key]), default_text(group.model_fields[key])]
            for key in group.model_fields
        }
        for group in GROUPS
    }


@pytest.mark.parametrize("group", PUBLISHED["groups"])
def test_group(group):
    expected = {key: list(fact) for key, fact in PUBLISHED["groups"][group].items()}
    for key, default in HOME_DEFAULTS.items():
        if key in expected:
            expected[key][1] = default
    actual = described()[group]
    if group == "RunInfo":  # may name further models
        names = typing.get_args(types.RunInfo.model_fields["model_name"].annotation)
        published = [name for name in names if f"'{name}'" in expected["model_name"][0]]
        actual["model_name"][0] = f"Literal{published}"
    assert actual == expected


def test_no_further_groups_or_keys():
    assert [group for group in described() if group not in ADDED_KEYS] == list(PUBLISHED["groups"])
    assert {group: list(described()[group]) for group in ADDED_KEYS} == ADDED_KEYS
    assert len(types.MaxTextConfig.model_fields) == 723 + sum(map(len, ADDED_KEYS.values()))


@pytest.mark.parametrize("name", PUBLISHED["enums"])
def test_choices(name):
    choices = {member.name: member.value for member in getattr(types, name)}
    if name == "DecoderBlockType":  # may name further families
        choices = {key: choices[key] for key in PUBLISHED["enums"][name]}
    assert choices == PUBLISHED["enums"][name]


@pytest.mark.skipif(not SHARED.exists(), reason="the published list is not beside this checkout")
def test_fixture_is_the_published_list():
    published = json.loads(SHARED.read_text())
    groups = {
        name: {key: [fact["type"], fact["default"]] for key, fact in group["fields"].items()}
        for name, group in published["groups"].items()
    }
    assert {"enums": published["enums"], "groups": groups} == PUBLISHED


def test_base_file_has_every_key_with_the_default_of_its_type():
    bare = types.Settings()
    base = base_values()
    differing = {
        key for key in types.Settings.model_fields if getattr(bare, key) != getattr(base, key)
    }
    assert differing == BASE_ONLY
    assert all(base.source(key).line for key in types.Settings.model_fields)


def test_derived_values_keep_the_order_of_their_keys():
    assert list(types.MaxTextConfig.model_fields) == list(types.Settings.model_fields)
