"""Small models of every kind of layer."""

EXPERTS = ("num_experts=4", "num_experts_per_tok=2")
WINDOW = ("sliding_window_size=5",)
LATENT = (
    "decoder_block=deepseek", "attention_type=mla", "q_lora_rank=12", "kv_lora_rank=8",
    "qk_nope_head_dim=8", "qk_rope_head_dim=4", "v_head_dim=8", "base_num_kv_heads=4",
    "head_dim=128", "first_num_dense_layers=1", *EXPERTS, "base_num_decoder_layers=3",
    "shared_experts=1", "routed_score_func=sigmoid", "routed_bias=true",
)  # fmt: skip
DELTA = ("gdn_num_key_heads=2", "gdn_num_value_heads=4", "gdn_key_head_dim=8",
         "gdn_value_head_dim=8",
         "gdn_chunk_size=8", "partial_rotary_factor=0.5")  # fmt: skip


def kinds(*names):
    """As a checkpoint lists its layers: two that are scanned over and another, where a family's own
    pattern is long.
    """
    return (
        f"base_num_decoder_layers={len(names)}",
        f"architecture={{layer_kinds: [{', '.join(names)}]}}",
    )


TWO_AND_ONE = kinds("sliding", "sliding", "full")
FAMILIES = {
    "llama2": ("base_num_decoder_layers=2",),
    "mistral": (*WINDOW, "base_num_decoder_layers=2"),
    "mixtral": (*EXPERTS, "base_num_decoder_layers=2"),
    "gemma": ("base_num_decoder_layers=2", "logits_via_embedding=true",
              "normalize_embedding_logits=false"),
    "gemma2": (*WINDOW, "base_num_decoder_layers=2", "attn_logits_soft_cap=50",
               "use_post_attn_norm=true"),
    "gemma3": (*WINDOW, *TWO_AND_ONE, "use_post_ffw_norm=true"),
    "gemma4": (*WINDOW, *EXPERTS, *TWO_AND_ONE, "global_head_dim=12", "share_kv_projections=true"),
    "qwen2": ("attention_bias=true", "base_num_decoder_layers=2"),
    "qwen3": ("use_qk_norm=true", "base_num_decoder_layers=2"),
    "qwen3_moe": (*EXPERTS, "base_num_decoder_layers=2", "norm_topk_prob=true"),
    "qwen3_custom_moe": (*EXPERTS, "base_num_decoder_layers=2", "attention_output_dim=12",
                         "moe_expert_input_dim=12"),
    "qwen3_next": (*EXPERTS, *DELTA, *kinds("linear", "linear", "full"), "shared_experts=1"),
    "qwen3_5": (*DELTA, *kinds("full", "linear", "linear")),
    "deepseek": (*LATENT[1:], "routed_bias_update_rate=0.25"),
    "gpt_oss": (*WINDOW, *EXPERTS, *TWO_AND_ONE, "attention_sink=true", "routed_bias=true",
                "mlp_bias=true", "mlp_activations=[sigmoid, linear]", "mlp_activations_limit=7"),
    "llama4": (*EXPERTS, "base_num_decoder_layers=4", "nope_layer_interval=2",
               "interleave_moe_layer_step=2",
               "chunk_attn_window_size=5", "temperature_tuning=true", "use_qk_norm=true",
               "shared_experts=1"),
    "olmo3": (*WINDOW, *TWO_AND_ONE, "use_qk_norm=true"),
    "olmo2": ("base_num_decoder_layers=2", "use_qk_norm=true"),
    "phi3": (*WINDOW, "base_num_decoder_layers=2", "partial_rotary_factor=0.5"),
    "cohere": ("base_num_decoder_layers=2", "use_qk_norm=true", "logits_via_embedding=true",
               "normalize_embedding_logits=false"),
    "cohere2": (*WINDOW, *TWO_AND_ONE, "logits_via_embedding=true",
                "normalize_embedding_logits=false"),
    "exaone4": (*WINDOW, *TWO_AND_ONE, "use_qk_norm=true"),
    "ernie4_5": ("base_num_decoder_layers=2", "attention_bias=true"),
    "glm4_moe": (*EXPERTS, "base_num_decoder_layers=3", "first_num_dense_layers=1",
                 "shared_experts=1", "routed_bias=true", "routed_bias_update_rate=0.25",
                 "use_qk_norm=true", "attention_bias=true", "partial_rotary_factor=0.5"),
    "minimax_m2": (*EXPERTS, "base_num_decoder_layers=2", "routed_bias=true", "use_qk_norm=true",
                   "routed_bias_update_rate=0.25", "partial_rotary_factor=0.5"),
    "smollm3": ("base_num_decoder_layers=4", "nope_layer_interval=2"),
    "seed_oss": ("base_num_decoder_layers=2", "attention_bias=true"),
    "gpt3": ("base_num_decoder_layers=2", "trainable_position_size=16", "mlp_activations=[gelu]",
             "base_num_kv_heads=4"),
}  # fmt: skip
SGD = ("opt_type=sgd", "learning_rate=0.1", "gradient_clipping_threshold=0")
INDEXED = (*LATENT, "use_indexer=true", "indexer_n_heads=4", "indexer_head_dim=8", "indexer_topk=4",
           "indexer_loss_scaling_factor=0.5", *SGD)  # fmt: skip
