"""What an entry means that a config.json leaves out: the value that transformers' class of that
model_type has.

Folders of models with images are the common case: their text_config holds what differs from the
class, and no more.
"""

from typing import Any

Json = dict[str, Any]


def sizes(
    vocabulary: int, width: int, mlp: int, layers: int, heads: int, length: int, **own: Any
) -> Json:
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-6,
        **own,
    }


GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
GEMMA4_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
LATENT = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
DEEPSEEK3 = LATENT | {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
    "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 3,
}  # fmt: skip
DELTA = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip

DEFAULTS: dict[str, Json] = {
    "llama": sizes(32_000, 4096, 11_008, 32, 32, 2048),
    "mistral": sizes(32_000, 4096, 14_336, 32, 32, 131_072, num_key_value_heads=8, sliding_window=4096),
    "mixtral": sizes(
        32_000, 4096, 14_336, 32, 32, 131_072, num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1_000_000.0,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "llama4_text": sizes(
        202_048, 5120, 8192, 48, 40, 131_072, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5,
        rope_theta=500_000.0, intermediate_size_mlp=16_384, num_local_experts=16, num_experts_per_tok=1,
        interleave_moe_layer_step=1, no_rope_layer_interval=4, use_qk_norm=True, attention_chunk_size=8192,
        attn_temperature_tuning=True, attn_scale=0.1, floor_scale=8192,
    ),
    "gemma": sizes(256_000, 3072, 24_576, 28, 16, 8192, **GEMMA),
    "gemma2": sizes(
        256_000, 2304, 9216, 26, 8, 8192, **GEMMA, num_key_value_heads=4, sliding_window=4096,
        query_pre_attn_scalar=256, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    ),
    "gemma3_text": sizes(
        262_208, 2304, 9216, 26, 8, 131_072, **GEMMA, num_key_value_heads=4, sliding_window=4096,
        query_pre_attn_scalar=256,
    ),
    "gemma4_text": sizes(
        262_144, 2304, 9216, 30, 8, 131_072, **GEMMA, num_key_value_heads=4, sliding_window=512, global_head_dim=512,
        hidden_size_per_layer_input=256, rope_parameters=GEMMA4_ROPES,
    ),
    "qwen2": sizes(151_936, 4096, 22_016, 32, 32, 32_768, num_key_value_heads=32, sliding_window=4096,
                   max_window_layers=28),
    "qwen3": sizes(151_936, 4096, 22_016, 32, 32, 32_768, num_key_value_heads=32, head_dim=128, sliding_window=4096,
                   max_window_layers=28),
    "qwen3_moe": sizes(
        151_936, 2048, 6144, 24, 32, 32_768, num_key_value_heads=4, sliding_window=4096, num_local_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=False, decoder_sparse_step=1,
    ),
    "qwen3_next": sizes(
        151_936, 2048, 5632, 48, 16, 32_768, **DELTA, num_key_value_heads=2, num_local_experts=512,
        num_experts_per_tok=10, norm_topk_prob=True, decoder_sparse_step=1,
    ),
    "qwen3_5_text": sizes(248_320, 4096, 12_288, 32, 16, 32_768, **DELTA, num_key_value_heads=4),
    "qwen3_5_moe_text": sizes(
        248_320, 2048, 512, 40, 16, 32_768, **DELTA, num_key_value_heads=2, num_local_experts=256,
        num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1,
    ),
    "deepseek_v2": sizes(
        102_400, 4096, 11_008, 32, 32, 2048, **LATENT, n_routed_experts=64, n_shared_experts=2,
        moe_intermediate_size=1407, routed_scaling_factor=1.0, first_k_dense_replace=0, topk_method="greedy",
    ),
    "deepseek_v3": sizes(129_280, 7168, 18_432, 61, 128, 4096, **DEEPSEEK3, rope_interleave=True),
    "deepseek_v32": sizes(
        129_280, 7168, 18_432, 61, 128, 163_840, **DEEPSEEK3, index_n_heads=64, index_head_dim=128, index_topk=2048
    ),
    "gpt_oss": sizes(
        201_088, 2880, 2880, 36, 64, 131_072, num_key_value_heads=8, head_dim=64, rms_norm_eps=1e-5,
        attention_bias=True, rope_theta=150_000.0, sliding_window=128, num_local_experts=128, num_experts_per_tok=4,
        swiglu_limit=7.0,
    ),
    "olmo3": sizes(50_304, 4096, 11_008, 32, 32, 2048, rms_norm_eps=1e-5, rope_theta=500_000.0, sliding_window=4096),
    "gpt2": {
        "vocab_size": 50_257, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
}  # fmt: skip
