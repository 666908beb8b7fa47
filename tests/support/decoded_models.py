"""Models of every kind of cache."""

SIZES = [
    "base_emb_dim=16", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=8",
    "base_mlp_dim=32", "vocab_size=41", "max_target_length=32", "dtype=float32",
    "matmul_precision=highest", "remat_policy=none", "per_device_batch_size=1",
    "attention=dot_product",
]  # fmt: skip
MODELS = {
    "causal": ["decoder_block=llama2", "base_num_decoder_layers=2"],
    "unrolled": ["decoder_block=llama2", "base_num_decoder_layers=2", "scan_layers=false"],
    "window": ["decoder_block=mistral", "base_num_decoder_layers=2", "sliding_window_size=4"],
    "latent": [
        "mla_naive_kvcache=false",
        "decoder_block=deepseek", "attention_type=mla", "q_lora_rank=12", "kv_lora_rank=8",
        "qk_nope_head_dim=8", "qk_rope_head_dim=4", "v_head_dim=8", "base_num_kv_heads=4",
        "head_dim=128", "base_num_decoder_layers=2", "first_num_dense_layers=1", "num_experts=4",
        "num_experts_per_tok=2", "shared_experts=1",
    ],
    "keys and values of latents": [
        "decoder_block=deepseek", "attention_type=mla", "q_lora_rank=12", "kv_lora_rank=8",
        "qk_nope_head_dim=8", "qk_rope_head_dim=4", "v_head_dim=8", "base_num_kv_heads=4",
        "head_dim=128", "base_num_decoder_layers=2", "first_num_dense_layers=1", "num_experts=4",
        "num_experts_per_tok=2", "shared_experts=1",
    ],
    "sinks, windows and experts": [
        "decoder_block=gpt_oss", "base_num_decoder_layers=2", "sliding_window_size=4",
        "num_experts=4", "num_experts_per_tok=2", "attention_sink=true", "mlp_bias=true",
        "mlp_activations=[sigmoid, linear]",
    ],
    "chunks": [
        "decoder_block=llama4", "base_num_decoder_layers=2", "num_experts=4",
        "num_experts_per_tok=1", "nope_layer_interval=2", "interleave_moe_layer_step=2",
        "chunk_attn_window_size=5", "shared_experts=1",
    ],
    "delta": [
        "decoder_block=qwen3_next", "base_num_decoder_layers=4", "num_experts=4",
        "num_experts_per_tok=2", "gdn_num_key_heads=2", "gdn_num_value_heads=4",
        "gdn_key_head_dim=8", "gdn_value_head_dim=8", "gdn_chunk_size=8",
        "partial_rotary_factor=0.5", "shared_experts=1",
    ],
    "streams": ["decoder_block=llama2", "base_num_decoder_layers=2", "mhc_expansion_rate=2"],
    "learned positions": ["decoder_block=gpt3", "base_num_decoder_layers=2",
                      "trainable_position_size=32",
                          "mlp_activations=[gelu]", "base_num_kv_heads=4"],
}  # fmt: skip
