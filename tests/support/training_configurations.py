"""Configurations that reach every training key."""

HEADS = {"base_num_kv_heads": 2, "head_dim": 8}
MOE = {"num_experts": 8, "num_experts_per_tok": 2}
WINDOW = {"sliding_window_size": 4}
LATENT = {
    "decoder_block": "deepseek", "attention_type": "mla", "q_lora_rank": 12, "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_factor": 4,
    "original_max_position_embeddings": 256,
    "rope_max_timescale": 100,
}


def kinds(*names):
    """A layer of each kind, where the family's own pattern is longer."""
    return {"base_num_decoder_layers": len(names), "architecture": {"layer_kinds": list(names)}}


GEMMA4 = {"decoder_block": "gemma4", "global_head_dim": 16, **kinds("sliding", "full")}
CONFIGURATIONS = {
    **{name: HEADS | {"decoder_block": name} for name in ("default", "llama2", "mistral", "gemma",
                                                          "qwen2", "qwen3")},
    "gpt3": HEADS | {"decoder_block": "gpt3", "trainable_position_size": 16,
                     "mlp_activations": "[gelu]"},
    "gemma2": HEADS | WINDOW | {"decoder_block": "gemma2"},
    "gemma3": HEADS | WINDOW | {"decoder_block": "gemma3", **kinds("sliding", "full")},
    "gemma4": HEADS | WINDOW | GEMMA4,
    "olmo3": HEADS | WINDOW | YARN | {"decoder_block": "olmo3", **kinds("sliding", "full")},
    "mixtral": HEADS | MOE | {"decoder_block": "mixtral"},
    "qwen3_moe": HEADS | MOE | {"decoder_block": "qwen3_moe"},
    "qwen3_custom_moe": HEADS | MOE | {"decoder_block": "qwen3_custom_moe"},
    "qwen3_next": HEADS | {"decoder_block": "qwen3_next", "gdn_num_value_heads": 16,
                           **kinds("linear", "full")},
    "qwen3_5 experts": HEADS | MOE | {"decoder_block": "qwen3_5", **kinds("linear", "full")},
    "gpt_oss": HEADS | WINDOW | MOE | {"decoder_block": "gpt_oss"},
    "llama4": HEADS | MOE | {"decoder_block": "llama4", "chunk_attn_window_size": 4},
    "deepseek without latents": HEADS | MOE | {"decoder_block": "deepseek", "routed_bias": "true"},
    "deepseek": LATENT | MOE | YARN | {"first_num_dense_layers": 1, "base_num_decoder_layers": 2},
    "glm4_moe": HEADS | MOE | {"decoder_block": "glm4_moe", "routed_bias": "true",
                               "first_num_dense_layers": 1, "base_num_decoder_layers": 2},
    "minimax_m2": HEADS | MOE | {"decoder_block": "minimax_m2", "use_qk_norm": "true"},
    "smollm3": HEADS | {"decoder_block": "smollm3", "base_num_decoder_layers": 2},
    "seed_oss": HEADS | {"decoder_block": "seed_oss"},
    "one expert": HEADS | {"decoder_block": "mixtral"},
    "simple": {"decoder_block": "simple"},
    "simple_mlp": {"decoder_block": "simple_mlp"},
}  # fmt: skip
