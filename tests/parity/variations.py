"""Variations of config.json that transformers reads, for every model type: each is a change of the
entries of a tiny model. Most fields are tried on every family, since a field of one family must not
act in another.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zoo
from zoo import ABSENT, CHUNKED, FULL, LINEAR, SLIDING

Json = dict[str, Any]
THETA = 5_000.0
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, rope_theta=THETA)
LINEAR_ROPE = dict(rope_type="linear", factor=4.0, rope_theta=THETA)
LLAMA3 = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
# model type -> the case of the zoo that is varied
BASES = {
    "llama": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3 stretched",
    "gemma4_text": "gemma4 ropes",
    "qwen2": "qwen2 mixed",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3 experts",
    "qwen3_next": "qwen3-next one to one",
    "qwen3_5_text": "qwen3.5 one to one",
    "qwen3_5_moe_text": "qwen3.5 experts",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek3",
    "deepseek_v32": "deepseek3.2 sees all",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4 scaled",
    "olmo2": "olmo2",
    "olmo3": "olmo3 yarn",
    "phi3": "phi3",
    "cohere": "cohere",
    "cohere2": "cohere2",
    "glm4_moe": "glm4_moe",
    "minimax_m2": "minimax_m2",
    "smollm3": "smollm3 listed",
    "seed_oss": "seed_oss",
    "exaone4": "exaone4",
    "ernie4_5": "ernie4_5",
    "gpt2": "gpt2",
}


@dataclass(frozen=True)
class Variation:
    model_type: str
    changes: Json

    def __str__(self) -> str:
        changes = ", ".join(
            f"{name}={'absent' if value is ABSENT else value}"
            for name, value in self.changes.items()
        )
        return f"{self.model_type}: {changes}"


def only(**values: Any) -> list[Json]:
    """Changes of one field each: name=[values]."""
    return [{name: value} for name, listed in values.items() for value in listed]


def rope(**parameters: Any) -> Json:
    return {"rope_parameters": parameters}


OLD = {"rope_parameters": ABSENT}
ROPES = [
    {"rope_scaling": YARN},
    {"rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_scaling": {"rope_type": "default"}},
    {"rope_scaling": {}},
    {"rope_scaling": None},
    {"rope_scaling": LLAMA3, "rope_theta": THETA},
    {"rope_scaling": {"rope_type": "linear", "factor": 2}, "rope_theta": 3_000},
    {"rope_scaling": {"factor": 4.0}},
    {"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 4.0}},
    {"rope_parameters": None},
    {"rope_parameters": {}},
    {"rope_parameters": {}, "rope_theta": THETA},
    {"rope_theta": THETA},
    {"rope_theta": 700},
    {"rope_theta": None},
    {"rope_local_base_freq": 300.0},
    OLD,
    OLD | {"rope_theta": THETA},
    OLD | {"rope_theta": THETA, "rope_local_base_freq": 300.0},
    OLD | {"rope_theta": THETA, "rope_scaling": None},
    OLD | {"rope_theta": THETA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    OLD | {"rope_theta": THETA, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    OLD | {"rope_theta": THETA, "rope_scaling": {"type": "yarn", "factor": 4.0}},
    OLD | {"rope_theta": THETA, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    OLD | {"rope_theta": THETA, "rope_scaling": LLAMA3},
    OLD | {"rope_theta": THETA, "rope_scaling": YARN, "original_max_position_embeddings": 24},
    OLD | {"partial_rotary_factor": 0.5},
    OLD | {"rope_theta": THETA, "partial_rotary_factor": None},
    rope(rope_theta=THETA),
    rope(type="linear", factor=4.0, rope_theta=THETA),
    rope(type="yarn", factor=4.0, rope_theta=THETA),
    rope(rope_type="linear", type="default", factor=4.0, rope_theta=THETA),
    rope(rope_type="linear", factor=4.0),
    rope(rope_type="linear", factor=4.0) | {"rope_theta": THETA},
    LINEAR_ROPE | {"rope_parameters": LINEAR_ROPE},
    rope(**YARN),
    rope(**YARN | {"original_max_position_embeddings": 64}),
    rope(**YARN) | {"original_max_position_embeddings": 64},
    rope(**YARN) | {"max_position_embeddings": 40},
    rope(**YARN | {"factor": None}),
    rope(**YARN, truncate=False),
    rope(**YARN, truncate=None),
    rope(**YARN, beta_fast=None, beta_slow=2),
    rope(**YARN, beta_fast=8, beta_slow=0.5),
    rope(**YARN, attention_factor=0.7),
    rope(**YARN, attention_factor=1),
    rope(**YARN, mscale=0.7, mscale_all_dim=1.3),
    rope(**YARN, mscale=1.0, mscale_all_dim=0.0),
    rope(**YARN, mscale=0, mscale_all_dim=1.0),
    rope(**YARN, mscale=0.7),
    rope(**YARN, mscale_all_dim=0.7),
    rope(**LINEAR_ROPE, mscale_all_dim=0.7),
    rope(**LLAMA3, rope_theta=THETA),
    rope(**LLAMA3 | {"original_max_position_embeddings": 32}) | {"rope_theta": THETA},
    rope(rope_type="proportional", rope_theta=THETA, partial_rotary_factor=0.5),
    rope(rope_type="proportional", rope_theta=THETA, factor=2.0),
    rope(rope_type="default", rope_theta=THETA, factor=4.0),
    rope(rope_type="default", rope_theta=THETA, partial_rotary_factor=0.5),
    rope(rope_type="linear", rope_theta=THETA, factor=4.0, partial_rotary_factor=0.5),
    rope(**YARN, partial_rotary_factor=1.0),
    rope(rope_type="dynamic", rope_theta=THETA, factor=4.0),
    rope(rope_type="mrope", rope_theta=THETA, mrope_section=[1, 1, 2]),
    {"partial_rotary_factor": 0.5},
    {"partial_rotary_factor": 1.0},
    {"partial_rotary_factor": None},
    rope(**{FULL: LINEAR_ROPE}),
    rope(**{FULL: LINEAR_ROPE, SLIDING: {"rope_type": "default", "rope_theta": 300.0}}),
    rope(**{FULL: {"type": "linear", "factor": 4.0}, SLIDING: {"rope_theta": 300.0}}),
    rope(**{FULL: YARN, SLIDING: YARN | {"factor": 2.0}}),
    rope(**{FULL: YARN | {"truncate": False}, SLIDING: LLAMA3}),
    rope(**{FULL: YARN, SLIDING: None}),
    rope(**{FULL: YARN, SLIDING: {"rope_type": "default"}, "truncate": False}),
    rope(**{FULL: {"rope_type": "default"}, SLIDING: {}}) | {"rope_theta": THETA},
    rope(**{FULL: {"rope_type": "default"}, SLIDING: {}}) | {"rope_scaling": LINEAR_ROPE},
    rope(**{FULL: {"rope_type": "proportional"}, SLIDING: {"rope_theta": 300.0}})
    | {"partial_rotary_factor": 0.5},
]
# Fields of transformers' classes; which of them a family has, transformers decides.
ACTIVATIONS = ["swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu"]
FIELDS = only(
    hidden_act=ACTIVATIONS,
    hidden_activation=[*ACTIVATIONS[:4], None],
    activation_function=["relu", "gelu", "silu", "tanh"],
    rms_norm_eps=[0.1, 1],
    layer_norm_eps=[0.1],
    layer_norm_epsilon=[0.1],
    tie_word_embeddings=[True, False, None, ABSENT],
    attention_bias=[True, False, ABSENT],
    mlp_bias=[True],
    head_dim=[8, None, ABSENT],
    num_key_value_heads=[1, None],
    intermediate_size=[40],
    sliding_window=[3, 0, None, ABSENT],
    use_sliding_window=[True, False],
    max_window_layers=[0],
    sliding_window_pattern=[2],
    full_attention_interval=[2],
    attention_dropout=[0.5],
    initializer_range=[0.5],
    use_cache=[False],
    pretraining_tp=[2],
    resid_pdrop=[0.3],
    router_jitter_noise=[0.5],
    output_router_logits=[True],
    router_aux_loss_coef=[0.5],
    is_causal=[False],
    use_bidirectional_attention=[True, "all", "vision", None],
    attn_logit_softcapping=[1.5, 2, None],
    final_logit_softcapping=[2.0, None],
    query_pre_attn_scalar=[10, 30],
    logit_scale=[0.3, 2],
    norm_topk_prob=[True, False],
    num_experts_per_tok=[1, 3],
    num_experts=[4, 12],
    num_local_experts=[4],
    n_routed_experts=[12],
    top_k_experts=[1],
    moe_intermediate_size=[24],
    shared_expert_intermediate_size=[24],
    decoder_sparse_step=[2],
    mlp_only_layers=[[0], [], None],
    mlp_layer_types=[None],
    moe_layer_freq=[2, [0, 1, 1]],
    first_k_dense_replace=[0, 2],
    n_shared_experts=[2],
    n_group=[1, 2, None],
    topk_group=[1],
    topk_method=["greedy", "group_limited_greedy", "noaux_tc"],
    scoring_func=["softmax", "sigmoid"],
    routed_scaling_factor=[0.5, 3],
    rope_interleave=[True, False],
    q_lora_rank=[None],
    qk_norm=[True],
    use_qk_norm=[True, False],
    num_nextn_predict_layers=[1],
    num_mtp_layers=[0],
    index_topk=[7],
    swiglu_limit=[0.5],
    swiglu_alpha=[1.0],
    interleave_moe_layer_step=[2],
    no_rope_layers=[[], None, ABSENT],
    no_rope_layer_interval=[1, 3],
    attention_chunk_size=[4, None],
    attn_temperature_tuning=[False],
    attn_scale=[0.4],
    floor_scale=[2],
    moe_layers=[[0], []],
    intermediate_size_mlp=[40],
    hidden_size_per_layer_input=[8],
    num_kv_shared_layers=[1],
    use_double_wide_mlp=[True],
    enable_moe_block=[True],
    attention_k_eq_v=[True],
    global_head_dim=[8, ABSENT],
    num_global_key_value_heads=[1, 4],
    per_layer_config=[{"0": {"num_key_value_heads": 1}}, {"0": {"intermediate_size": 24}}, None],
    linear_conv_kernel_dim=[3],
    linear_num_value_heads=[8],
    layer_types=[ABSENT, None],
    scale_attn_weights=[False],
    scale_attn_by_inverse_layer_idx=[True],
    reorder_and_upcast_attn=[True],
    add_cross_attention=[True],
    n_inner=[None, 40],
    n_ctx=[16],
    tie_last_hidden_states=[True],
    chunk_size_feed_forward=[1],
    torch_dtype=["float16"],
    model_type=["mistral", "qwen3"],
)
WRONG = only(
    hidden_size=["48", 48.0, None, 0],
    rms_norm_eps=["1e-5", None, True],
    tie_word_embeddings=["false", 1],
    layer_types=[["full"], "full_attention", [FULL]],
    rope_theta=["1e4"],
    rope_scaling=["yarn", [4.0], {"rope_type": 3}],
    rope_parameters=[{"rope_type": None}, {"rope_type": "yarn"}, {"factor": "4"}],
    sliding_window=["5", 5.5, -1],
    num_experts_per_tok=[0, 1.5],
    per_layer_config=[[], {"x": {}}, {"0": []}],
)
# model type -> changes that only it has a meaning for, and combinations
OWN: dict[str, list[Json]] = {
    "gemma3_text": [{"sliding_window_pattern": 2, "layer_types": ABSENT}],
    "cohere2": [
        {"sliding_window_pattern": 2, "layer_types": ABSENT},
        {"layer_types": [FULL] * 5, "sliding_window": None},
    ],
    "qwen2": [
        {"layer_types": ABSENT, "max_window_layers": 2},
        {"layer_types": [FULL] * 3, "use_sliding_window": False},
        {"layer_types": ABSENT, "use_sliding_window": True, "sliding_window": None},
    ],
    "qwen3": [
        {"layer_types": ABSENT, "use_sliding_window": True, "max_window_layers": 1}
        | {"sliding_window": 3},
        {"layer_types": [SLIDING, FULL], "use_sliding_window": True, "sliding_window": 3},
    ],
    "qwen3_moe": [
        {"use_sliding_window": True, "sliding_window": 3},
        {"mlp_only_layers": [1], "decoder_sparse_step": 2},
    ],
    "qwen3_next": [
        {"layer_types": ABSENT, "full_attention_interval": 2},
        {"layer_types": [FULL] * 3},
        {"layer_types": [LINEAR] * 3},
    ],
    "qwen3_5_text": [{"layer_types": ABSENT, "full_attention_interval": 2}],
    "qwen3_5_moe_text": [{"layer_types": ABSENT, "full_attention_interval": 2}],
    "gemma4_text": [
        {"layer_types": [FULL, SLIDING, SLIDING]},
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"rope_scaling": {FULL: LINEAR_ROPE, SLIDING: YARN}},
    ],
    "gpt_oss": [OLD | {"rope_theta": THETA}, {"layer_types": [FULL] * 3}],
    "llama4_text": [
        {"layer_types": [CHUNKED] * 3},
        {"no_rope_layers": [1, 1, 0], "layer_types": ABSENT},
        {"moe_layers": None, "interleave_moe_layer_step": 2},
        {"attn_temperature_tuning": 4},
    ],
    "phi3": [
        OLD | {"rope_scaling": {"type": kind, **zoo.FACTORS}, "rope_theta": THETA}
        | {"original_max_position_embeddings": 16}
        for kind in ("longrope", "su", "yarn")
    ]
    + [
        rope(rope_type="longrope", rope_theta=THETA, **zoo.FACTORS),
        rope(rope_type="longrope", rope_theta=THETA, original_max_position_embeddings=16,
             factor=8.0, **zoo.FACTORS),
        {"partial_rotary_factor": 0.75},
    ],
    "llama": [
        rope(rope_type="longrope", rope_theta=THETA, original_max_position_embeddings=16,
             short_factor=[1.0] * 8, long_factor=[2.0] * 8),
        {"architectures": ["MistralForCausalLM"]},
        {"architectures": []},
        {"architectures": None},
        {"text_config": None},
    ],
    "deepseek_v2": [{"n_group": 2, "topk_group": 1}, {"topk_method": None}],
    "deepseek_v3": [{"n_group": 2, "topk_group": 1, "norm_topk_prob": False}],
    "gpt2": [
        {"n_embd": ABSENT, "hidden_size": 48},
        {"n_layer": ABSENT, "num_hidden_layers": 1},
        {"num_hidden_layers": 1},
        {"n_head": ABSENT, "num_attention_heads": 3},
        {"n_positions": ABSENT, "max_position_embeddings": 96},
    ],
}  # fmt: skip
OWN["gemma2"] = OWN["olmo3"] = [{"layer_types": [FULL, FULL, SLIDING]}]
COMBINED = 12  # random pairs of changes, for each model type


def variations(model_type: str) -> Iterator[Variation]:
    """Every variation of one model type, always in the same order."""
    single = ROPES + FIELDS + OWN.get(model_type, [])
    for changes in single + WRONG:
        yield Variation(model_type, changes)
    draw = random.Random(model_type)
    for _ in range(COMBINED):
        yield Variation(model_type, draw.choice(single) | draw.choice(single))
