"""No silent knobs, in any family: a key of the model that is set changes what is computed, or is
refused.

Every key of the model's groups is added to every configuration below; the parts of a program
(conftest.py) are compared with and without it.
"""

import pytest

from maxtext.common.errors import ConfigError
from maxtext.configs import ledger, types
from maxtext.configs.derive import Devices
from maxtext.configs.sources import from_overrides, from_python
from maxtext.configs.types.remat import CUSTOM_TENSORS
from maxtext.models import rule
from maxtext.models.configuration import load
from tests.support.training_configurations import (
    CONFIGURATIONS,
    GEMMA4,
    HEADS,
    LATENT,
    MOE,
    WINDOW,
    YARN,
)

# bfloat16, so that asking for float32 makes a difference; two rows, and more tokens than any window
# or chunk.
TINY = {
    "base_emb_dim": 16, "base_num_query_heads": 4, "base_num_kv_heads": 4, "base_mlp_dim": 24,
    "base_num_decoder_layers": 1, "scan_layers": "false", "vocab_size": 29,
    "max_target_length": 16, "per_device_batch_size": 2,
    "dataset_type": "synthetic", "attention": "dot_product", "steps": 50, "eval_interval": 10,
}  # fmt: skip


ENGRAM = {
    "engram_layers": "[0]",
    "engram_vocab_bases": "[20, 20]",
    "engram_head_dim": 4,
    "engram_num_heads": 2,
}
CUSTOM = {
    "remat_policy": "custom",
    "use_post_ffw_norm": "true",
}  # the norm needs what the MLP gives
INDEXED = {"use_indexer": "true", "indexer_topk": 3, "indexer_head_dim": 8, "indexer_n_heads": 2}

GROUPS = (
    types.ModelArchitecture, types.MTP, types.Attention, types.MoBa, types.MlaAttention,
    types.AttentionIndexer, types.Llama4Attention, types.MoEGeneral, types.MoEKernels,
    types.DeepSeekMoE, types.Qwen3Next, types.PositionalEmbedding, types.Rope, types.YarnRope,
    types.ManifoldConstrainedHyperConnections, types.Engram,
)  # fmt: skip
POSITIONS = (types.PositionalEmbedding, types.Rope, types.YarnRope)
ATTENTION = (types.Attention, types.MoBa, types.Llama4Attention)
EXPERTS = (types.MoEGeneral, types.MoEKernels, types.DeepSeekMoE)
# Options of families above, which the keys of other groups do not meet.
VARIANTS = {
    "learned positions": (HEADS | {"trainable_position_size": 16}, POSITIONS),
    "llama3.1": (HEADS | {"rope_type": "llama3.1"}, POSITIONS),
    "yarn": (HEADS | YARN, POSITIONS),
    "chunks": (HEADS | {"attention_type": "chunk", "chunk_attn_window_size": 4}, ATTENTION),
    "norms": (HEADS | {"use_qk_norm": "true"}, (types.ModelArchitecture, *ATTENTION)),
    "moba": (HEADS | {"moba": "true", "moba_chunk_size": 4, "moba_topk": 2}, ATTENTION),
    "mistral window": (HEADS | WINDOW | {"decoder_block": "mistral"}, (*ATTENTION, *POSITIONS)),
    "gemma4 experts": (
        HEADS | WINDOW | GEMMA4 | MOE,
        (types.ModelArchitecture, *ATTENTION, *POSITIONS, *EXPERTS),
    ),
    "llama4 without positions": (
        HEADS
        | MOE
        | YARN
        | {
            "decoder_block": "llama4",
            "chunk_attn_window_size": 4,
            "nope_layer_interval": 2,
            "base_num_decoder_layers": 2,
        },
        (*ATTENTION, *POSITIONS, *EXPERTS),
    ),
    "deepseek that picks": (
        LATENT
        | MOE
        | INDEXED
        | {
            "routed_bias": "true",
            "routed_score_func": "sigmoid",
            "shared_experts": 1,
            "use_qk_clip": "true",
            "indexer_loss_scaling_factor": 1,
            "indexer_sparse_training": "true",
        },
        (*ATTENTION, types.MlaAttention, types.AttentionIndexer, *EXPERTS),
    ),
    "add-ons": (
        HEADS | ENGRAM | {"mhc_expansion_rate": 2, "mtp_num_layers": 1},
        (types.MTP, types.ManifoldConstrainedHyperConnections, types.Engram),
    ),
    "dense experts": (
        HEADS | MOE | {"decoder_block": "mixtral", "sparse_matmul": "false"},
        EXPERTS,
    ),
    "custom": (HEADS | CUSTOM, ()),
    "custom fused": (HEADS | ENGRAM | CUSTOM | {"fused_qkv": "true", "fused_mlp": "true"}, ()),
    "custom latents": (LATENT | CUSTOM, ()),
    "custom experts": (HEADS | MOE | CUSTOM | {"decoder_block": "mixtral"}, ()),
}
# Booleans are negated; other keys are tried with these values.
VALUES = {
    "base_emb_dim": [32], "base_num_query_heads": [8], "base_num_kv_heads": [1],
    "base_mlp_dim": [40],
    "dense_init_scale": [2], "base_num_decoder_layers": [3], "head_dim": [16],
    "attention_output_dim": [8],
    "global_head_dim": [12], "mlp_activations": ["[gelu, linear]"], "mlp_activations_limit": [7],
    "normalization_layer_epsilon": [1e-3], "mtp_num_layers": [2], "mtp_loss_scaling_factor": [0.5],
    "mtp_eval_target_module": [1],
    "attention_type": ["local_sliding", "chunk", "mla", "full"], "global_num_kv_heads": [1],
    "sliding_window_size": [3],
    "chunk_attn_window_size": [3], "attn_logits_soft_cap": [5], "qk_clip_threshold": [50],
    "moba_chunk_size": [8],
    "moba_topk": [3], "q_lora_rank": [8], "kv_lora_rank": [12], "qk_nope_head_dim": [4],
    "qk_rope_head_dim": [4],
    "v_head_dim": [4], "indexer_head_dim": [16], "indexer_n_heads": [3], "indexer_topk": [5],
    "indexer_loss_scaling_factor": [0.5], "num_experts": [4], "num_experts_per_tok": [3],
    "capacity_factor": [1.5],
    "ragged_buffer_factor": [0.5], "moe_expert_input_dim": [8], "base_moe_mlp_dim": [20],
    "load_balance_loss_weight": [0.1], "interleave_moe_layer_step": [2],
    "first_num_dense_layers": [1],
    "shared_experts": [2], "routed_scaling_factor": [2.5], "routed_score_func": ["sigmoid"],
    "routed_bias_update_rate": [0.1], "n_routing_groups": [4], "topk_routing_group": [2],
    "gdn_conv_kernel_dim": [3],
    "gdn_key_head_dim": [64], "gdn_value_head_dim": [64], "gdn_num_key_heads": [8],
    "gdn_num_value_heads": [48],
    "gdn_chunk_size": [8], "partial_rotary_factor": [0.5], "trainable_position_size": [20],
    "nope_layer_interval": [1],
    "rope_type": ["yarn", "llama3.1"], "rope_min_timescale": [2], "rope_max_timescale": [500],
    "rope_linear_scaling_factor": [2], "local_rope_max_timescale": [500],
    "global_rope_max_timescale": [500],
    "global_rope_proportion": [0.5], "local_rope_proportion": [0.5],
    "original_max_position_embeddings": [32],
    "rope_factor": [8], "beta_fast": [2], "beta_slow": [4], "mscale": [0.5],
    "mhc_expansion_rate": [3],
    "sinkhorn_iterations": [5], "engram_layers": ["[0]"], "engram_num_heads": [3],
    "engram_head_dim": [6],
    "engram_vocab_bases": ["[30, 30]"], "engram_max_ngram_size": [2], "engram_kernel_size": [3],
    "engram_seed": [1],
    "dropout_rate": [0.5], "ragged_block_size": [128],
}  # fmt: skip
# What comes with a key, for it makes no sense alone.
COMPANIONS = {
    "attention_output_dim": {"moe_expert_input_dim": 8},
    "moe_expert_input_dim": {"attention_output_dim": 8},
    "n_routing_groups": {"topk_routing_group": 2},
    "topk_routing_group": {"n_routing_groups": 4},
    "capacity_factor": {"sparse_matmul": "false"},
    "engram_max_ngram_size": {"engram_vocab_bases": "[20]"},
}
# Keys that leave the program of a training step alone, and the test that shows what they do.
ELSEWHERE = {
    "attention": "test_keys_act.py: on a CPU there is but one back end",
    "megablox": "tests/layers/test_moe_kernel.py: on a CPU there is but ragged_dot",
    "max_position_embeddings": "test_keys_act.py: it is written into config.json for Hugging Face",
}
# A key may repeat what a family does anyway. The one layer of this llama4 is chunked, that of
# gpt_oss has a window.
ALREADY = {
    "norm_topk_prob": {"mixtral", "dense experts", "gemma4 experts", "deepseek that picks",
                       "minimax_m2"},
    "float32_gate_logits": {"deepseek", "deepseek without latents", "deepseek that picks",
                            "glm4_moe"},
    "use_qk_norm": {"gemma3", "gemma4", "gemma4 experts", "qwen3_next", "qwen3_5 experts"},
    "use_post_attn_norm": {"olmo3"},
    "use_post_ffw_norm": {"olmo3"},
    "attention_type": {"mistral window", "llama4", "gpt_oss"},
    "attention_bias": {"gpt3"},
    "mlp_bias": {"gpt3"},
}  # fmt: skip
SIZES = {"base_num_query_heads", "base_num_kv_heads", "head_dim", "base_mlp_dim"}
# Blocks that stand in for a model take all its sizes, and read those that they have.
STAND_INS = {"simple": SIZES, "simple_mlp": SIZES - {"base_mlp_dim"}}


def tried(groups):
    """(key, value) of every key of these groups that acts, and of every tensor that remat may
    save.
    """
    keys = [
        key for group in groups for key in group.model_fields if ledger.status(key).kind == "acts"
    ]
    for key in [*keys, *CUSTOM_TENSORS, "dropout_rate"]:
        if key in ELSEWHERE or key in ("decoder_block", "global_parameter_scale"):
            continue
        default = types.MaxTextConfig.model_fields[key].default
        if key in CUSTOM_TENSORS:
            values = ["offload" if default.value == "device" else "device"]
        else:
            values = [str(not default).lower()] if isinstance(default, bool) else VALUES[key]
        for value in values:
            yield key, value


def configured(overrides):
    overrides = dict(overrides)
    hf_attributes = (
        {"architecture": overrides.pop("architecture")} if "architecture" in overrides else {}
    )
    layer = from_overrides(f"{key}={value}" for key, value in overrides.items()) | from_python(
        hf_attributes
    )
    return load(None, layer, environ={}, devices=Devices(1))


# Parts are compared from the cheapest to the dearest; these keys show in a dear one alone.
SHOWN_IN = {"dense_init_scale": "start", "qk_clip_threshold": "step"}
FORWARD = ("weights", "loss")  # where every key acts that a family may know already


def silent(name, program, excused):
    """The keys, with values, that change nothing and are not rejected; and how many are
    rejected.
    """
    overrides, groups = VARIANTS[name] if name in VARIANTS else (CONFIGURATIONS[name], GROUPS)
    overrides = TINY | overrides
    base, silent_keys, refused = program(configured(overrides)), [], 0
    for key, value in tried(groups):
        if str(overrides.get(key)) == str(value):
            continue
        try:
            changed = program(configured(overrides | COMPANIONS.get(key, {}) | {key: value}))
            if key in SHOWN_IN and base.differs(changed, (SHOWN_IN[key],)):
                continue
            if not base.differs(changed, FORWARD if key in excused else program.PARTS):
                silent_keys.append((key, value))
        except ConfigError:
            refused += 1
    return silent_keys, refused


# Families with parts that neither another family here nor a variant has.
REPRESENTATIVE = (
    "default",
    "gpt3",
    "mixtral",
    "qwen3_next",
    "gpt_oss",
    "deepseek",
    "simple",
)


@pytest.fixture(scope="module", autouse=True)
def unsuggested():
    """Errors suggest decoder_blocks, after building the layers of all of them; nothing here reads
    that.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rule, "decoder_blocks", lambda config, has: [])
        yield


# Together they have the keys of every part; the other families combine the same parts.
@pytest.mark.representative(
    "gemma4 experts",
    "deepseek that picks",
    "qwen3_next",
    "add-ons",
    "custom experts",
    "default",
    "gpt3",
    "mistral window",
    "norms",
    "yarn",
    "simple",
    "moba",
    "chunks",
    "llama3.1",
    "learned positions",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(
            name if name in REPRESENTATIVE else pytest.param(name, marks=pytest.mark.exhaustive)
            for name in CONFIGURATIONS
        ),
        *VARIANTS,
    ],
)
def test_no_key_is_ignored_silently(name, program):
    excused = {key for key, names in ALREADY.items() if name in names} | STAND_INS.get(name, set())
    silent_keys, refused = silent(name, program, excused)
    assert refused > 3
    assert {key for key, _ in silent_keys} == excused
