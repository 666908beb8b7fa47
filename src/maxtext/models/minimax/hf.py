"""MiniMax M2 in Hugging Face folders."""

from maxtext.configs.types import MaxTextConfig
from maxtext.hf.config_json import (
    EXPERT_DIMS,
    Field,
    HfMapping,
    LayerSpecs,
    dense_fields,
    dense_keys,
)
from maxtext.hf.layer_rules import HF_LAYER, dense_rules, expert_rules
from maxtext.hf.rules import TensorRule
from maxtext.hf.schema import NULL, SIZE
from maxtext.models.hf_config import uniform_rope


def minimax_m2_rules(config: MaxTextConfig, layers: LayerSpecs) -> list[TensorRule]:
    moe, router = f"{HF_LAYER}block_sparse_moe.", "layers/{i}/mlp/router/"
    return [
        *dense_rules(config),
        TensorRule(f"{moe}gate.weight", f"{router}weight", "x e -> e x"),
        TensorRule(f"{moe}e_score_correction_bias", f"{router}bias", "x -> x"),
        *expert_rules(f"{moe}experts.", ("w1", "w3", "w2")),
    ]


MINIMAX_M2 = HfMapping(
    architectures=("MiniMaxM2ForCausalLM",),
    model_type="minimax_m2",
    keys=dense_keys("minimax_m2", use_qk_norm=True, routed_bias=True),
    fields=(
        *dense_fields(
            vocab_size=200_064,
            hidden_size=3072,
            intermediate_size=1536,
            num_hidden_layers=62,
            num_attention_heads=48,
            max_position_embeddings=196_608,
            num_key_value_heads=8,
            head_dim=128,
            mlp_dims=EXPERT_DIMS,
        ),
        Field("num_local_experts", "num_experts", 256, aliases=("num_experts",)),
        Field("num_experts_per_tok", "num_experts_per_tok", 8),
        Field("rotary_dim", kind=SIZE | NULL),
        uniform_rope(partial=True, rope_theta=5_000_000.0),
        Field(
            "partial_rotary_factor",
            null=lambda entries: (
                entries["rotary_dim"] and entries["rotary_dim"] / entries["head_dim"]
            ),
        ),
        # transformers does not read these: it has one attention and one router for the family.
        Field("use_qk_norm", supported=(None, True)),
        Field("qk_norm_type", supported=(None, "per_layer")),
        Field("use_routing_bias", supported=(None, True)),
        Field("scoring_func", supported=(None, "sigmoid")),
        Field("shared_intermediate_size", supported=(None, 0)),
    ),
    rules=minimax_m2_rules,
    module_renaming=(".block_sparse_moe.", ".mlp."),
)
