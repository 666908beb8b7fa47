"""Models and layouts of the equivalence matrix: each layout must compute the same as one device."""

ROWS, LENGTH, VOCABULARY = 8, 48, 96

COMMON = (
    f"vocab_size={VOCABULARY}",
    f"max_target_length={LENGTH}",
    "base_emb_dim=40",
    "base_num_query_heads=8",
    "dtype=float32",
    "matmul_precision=highest",
    "attention=dot_product",
    # With b1 = 0 Adam's first moment is the gradient; a large epsilon keeps rounding errors small.
    "adam_b1=0",
    "adam_eps=0.01",
    "learning_rate=0.0003",
    "warmup_steps_fraction=0",
    "learning_rate_final_fraction=1",
    "gradient_clipping_threshold=0",
    "steps=3",
    "dataset_type=grain",
)
EXPERTS = (
    "num_experts=8",
    "num_experts_per_tok=2",
    "base_moe_mlp_dim=24",
    "load_balance_loss_weight=0.1",
)
TWO_LAYERS = "base_num_decoder_layers=2"
HEADS = ("base_num_kv_heads=4", "head_dim=8")
# Halves the program. The dense model (with a scan over its layers) and the MoE model test remat.
NO_REMAT = ("remat_policy=none", "scan_layers=false")
MODELS = {
    "dense": ("decoder_block=llama2", TWO_LAYERS, "base_mlp_dim=48", *HEADS),
    # one layer; the MLA model has a layer before its experts
    "moe": (
        "decoder_block=mixtral",
        *EXPERTS,
        *HEADS,
        "base_num_decoder_layers=1",
        "scan_layers=false",
    ),
    "mla": (
        "decoder_block=deepseek",
        TWO_LAYERS,
        *EXPERTS,
        "attention_type=mla",
        "q_lora_rank=24",
        "kv_lora_rank=56",
        "qk_nope_head_dim=8",
        "qk_rope_head_dim=8",
        "v_head_dim=8",
        "base_num_kv_heads=8",
        "head_dim=128",
        "first_num_dense_layers=1",
        "base_mlp_dim=48",
        "shared_experts=1",
        *NO_REMAT,
        "routed_score_func=sigmoid",
        "routed_bias=true",
        "routed_bias_update_rate=0.01",
    ),
    "delta": (
        "decoder_block=qwen3_5",
        TWO_LAYERS,
        *HEADS,
        "base_mlp_dim=72",
        "gdn_num_key_heads=4",
        "gdn_num_value_heads=8",
        "gdn_key_head_dim=64",
        "gdn_value_head_dim=8",
        "gdn_chunk_size=8",
        # A seed without queries or keys near zero, whose norm would amplify rounding errors.
        "inhomogeneous_layer_cycle_interval=2",
        "init_weights_seed=2",
        *NO_REMAT,
    ),
}


def axes(**sizes: int) -> tuple[str, ...]:
    """ici_*_parallelism overrides; fsdp defaults to 1."""
    return tuple(f"ici_{axis}_parallelism={size}" for axis, size in ({"fsdp": 1} | sizes).items())


UNBALANCED = "context_parallel_load_balance=false"
# Each axis alone, then products.
LAYOUTS = {
    "data": axes(data=8),
    "fsdp": axes(fsdp=8),
    "fsdp_transpose": axes(fsdp_transpose=8),
    "tensor": axes(tensor=8),
    "tensor_sequence": axes(tensor_sequence=8),
    "context": (*axes(context=8), UNBALANCED),
    "context, balanced": axes(context=8),
    "expert": axes(expert=8),
    "data x fsdp": axes(data=2, fsdp=4),
    "fsdp x tensor": axes(fsdp=2, tensor=4),
    "fsdp x tensor_sequence": axes(fsdp=4, tensor_sequence=2),
    "fsdp x context": (*axes(fsdp=4, context=2), UNBALANCED),
    "context x tensor, balanced": axes(context=4, tensor=2),
    "fsdp x expert": axes(fsdp=2, expert=4),
    "expert x tensor": axes(expert=4, tensor=2),
    "data x fsdp x tensor": axes(data=2, fsdp=2, tensor=2),
    "fsdp x context x expert": (*axes(fsdp=2, context=2, expert=2), UNBALANCED),
    "data, ZeRO-1": (*axes(data=8), "shard_optimizer_over_data=true"),
    "data x tensor, ZeRO-1": (*axes(data=4, tensor=2), "shard_optimizer_over_data=true"),
    "fsdp, optimizer on the host": (*axes(fsdp=8), "optimizer_memory_host_offload=true"),
    "fsdp, weights on the host": (
        *axes(fsdp=8),
        "parameter_memory_host_offload=true",
        "param_scan_axis=0",
    ),
    "context, striped": (*axes(context=8), "context_parallel_reorder_strategy=striped"),
    "fsdp x tensor, explicit": (*axes(fsdp=4, tensor=2), "shard_mode=explicit"),
    "fsdp x expert, explicit": (*axes(fsdp=2, expert=4), "shard_mode=explicit"),
    "pure-fsdp": ("custom_mesh_and_rule=pure-fsdp",),
    "ep-as-dp": ("custom_mesh_and_rule=ep-as-dp", *axes(fsdp=2, expert=4)),
    "ep-as-cp": ("custom_mesh_and_rule=ep-as-cp", *axes(fsdp=2, expert=4), UNBALANCED),
    "cp-as-ep": ("custom_mesh_and_rule=cp-as-ep", *axes(fsdp=2, context=2, expert=2), UNBALANCED),
    "shard-exp-on-fsdp": ("custom_mesh_and_rule=shard-exp-on-fsdp", *axes(fsdp=4, expert=2)),
    "pipeline-large-moe": (
        "custom_mesh_and_rule=pipeline-large-moe",
        *axes(fsdp=2, tensor=2, expert=2),
    ),
    "dcn data x fsdp x expert": ("dcn_data_parallelism=2", *axes(fsdp=2, expert=2)),
}
# Single axes and products; the memory of the state and the named rules are tested on some models.
SPECIAL = ("host", "ZeRO", "striped", "explicit", "dcn")
PLAIN = [
    name
    for name, overrides in LAYOUTS.items()
    if not overrides[0].startswith("custom") and not any(word in name for word in SPECIAL)
]
NEEDS_ORDER = "reorders tokens, which a gated DeltaNet layer does not support"
REFUSED = {
    (model, layout): NEEDS_ORDER
    for model in ("delta",)
    for layout in LAYOUTS
    if "balanced" in layout or "striped" in layout
}
