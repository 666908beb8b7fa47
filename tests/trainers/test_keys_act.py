"""Every acting key of the training groups changes the program of a training step or of its initial
state.

A key is shown to act by tracing what is computed with and without it (`Program` in conftest.py):
some part differs. Keys that the loop or the data reads are exempt here, with the name of the test
that covers them. test_no_silent_keys.py asks the same of every family.
"""

import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs import ledger, types
from maxtext.models.hf_registry import hf_config
from maxtext.trainers.build import build_run_context

GROUPS = (
    types.ModelArchitecture, types.DataTypes, types.Logits, types.Attention, types.Optimizer,
    types.AdamW, types.Muon, types.PositionalEmbedding, types.Rope, types.YarnRope,
    types.TrainingLoop, types.Llama4Attention, types.Qwen3Next, types.DeepSeekMoE, types.MTP,
    types.MoBa, types.MlaAttention, types.AttentionIndexer, types.MoEGeneral, types.MoEKernels,
    types.ManifoldConstrainedHyperConnections, types.Engram, types.RunControl,
)  # fmt: skip

# What a key is added to. A model's keys are shown under the smallest optimizer, an optimizer's on
# the smallest model.
PLAIN = (
    "opt_type=sgd",
    "gradient_clipping_threshold=0",
    "abort_on_nan_loss=false",
    "abort_on_inf_loss=false",
)
HALF = (*PLAIN, "dtype=bfloat16")
TIED = (*PLAIN, "logits_via_embedding=true")
CAPPED = (*HALF, "final_logits_soft_cap=5")
LLAMA31 = (*PLAIN, "rope_type=llama3.1", "original_max_position_embeddings=32")
YARN = (*PLAIN, "rope_type=yarn", "rope_factor=4")
NORMED = (*PLAIN, "use_qk_norm=true")
SHAKEN = (*PLAIN, "dropout_rate=0.5")
PRODUCTS = ("decoder_block=simple_mlp",)
WSD = (*PRODUCTS, "lr_schedule_type=wsd")
SKIPPING = (*PRODUCTS, "skip_step_on_spikes=true")
MUON = (*PRODUCTS, "opt_type=muon")
GEMMA4 = (
    *PLAIN, "decoder_block=gemma4", "base_num_decoder_layers=2", "architecture={layer_kinds: "
                                                                 "[sliding, full]}",
    "sliding_window_size=4", "global_head_dim=16",
)  # fmt: skip
LLAMA4 = (*PLAIN, "decoder_block=llama4", "nope_layer_interval=1")
MTP = (*PLAIN, "mtp_num_layers=1")
CHUNKS = (*PLAIN, "moba=true", "moba_chunk_size=4", "moba_topk=2")
LATENT = (
    *PLAIN, "decoder_block=deepseek", "attention_type=mla", "base_num_kv_heads=4", "head_dim=128",
    "q_lora_rank=12", "kv_lora_rank=10", "qk_nope_head_dim=6", "qk_rope_head_dim=4", "v_head_dim=8",
)  # fmt: skip
LATENT_YARN = (*LATENT, "rope_type=yarn", "rope_factor=4")
CLIPPED = (*LATENT, "use_qk_clip=true")
PICKING = (*LATENT, "use_indexer=true", "indexer_topk=3", "indexer_head_dim=8", "indexer_n_heads=2")
LEARNING = (*PICKING, "indexer_loss_scaling_factor=1")
EXPERTS = (*PLAIN, "decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2")
HALF_EXPERTS = (*EXPERTS, "dtype=bfloat16")
ROUTED = (*PLAIN, "decoder_block=qwen3_moe", "num_experts=4", "num_experts_per_tok=2")
DEEPSEEK = (*PLAIN, "decoder_block=deepseek", "num_experts=4", "num_experts_per_tok=2")
BIASED = (*DEEPSEEK, "routed_bias=true")
GROUPED = (*DEEPSEEK, "n_routing_groups=2", "topk_routing_group=1")
MAVERICK = (*LLAMA4, "num_experts=4", "base_num_decoder_layers=2")
NARROW = (
    *PLAIN, "decoder_block=qwen3_custom_moe", "num_experts=4", "attention_output_dim=8",
    "moe_expert_input_dim=8",
)  # fmt: skip
DELTA_NET = (
    *PLAIN, "decoder_block=qwen3_next", "base_num_decoder_layers=1", "gdn_key_head_dim=8",
    "gdn_value_head_dim=6", "gdn_num_key_heads=2", "gdn_num_value_heads=4",
)  # fmt: skip
STREAMS = (*PLAIN, "mhc_expansion_rate=2")
MEMORY = (
    *PLAIN,
    "engram_layers=[0]",
    "engram_vocab_bases=[20, 20]",
    "engram_head_dim=4",
    "engram_num_heads=2",
)

CASES = {
    # ModelArchitecture
    "decoder_block": ("default", PLAIN),
    "global_parameter_scale": ("2", PRODUCTS),
    "base_emb_dim": ("24", PRODUCTS),
    "base_num_query_heads": ("2", PLAIN),
    "base_num_kv_heads": ("4", PLAIN),
    "base_mlp_dim": ("48", PRODUCTS),
    "dense_init_scale": ("2", PRODUCTS),
    "base_num_decoder_layers": ("2", PRODUCTS),
    "head_dim": ("4", PLAIN),
    "mlp_activations": ("[gelu, linear]", PLAIN),
    "normalization_layer_epsilon": ("1e-3", PRODUCTS),
    "fused_qkv": ("true", PLAIN),
    "attention_bias": ("true", PLAIN),
    "fused_mlp": ("true", PLAIN),
    "qk_norm_with_scale": ("false", NORMED),
    "attention_output_dim": ("12", NARROW, "moe_expert_input_dim=12"),
    "global_head_dim": ("12", GEMMA4),
    "mlp_activations_limit": ("7", PLAIN),
    "v_norm_with_scale": ("false", GEMMA4),
    # DataTypes
    "dtype": ("bfloat16", PRODUCTS),
    "grad_dtype": ("bfloat16", PRODUCTS),
    "weight_dtype": ("bfloat16", PRODUCTS),
    "matmul_precision": ("default", PRODUCTS),
    "activations_in_float32": ("true", HALF),
    # Logits
    "logits_via_embedding": ("true", PRODUCTS),
    "normalize_embedding_logits": ("false", TIED),
    "logits_dot_in_fp32": ("true", HALF),
    "cast_logits_to_fp32": (
        "false",
        CAPPED,
    ),  # the loss is float32 either way, what comes before it is not
    "final_logits_soft_cap": ("5", PRODUCTS),
    "z_loss_multiplier": ("0.1", PRODUCTS),
    # Attention
    "attention_type": ("full", PLAIN),
    "attention_sink": ("true", PLAIN),
    "float32_qk_product": ("true", HALF),
    "float32_logits": ("true", HALF),
    "sliding_window_size": ("4", (*PLAIN, "decoder_block=mistral")),
    "chunk_attn_window_size": ("4", (*PLAIN, "attention_type=chunk", "chunk_attn_window_size=8")),
    "attn_logits_soft_cap": ("5", PLAIN),
    "use_post_attn_norm": ("true", PLAIN),
    "use_post_ffw_norm": ("true", PLAIN),
    "share_kv_projections": ("true", GEMMA4),
    "global_num_kv_heads": ("1", GEMMA4),
    "use_qk_clip": ("true", LATENT),
    "qk_clip_threshold": ("50", CLIPPED),
    # Optimizer
    "opt_type": ("adam_pax", PRODUCTS),
    "skip_step_on_spikes": ("true", PRODUCTS),
    "skip_step_interval": ("7", SKIPPING),
    "skip_step_scaling_factor": ("3", SKIPPING),
    "gradient_accumulation_steps": ("2", PRODUCTS),
    "gradient_clipping_threshold": ("0.5", PRODUCTS),
    "learning_rate": ("0.5", PRODUCTS),
    "lr_schedule_type": ("wsd", PRODUCTS),
    "learning_rate_final_fraction": ("0.5", PRODUCTS),
    "wsd_decay_steps_fraction": ("0.5", WSD),
    "wsd_decay_style": ("cosine", WSD),
    "warmup_steps_fraction": ("0.5", PRODUCTS),
    "learning_rate_schedule_steps": ("77", PRODUCTS),
    "trainable_parameters_mask": ("[head]", PRODUCTS),
    # AdamW
    "adam_b1": ("0.5", PRODUCTS),
    "adam_b2": ("0.5", PRODUCTS),
    "adam_eps": ("1e-3", PRODUCTS),
    "adam_eps_root": ("1e-3", PRODUCTS),
    "adam_weight_decay": ("0.5", PRODUCTS),
    "adamw_mask": ("[head]", PRODUCTS),
    "mu_dtype": ("bfloat16", PRODUCTS),
    # Muon
    "muon_beta": ("0.5", MUON),
    "muon_weight_decay": ("0.5", MUON),
    "muon_consistent_rms": ("0.2", MUON),
    # PositionalEmbedding
    "use_iota_embed": ("true", PRODUCTS),
    "use_untrainable_positional_embedding": ("true", PRODUCTS),
    "trainable_position_size": ("16", PRODUCTS),
    "nope_layer_interval": ("1", PLAIN),
    # Rope
    "rope_type": ("yarn", PLAIN),
    "rope_use_scale": ("false", LLAMA31),
    "rope_min_timescale": ("2", PLAIN),
    "rope_max_timescale": ("500", PLAIN),
    "rope_linear_scaling_factor": ("2", PLAIN),
    "local_rope_max_timescale": ("500", GEMMA4),
    "global_rope_max_timescale": ("500", GEMMA4),
    "global_rope_proportion": ("0.5", GEMMA4),
    "local_rope_proportion": ("0.5", GEMMA4),
    # YarnRope
    "original_max_position_embeddings": ("64", YARN),
    "rope_factor": ("8", YARN),
    "beta_fast": ("2", YARN),
    "beta_slow": ("8", YARN),
    "rope_interleave": ("false", YARN),
    "rope_truncate": ("false", YARN),
    "rope_attention_scaling": ("true", YARN),
    "mscale": ("0.5", LATENT_YARN),
    # TrainingLoop
    "steps": ("60", PRODUCTS),
    "enable_dropout": ("false", SHAKEN),
    "dropout_rate": ("0.25", SHAKEN),
    "init_weights_seed": ("1", PRODUCTS),
    # Llama4Attention
    "use_qk_norm": ("true", PLAIN),
    "temperature_tuning": ("true", LLAMA4),
    # MTP
    "mtp_num_layers": ("1", PLAIN),
    "mtp_loss_scaling_factor": ("0.5", MTP),
    # MoBa
    "moba": ("true", (*PLAIN, "moba_chunk_size=1024", "moba_topk=8")),
    "moba_chunk_size": ("8", CHUNKS),
    "moba_topk": ("3", CHUNKS),
    # MlaAttention
    "mla_naive_kvcache": ("false", LATENT),
    "q_lora_rank": ("0", LATENT),
    "kv_lora_rank": ("12", LATENT),
    "qk_nope_head_dim": ("4", LATENT),
    "qk_rope_head_dim": ("8", LATENT),
    "v_head_dim": ("6", LATENT),
    # AttentionIndexer
    "use_indexer": ("true", LATENT),
    "indexer_head_dim": ("16", PICKING),
    "indexer_n_heads": ("3", PICKING),
    "indexer_topk": ("5", PICKING),
    "indexer_sparse_training": ("true", LEARNING),
    "indexer_loss_scaling_factor": ("0.5", LEARNING),
    # MoEGeneral
    "num_experts": ("8", EXPERTS),
    "num_experts_per_tok": ("1", EXPERTS),
    "capacity_factor": ("1.5", (*EXPERTS, "sparse_matmul=false")),
    "ragged_buffer_factor": ("0.5", EXPERTS),
    "moe_expert_input_dim": ("12", NARROW, "attention_output_dim=12"),
    "base_moe_mlp_dim": ("24", (*BIASED, "first_num_dense_layers=1", "base_num_decoder_layers=2")),
    "load_balance_loss_weight": ("0.1", EXPERTS),
    "use_custom_sort_vjp": ("false", EXPERTS),
    "use_random_routing": ("true", EXPERTS),
    "interleave_moe_layer_step": ("2", MAVERICK),
    "norm_topk_prob": ("true", ROUTED),
    "float32_weight_sum": ("false", HALF_EXPERTS),
    "float32_gate_logits": ("true", HALF_EXPERTS),
    # MoEKernels
    "sparse_matmul": ("false", EXPERTS),
    # DeepSeekMoE
    "first_num_dense_layers": ("1", (*DEEPSEEK, "base_num_decoder_layers=2")),
    "shared_experts": ("1", EXPERTS),
    "routed_scaling_factor": ("2.5", EXPERTS),
    "routed_score_func": ("sigmoid", DEEPSEEK),
    "routed_bias": ("true", DEEPSEEK),
    "routed_bias_update_rate": ("0.1", BIASED),
    "mlp_bias": ("true", PLAIN),
    "n_routing_groups": ("4", GROUPED, "topk_routing_group=2"),
    "topk_routing_group": ("2", GROUPED),
    # Qwen3Next
    "gdn_conv_kernel_dim": ("3", DELTA_NET),
    "gdn_key_head_dim": ("4", DELTA_NET),
    "gdn_value_head_dim": ("4", DELTA_NET),
    "gdn_num_key_heads": ("4", DELTA_NET),
    "gdn_num_value_heads": ("2", DELTA_NET),
    "gdn_chunk_size": ("8", DELTA_NET),
    "use_qk_norm_in_gdn": ("false", DELTA_NET),
    "partial_rotary_factor": ("0.5", PLAIN),
    # ManifoldConstrainedHyperConnections
    "mhc_expansion_rate": ("2", PLAIN),
    "sinkhorn_iterations": ("5", STREAMS),
    # Engram
    "engram_layers": ("[1]", (*MEMORY, "base_num_decoder_layers=2")),
    "engram_num_heads": ("3", MEMORY),
    "engram_head_dim": ("6", MEMORY),
    "engram_vocab_bases": ("[30, 30]", MEMORY),
    "engram_max_ngram_size": ("2", MEMORY, "engram_vocab_bases=[20]"),
    "engram_kernel_size": ("3", MEMORY),
    "engram_seed": ("1", MEMORY),
}

EXEMPT = {
    "attention": "test_an_unsupported_attention_backend_is_rejected, below: on a CPU there is but "
    "one",
    "megablox": "needs a Hopper GPU, or to make believe: tests/layers/test_moe_kernel.py",
    "use_ring_of_experts": "needs several devices: tests/layers/test_moe_sharded.py",
    "moe_fsdp_use_two_stage_all_gather": "needs several devices: tests/layers/test_moe_sharded.py",
    "shard_exp_on_fsdp": "needs several devices: tests/layers/test_moe_sharded.py",
    "log_period": "read by the console and TensorBoard: tests/diagnostics",
    "eval_interval": "read by the loop: test_loss_evaluation.py",
    "eval_steps": "read by the loop: test_loss_evaluation.py",
    "target_eval_loss": "read by the loop: test_loss_evaluation.py",
    "eval_start_step": "read by the loop: test_loss_evaluation.py",
    "save_checkpoint_on_start": "read by the loop: checkpointing/test_resume.py",
    "max_inflight_computations": "read by the loop: test_loop.py",
    "logical_axis_rules_for_eval": "needs several devices: tests/sharding/test_devices.py",
    "custom_mesh_and_rule_for_eval": "completes logical_axis_rules_for_eval: "
    "tests/configs/test_later_release.py",
    "mtp_eval_target_module": "read by evaluation: test_model_losses.py and test_families.py",
    "max_position_embeddings": "test_max_position_embeddings_is_written_to_config_json, below",
    "abort_on_nan_loss": "each alone is read by the loop, both together change the step: "
    "test_nonfinite.py",
    "abort_on_inf_loss": "as abort_on_nan_loss: test_nonfinite.py",
    "enable_data_shuffling": "the order of the data: tests/input_pipeline/test_grain_coverage.py",
    "use_ragged_attention": "read when text is generated: tests/inference/engine/test_scheduler.py",
    "ragged_block_size": "read when text is generated: tests/inference/engine/test_scheduler.py",
    "data_shuffle_seed": "the order of the data: tests/input_pipeline, tests/e2e/test_train.py",
}


@pytest.fixture(scope="module")
def programs(configure, program):
    """(overrides) -> their Program, traced once."""
    cache = {}

    def get(*overrides):
        if overrides not in cache:
            cache[overrides] = program(configure(*overrides))
        return cache[overrides]

    return get


def acting():
    return {
        key for group in GROUPS for key in group.model_fields if ledger.status(key).kind == "acts"
    }


def test_every_acting_key_has_a_test():
    """A key that begins to act needs a case here, or a reason why its effect is shown elsewhere."""
    assert not CASES.keys() & EXEMPT.keys()
    assert acting() == CASES.keys() | EXEMPT.keys()


@pytest.mark.parametrize("overrides", [PLAIN, PRODUCTS, YARN])
def test_equal_configurations_give_equal_programs(configure, program, programs, overrides):
    """Otherwise a difference between two texts would prove nothing."""
    assert program(configure(*overrides)).differs(programs(*overrides)) is None


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_key_changes_the_program(programs, key):
    value, overrides, *more = CASES[key]
    added = {override.partition("=")[0]: override for override in (f"{key}={value}", *more)}
    without = tuple(override for override in overrides if override.partition("=")[0] not in added)
    changed = (*without, *added.values())
    assert programs(*overrides).differs(programs(*changed)), f"{key}={value} changes nothing"


def test_an_unsupported_attention_backend_is_rejected(programs):
    for name in ("flash", "cudnn_flash_jax"):
        with pytest.raises(
            ConfigError, match=f"{name} cannot do this: it needs a .PU.*; use dot_product"
        ):
            _ = programs(*PLAIN, f"attention={name}").step


def test_max_position_embeddings_is_written_to_config_json(configure):
    written = hf_config(configure("max_position_embeddings=4321"), "float32")
    assert written["max_position_embeddings"] == 4321


# (a key without effect, the overrides with which it has none); the rest of the model's keys, in
# every family: test_no_silent_keys.py
UNREAD = [
    ("rope_factor=8", ()),
    ("original_max_position_embeddings=64", ()),
    ("beta_fast=8", ()),
    ("rope_interleave=false", ("rope_type=llama3.1",)),
    ("rope_attention_scaling=true", ("rope_type=llama3.1",)),
    ("rope_use_scale=false", ()),
    ("rope_linear_scaling_factor=2", ("rope_type=yarn",)),
    ("rope_max_timescale=500", ("trainable_position_size=16",)),
    ("partial_rotary_factor=0.5", ("use_untrainable_positional_embedding=true",)),
    ("sliding_window_size=4", ()),
    ("chunk_attn_window_size=4", ()),
    ("normalize_embedding_logits=false", ()),
    ("qk_norm_with_scale=false", ()),
    ("target_eval_loss=1", ()),
    ("attention_sink=true", ("decoder_block=simple",)),
    ("out_proj=device", ()),
    ("moe_mlpwo=device", EXPERTS),
    ("moe_mlpwo=device", ("remat_policy=custom",)),
    ("mla_kv=device", (*LATENT, "mla_naive_kvcache=false", "remat_policy=custom")),
    ("engram=device", ("remat_policy=custom",)),
    ("qkv_proj=device", ("remat_policy=custom",)),
]


@pytest.mark.parametrize(("override", "overrides"), UNREAD)
def test_a_key_without_effect_is_rejected(configure, override, overrides):
    """As the optimizers reject their own (muon_beta under adamw): a key acts, or setting it is an
    error.
    """
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        build_run_context(configure(*overrides, override))


def test_learned_positions_must_cover_a_row(configure):
    with pytest.raises(ConfigError, match="trainable_position_size"):
        build_run_context(configure("trainable_position_size=8", "max_target_length=16"))


# Tensors saved under remat_policy=custom. With norms on outputs, the backward pass needs what comes
# before them.
NEEDED = ("use_post_attn_norm=true", "use_post_ffw_norm=true", "remat_policy=custom")
TENSORS = {
    "moe_mlpwi_0": EXPERTS,
    "moe_mlpwi_1": EXPERTS,
    "moe_mlpwo": EXPERTS,
    "query_wa_proj": LATENT,
    "kv_wa_proj": LATENT,
    "mla_q": LATENT,
    "mla_kv": LATENT,
    "engram": MEMORY,
}


@pytest.mark.slow
@pytest.mark.parametrize("key", TENSORS)
def test_each_named_tensor_can_be_saved(programs, key):
    overrides = (*TENSORS[key], *NEEDED)
    assert programs(*overrides).differs(programs(*overrides, f"{key}=device")) == "residuals"
