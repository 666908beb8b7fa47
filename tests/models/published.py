"""What the publishers say of the named models: the parts of config.json that fix the text model's
weights and numbers.

Sizes are as on huggingface.co; `parameters` are totals that are public to the last digit, with what
is no part of the text model taken off as a formula. A `difference` is what our configuration has
more, by its own vocabulary.
"""

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Published:
    repository: str
    config: Json
    parameters: int | None = None
    difference: int = 0


LLAMA31_ROPE = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip


def llama(
    width: int, layers: int, heads: int, kv: int, mlp: int, vocabulary: int, **more: Any
) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"], "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": mlp,
        "vocab_size": vocabulary,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        **more,
    }  # fmt: skip


def llama31(width: int, layers: int, heads: int, mlp: int) -> Json:
    more = {"rope_theta": 500000.0, "rope_scaling": LLAMA31_ROPE, "max_position_embeddings": 131072}
    return llama(width, layers, heads, 8, mlp, 128256, **more)


LLAMA3 = {"rope_theta": 500000.0, "max_position_embeddings": 8192}
LLAMA31_8B = Published("meta-llama/Llama-3.1-8B", llama31(4096, 32, 32, 14336), 8_030_261_248)
LLAMA31_70B = Published("meta-llama/Llama-3.1-70B", llama31(8192, 80, 64, 28672), 70_553_706_496)


def mistral(width: int, layers: int, heads: int, mlp: int, vocabulary: int, **more: Any) -> Json:
    return llama(width, layers, heads, 8, mlp, vocabulary, rope_theta=1e6, sliding_window=None) | {
        "architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768, **more
    }  # fmt: skip


def mixtral(*sizes: int, **more: Any) -> Json:
    experts = {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    return mistral(*sizes, **experts, **more)


# Llama 4's images: a tower and a projector, the same in both models.
LLAMA4_VISION = 871_932_416


def llama4(experts: int, step: int, norm: bool, rope: Json | None, context: int) -> Json:
    return llama(5120, 48, 40, 8, 8192, 202048) | {
        "architectures": ["Llama4ForCausalLM"], "head_dim": 128, "intermediate_size_mlp": 16384,
        "num_local_experts": experts, "num_experts_per_tok": 1, "interleave_moe_layer_step": step,
        "use_qk_norm": norm,
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(48)], "attention_chunk_size": 8192,
        "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192,
        "rope_theta": 500000.0,
        "rope_scaling": rope, "max_position_embeddings": context,
    }  # fmt: skip


def yarn(factor: float, scale: float, fast: float = 32) -> Json:
    return {
        "type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": 1, "mscale": scale,
        "mscale_all_dim": scale,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip


def deepseek(
    version: str,
    width: int,
    layers: int,
    heads: int,
    mlp: int,
    expert: int,
    vocabulary: int,
    **more,
) -> Json:
    return {
        "architectures": [f"Deepseek{version}ForCausalLM"], "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "intermediate_size": mlp,
        "moe_intermediate_size": expert, "vocab_size": vocabulary, "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000, "max_position_embeddings": 163840,
        "attention_bias": False,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


def deepseek2(*sizes: int, **more: Any) -> Json:
    more = {"n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, **more}
    routing = {"scoring_func": "softmax", "norm_topk_prob": False, "rope_scaling": yarn(40, 0.707)}
    return deepseek("V2", *sizes, 102400, **routing, **more)


def deepseek3(version: str = "V3", heads: int = 128, vocabulary: int = 129280, **more: Any) -> Json:
    routing = {
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "first_k_dense_replace": 3, "rope_scaling": yarn(40, 1.0),
    }  # fmt: skip
    return deepseek(version, 7168, 61, heads, 18432, 2048, vocabulary, **(routing | more))


DEEPSEEK3 = Published(
    "deepseek-ai/DeepSeek-V3", deepseek3(), 671_026_404_352 + 58 * 256
)  # with the routers' biases
KIMI = deepseek3(
    heads=64, vocabulary=163840, n_routed_experts=384, n_group=1, topk_group=1,
    routed_scaling_factor=2.827,
    first_k_dense_replace=1, rope_theta=50000.0, rope_scaling=yarn(32, 1.0, fast=1),
    max_position_embeddings=131072,
)  # fmt: skip


def gemma(
    version: str, width: int, layers: int, heads: int, kv: int, head: int, mlp: int, vocabulary: int
) -> Json:
    return {
        "architectures": [f"Gemma{version}ForCausalLM"], "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": head,
        "intermediate_size": mlp,
        "vocab_size": vocabulary, "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
    }  # fmt: skip


def gemma1(*sizes: int) -> Json:
    return gemma("", *sizes, 256000) | {"rope_theta": 10000.0, "max_position_embeddings": 8192}


def gemma2(*sizes: int, scalar: int = 256) -> Json:
    return gemma("2", *sizes, 256000) | {
        "rope_theta": 10000.0, "max_position_embeddings": 8192, "query_pre_attn_scalar": scalar,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    }  # fmt: skip


def gemma3(*sizes: int, scalar: int = 256) -> Json:
    return gemma("3", *sizes, 262208) | {
        "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "query_pre_attn_scalar": scalar, "sliding_window": 1024, "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    }  # fmt: skip


def gemma3_vision(width: int) -> int:
    """The SigLIP tower, and the norm and matrix that bring its 1152 numbers to the model's
    width.
    """
    return 416_866_032 + 1152 * width + 1152


def gemma4(*sizes: int, global_kv: int, **more: Any) -> Json:
    layers = sizes[1]
    return gemma("4", *sizes, 262144) | {
        "global_head_dim": 512, "num_global_key_value_heads": global_kv, "attention_k_eq_v": True,
        "layer_types": [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)
        ],
        "sliding_window": 1024, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False, "max_position_embeddings": 262144,
        "vocab_size_per_layer_input": 262144,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                               "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        **more,
    }  # fmt: skip


def qwen(
    version: str,
    width: int,
    layers: int,
    heads: int,
    kv: int,
    mlp: int,
    tied: bool,
    theta: float = 1e6,
    **more: Any,
) -> Json:
    return {
        "architectures": [f"Qwen{version}ForCausalLM"], "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "intermediate_size": mlp,
        "vocab_size": 151936,
        "tie_word_embeddings": tied, "rms_norm_eps": 1e-6, "rope_theta": theta,
        "hidden_act": "silu",
        # of most; plain rotations do not ask for it
        "use_sliding_window": False, "max_position_embeddings": 40960,
        **more,
    }  # fmt: skip


def qwen3(*sizes: Any, **more: Any) -> Json:
    return qwen("3", *sizes, **({"head_dim": 128, "attention_bias": False} | more))


def qwen3_moe(
    width: int,
    layers: int,
    heads: int,
    kv: int,
    expert: int,
    experts: int,
    theta: float,
    **more: Any,
) -> Json:
    routing = {
        "moe_intermediate_size": expert, "num_experts": experts, "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 128, "attention_bias": False,
    }  # fmt: skip
    return qwen("3Moe", width, layers, heads, kv, 3 * width, False, theta, **(routing | more))


def qwen_delta(
    version: str, width: int, layers: int, heads: int, expert: int, value_heads: int, **more: Any
) -> Json:
    rope = {
        "partial_rotary_factor": 0.25,
        "head_dim": 256,
        "attention_bias": False,
        "full_attention_interval": 4,
    }
    delta = {
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads,
    }  # fmt: skip
    routing = {
        "moe_intermediate_size": expert, "shared_expert_intermediate_size": expert,
        "num_experts": 512,
        "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }  # fmt: skip
    return qwen(
        version, width, layers, heads, 2, 5120, False, 1e7, **rope, **delta, **(routing | more)
    )


QWEN3_30B = (2048, 48, 32, 4, 768, 128)
QWEN35_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}  # fmt: skip


def gpt_oss(layers: int, experts: int) -> Json:
    return {
        "architectures": ["GptOssForCausalLM"], "hidden_size": 2880, "num_hidden_layers": layers,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 2880,
        "num_local_experts": experts, "num_experts_per_tok": 4, "vocab_size": 201088,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128, "swiglu_limit": 7.0, "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_theta": 150000, "max_position_embeddings": 131072, "hidden_act": "silu",
        "layer_types": [("sliding", "full")[i % 2] + "_attention" for i in range(layers)],
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip


def olmo3(width: int, layers: int, heads: int, kv: int, mlp: int, extended: bool = True) -> Json:
    rope = {
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "attention_factor": 1.2079441541679836,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return llama(width, layers, heads, kv, mlp, 100278) | {
        "architectures": ["Olmo3ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 500000,
        "sliding_window": 4096,
        "rope_scaling": rope if extended else None,
        "max_position_embeddings": 65536 if extended else 8192,
        "layer_types": [
            "full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(layers)
        ],
    }  # fmt: skip


def olmo2(width: int, layers: int, heads: int, kv: int, mlp: int) -> Json:
    return llama(width, layers, heads, kv, mlp, 100352) | {
        "architectures": ["Olmo2ForCausalLM"], "rms_norm_eps": 1e-6, "rope_theta": 500000,
        "rope_scaling": None, "max_position_embeddings": 4096,
    }  # fmt: skip


def gpt3(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> Json:
    """GPT-3 was not published as a folder; GPT-2's class has its weights."""
    return {
        "architectures": ["GPT2LMHeadModel"], "n_embd": width, "n_layer": layers, "n_head": heads,
        "vocab_size": vocabulary, "n_positions": positions, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }  # fmt: skip


OLMO3_7B = (4096, 32, 32, 32, 11008)
SCOUT_ROPE = LLAMA31_ROPE | {"factor": 16.0, "high_freq_factor": 1.0}


def phi3(
    width: int, layers: int, heads: int, kv: int, mlp: int, vocabulary: int, **more: Any
) -> Json:
    return llama(width, layers, heads, kv, mlp, vocabulary) | {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "rope_theta": 10000.0,
        "sliding_window": 2047,
        **more,
    }  # fmt: skip


PHI4_MINI_LONG = [
    1.0,
    1.118320672,
    1.250641126,
    1.398617824,
    1.564103225,
    1.74916897,
    1.956131817,
    2.187582649,
    2.446418898,
    2.735880826,
    3.059592084,
    3.421605075,
    3.826451687,
    4.279200023,
    4.785517845,
    5.351743533,
    5.984965424,
    6.693110555,
    7.485043894,
    8.370679318,
    9.36110372,
    10.4687158,
    11.70738129,
    13.09260651,
    14.64173252,
    16.37415215,
    18.31155283,
    20.47818807,
    22.90118105,
    25.61086418,
    28.64115884,
    32.03,
    32.1,
    32.13,
    32.23,
    32.6,
    32.61,
    32.64,
    32.66,
    32.7,
    32.71,
    32.93,
    32.97,
    33.28,
    33.49,
    33.5,
    44.16,
    47.77,
]
PHI4_MINI = {
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": PHI4_MINI_LONG},
    "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "sliding_window": 262144, "tie_word_embeddings": True,
}  # fmt: skip


def cohere(kind: str, width: int, layers: int, heads: int, kv: int, mlp: int, **more: Any) -> Json:
    return llama(width, layers, heads, kv, mlp, 256000) | {
        "architectures": [f"{kind}ForCausalLM"], "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True, **more,
    }  # fmt: skip


COMMAND_R7B = {
    "logit_scale": 0.25, "rope_theta": 50000.0, "sliding_window": 4096, "sliding_window_pattern": 4,
}  # fmt: skip


def glm4_moe(width: int, layers: int, mlp: int, expert: int, experts: int, **more: Any) -> Json:
    return llama(width, layers, 96, 8, mlp, 151552) | {
        "architectures": ["Glm4MoeForCausalLM"], "head_dim": 128, "attention_bias": True,
        "use_qk_norm": False, "max_position_embeddings": 131072,
        "moe_intermediate_size": expert, "n_routed_experts": experts, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None,
        **more,
    }  # fmt: skip


GLM45 = glm4_moe(
    5120, 92, 12288, 1536, 160,
    first_k_dense_replace=3, routed_scaling_factor=2.5, use_qk_norm=True,
)  # fmt: skip
MINIMAX_M2 = llama(3072, 62, 48, 8, 1536, 200064) | {
    "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 128, "rms_norm_eps": 1e-6,
    "num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
    "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0, "rotary_dim": 64, "rope_theta": 5000000,
    "max_position_embeddings": 196608,
}  # fmt: skip
SMOLLM3 = llama(2048, 36, 16, 4, 11008, 128256) | {
    "architectures": ["SmolLM3ForCausalLM"], "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "use_sliding_window": False,
    "sliding_window": None, "layer_types": ["full_attention"] * 36,
    "rope_theta": 5000000.0, "rope_scaling": None, "max_position_embeddings": 65536,
}  # fmt: skip
ERNIE = llama(1024, 18, 16, 2, 3072, 103424) | {
    "architectures": ["Ernie4_5ForCausalLM"], "head_dim": 128, "tie_word_embeddings": True,
    "use_bias": False, "rope_theta": 500000.0, "max_position_embeddings": 131072,
}  # fmt: skip


def exaone4(width: int, layers: int, heads: int, mlp: int, **more: Any) -> Json:
    rope = LLAMA31_ROPE | {"factor": 16.0}
    return llama(width, layers, heads, 8, mlp, 102400, rope_theta=1000000, rope_scaling=rope) | {
        "architectures": ["Exaone4ForCausalLM"], **more
    }  # fmt: skip


SEED_OSS = llama(5120, 64, 80, 8, 27648, 155136) | {
    "architectures": ["SeedOssForCausalLM"], "head_dim": 128, "rms_norm_eps": 1e-6,
    "attention_bias": True, "attention_out_bias": False, "mlp_bias": False,
    "rope_theta": 10000000.0, "rope_scaling": {"rope_type": "default"},
    "max_position_embeddings": 524288,
}  # fmt: skip
PUBLISHED: dict[str, Published] = {
    "llama2-7b": Published("meta-llama/Llama-2-7b-hf", llama(4096, 32, 32, 32, 11008, 32000),
                           6_738_415_616),
    "llama2-13b": Published("meta-llama/Llama-2-13b-hf", llama(5120, 40, 40, 40, 13824, 32000),
                            13_015_864_320),
    "llama2-70b": Published("meta-llama/Llama-2-70b-hf", llama(8192, 80, 64, 8, 28672, 32000),
                            68_976_648_192),
    "llama3-8b": Published("meta-llama/Meta-Llama-3-8B",
                           llama(4096, 32, 32, 8, 14336, 128256, **LLAMA3),
                           8_030_261_248),
    "llama3-70b": Published("meta-llama/Meta-Llama-3-70B",
                            llama(8192, 80, 64, 8, 28672, 128256, **LLAMA3),
                            70_553_706_496),
    "llama3.1-8b": LLAMA31_8B,
    "llama3.1-8b-Instruct": LLAMA31_8B,
    "llama3.1-70b": LLAMA31_70B,
    "llama3.1-70b-Instruct": LLAMA31_70B,
    "llama3.1-405b": Published("meta-llama/Llama-3.1-405B", llama31(16384, 126, 128, 53248),
                               405_853_388_800),
    "llama3.3-70b": Published("meta-llama/Llama-3.3-70B-Instruct", llama31(8192, 80, 64, 28672),
                              70_553_706_496),
    "llama4-17b-16e": Published("meta-llama/Llama-4-Scout-17B-16E-Instruct",
                                llama4(16, 1, True, SCOUT_ROPE, 10485760),
                                108_641_793_536 - LLAMA4_VISION),
    "llama4-17b-128e": Published("meta-llama/Llama-4-Maverick-17B-128E-Instruct",
                                 llama4(128, 2, False, None, 1048576),
                                 401_583_781_376 - LLAMA4_VISION),
    "mistral-7b": Published("mistralai/Mistral-7B-Instruct-v0.2",
                            mistral(4096, 32, 32, 14336, 32000), 7_241_732_096),
    "mixtral-8x7b": Published("mistralai/Mixtral-8x7B-v0.1", mixtral(4096, 32, 32, 14336, 32000),
                              46_702_792_704),
    "mixtral-8x22b": Published(
        "mistralai/Mixtral-8x22B-Instruct-v0.1",
        mixtral(6144, 56, 48, 16384, 32768, max_position_embeddings=65536),
        140_630_071_296,
    ),
    "deepseek2-16b": Published(
        "deepseek-ai/DeepSeek-V2-Lite",
        deepseek2(2048, 27, 16, 10944, 1408, q_lora_rank=None, n_routed_experts=64, n_group=1,
                  topk_group=1,
                  topk_method="greedy", routed_scaling_factor=1.0),
        15_706_484_224,
    ),
    "deepseek2-236b": Published(
        "deepseek-ai/DeepSeek-V2",
        deepseek2(5120, 60, 128, 12288, 1536, n_routed_experts=160, n_group=8, topk_group=3,
                  topk_method="group_limited_greedy", routed_scaling_factor=16.0),
        235_741_434_880,
    ),
    "deepseek3-671b": DEEPSEEK3,
    "deepseek3-671b-2dfsdp": DEEPSEEK3,
    "deepseek3-671b-batchsplit": DEEPSEEK3,
    "deepseek3.2-671b": Published("deepseek-ai/DeepSeek-V3.2",
                                  deepseek3("V32", index_n_heads=64, index_head_dim=128,
                                            index_topk=2048)),
    "kimi-k2-1t": Published("moonshotai/Kimi-K2-Instruct", KIMI),
    "gemma-2b": Published("google/gemma-2b", gemma1(2048, 18, 8, 1, 256, 16384), 2_506_172_416,
                          128 * 2048),
    "gemma-7b": Published("google/gemma-7b", gemma1(3072, 28, 16, 16, 256, 24576), 8_537_680_896,
                          128 * 3072),
    "gemma2-2b": Published("google/gemma-2-2b", gemma2(2304, 26, 8, 4, 256, 9216), 2_614_341_888,
                           128 * 2304),
    "gemma2-9b": Published("google/gemma-2-9b", gemma2(3584, 42, 16, 8, 256, 14336), 9_241_705_984,
                           128 * 3584),
    "gemma2-27b": Published("google/gemma-2-27b", gemma2(4608, 46, 32, 16, 128, 36864, scalar=144),
                            27_227_128_320,
                            128 * 4608),
    "gemma3-4b": Published("google/gemma-3-4b-pt", gemma3(2560, 34, 8, 4, 256, 10240),
                           4_300_079_472 - gemma3_vision(2560), -64 * 2560),
    "gemma3-12b": Published("google/gemma-3-12b-pt", gemma3(3840, 48, 16, 8, 256, 15360),
                            12_187_325_040 - gemma3_vision(3840), -64 * 3840),
    "gemma3-27b": Published("google/gemma-3-27b-pt",
                            gemma3(5376, 62, 32, 16, 128, 21504, scalar=168),
                            27_432_406_640 - gemma3_vision(5376), -64 * 5376),
    "gemma4-26b": Published(
        "google/gemma-4-26B-A4B",
        gemma4(2816, 30, 16, 8, 256, 2112, global_kv=2, enable_moe_block=True, num_experts=128,
               top_k_experts=8,
               moe_intermediate_size=704),
    ),
    "gemma4-31b": Published("google/gemma-4-31B",
                            gemma4(5376, 60, 32, 16, 256, 21504, global_kv=4)),
    "qwen2.5-1.5b": Published("Qwen/Qwen2.5-1.5B", qwen("2", 1536, 28, 12, 2, 8960, True),
                              1_543_714_304),
    "qwen2.5-7b": Published("Qwen/Qwen2.5-7B",
                            qwen("2", 3584, 28, 28, 4, 18944, False, vocab_size=152064),
                            7_615_616_512),
    "qwen2.5-14b": Published("Qwen/Qwen2.5-14B-Instruct",
                             qwen("2", 5120, 48, 40, 8, 13824, False, vocab_size=152064),
                             14_770_033_664),
    "qwen3-0.6b": Published("Qwen/Qwen3-0.6B", qwen3(1024, 28, 16, 8, 3072, True), 596_049_920),
    "qwen3-1.7b": Published("Qwen/Qwen3-1.7B", qwen3(2048, 28, 16, 8, 6144, True), 1_720_574_976),
    "qwen3-1.7b-base": Published("Qwen/Qwen3-1.7B-Base", qwen3(2048, 28, 16, 8, 6144, True),
                                 1_720_574_976),
    "qwen3-4b": Published("Qwen/Qwen3-4B", qwen3(2560, 36, 32, 8, 9728, True), 4_022_468_096),
    "qwen3-4b-base": Published("Qwen/Qwen3-4B-Base", qwen3(2560, 36, 32, 8, 9728, True),
                               4_022_468_096),
    "qwen3-4b-thinking-2507": Published("Qwen/Qwen3-4B-Thinking-2507",
                                        qwen3(2560, 36, 32, 8, 9728, True, 5e6),
                                        4_022_468_096),
    "qwen3-8b": Published("Qwen/Qwen3-8B", qwen3(4096, 36, 32, 8, 12288, False), 8_190_735_360),
    "qwen3-8b-base": Published("Qwen/Qwen3-8B-Base", qwen3(4096, 36, 32, 8, 12288, False),
                               8_190_735_360),
    "qwen3-14b": Published("Qwen/Qwen3-14B", qwen3(5120, 40, 40, 8, 17408, False), 14_768_307_200),
    "qwen3-14b-base": Published("Qwen/Qwen3-14B-Base", qwen3(5120, 40, 40, 8, 17408, False),
                                14_768_307_200),
    "qwen3-32b": Published("Qwen/Qwen3-32B", qwen3(5120, 64, 64, 8, 25600, False), 32_762_123_264),
    "qwen3-30b-a3b": Published("Qwen/Qwen3-30B-A3B-Instruct-2507", qwen3_moe(*QWEN3_30B, 1e7),
                               30_532_122_624),
    "qwen3-30b-a3b-base": Published("Qwen/Qwen3-30B-A3B-Base", qwen3_moe(*QWEN3_30B, 1e6),
                                    30_532_122_624),
    "qwen3-235b-a22b": Published("Qwen/Qwen3-235B-A22B-Instruct-2507",
                                 qwen3_moe(4096, 94, 64, 4, 1536, 128, 5e6),
                                 235_093_634_560),
    "qwen3-480b-a35b": Published("Qwen/Qwen3-Coder-480B-A35B-Instruct",
                                 qwen3_moe(6144, 62, 96, 8, 2560, 160, 1e7),
                                 480_154_875_392),
    # The text model of the thinker, which transformers builds like Qwen3-MoE.
    "qwen3-omni-30b-a3b": Published("Qwen/Qwen3-Omni-30B-A3B-Instruct",
                                    qwen3_moe(*QWEN3_30B, 1e6, vocab_size=152064,
                                              max_position_embeddings=65536)),
    "qwen3-next-80b-a3b": Published("Qwen/Qwen3-Next-80B-A3B-Instruct",
                                    qwen_delta("3Next", 2048, 48, 16, 512, 32),
                                    79_674_391_296),
    "qwen3.5-397b-a17b": Published(
        "Qwen/Qwen3.5-397B-A17B",
        qwen_delta("3_5Moe", 4096, 60, 32, 1024, 64, vocab_size=248320,
                   rope_parameters=QWEN35_ROPE),
    ),
    "qwen3.5-35b-a3b": Published(
        "Qwen/Qwen3.5-35B-A3B",
        qwen_delta("3_5Moe", 2048, 40, 16, 512, 32, vocab_size=248320, rope_parameters=QWEN35_ROPE,
                   num_experts=256,
                   num_experts_per_tok=8),
    ),
    "gpt-oss-20b": Published("openai/gpt-oss-20b", gpt_oss(24, 32), 20_914_757_184),
    "gpt-oss-120b": Published("openai/gpt-oss-120b", gpt_oss(36, 128), 116_829_156_672),
    "olmo2-1b": Published("allenai/OLMo-2-0425-1B", olmo2(2048, 16, 16, 16, 8192)),
    "olmo2-7b": Published("allenai/OLMo-2-1124-7B", olmo2(*OLMO3_7B)),
    "olmo2-13b": Published("allenai/OLMo-2-1124-13B", olmo2(5120, 40, 40, 40, 13824)),
    "olmo2-32b": Published("allenai/OLMo-2-0325-32B", olmo2(5120, 64, 40, 8, 27648)),
    "olmo3-7b": Published("allenai/Olmo-3-7B-Instruct", olmo3(*OLMO3_7B), 7_298_011_136),
    "olmo3-7b-pt": Published(
        "allenai/Olmo-3-1025-7B, before its context was extended", olmo3(*OLMO3_7B, False),
        7_298_011_136,
    ),
    "olmo3-32b": Published("allenai/Olmo-3-32B-Think", olmo3(5120, 64, 40, 8, 27648),
                           32_233_522_176),
    "phi-3-mini": Published("microsoft/Phi-3-mini-4k-instruct", phi3(3072, 32, 32, 32, 8192, 32064),
                            3_821_079_552),
    "phi-3-medium": Published("microsoft/Phi-3-medium-4k-instruct",
                              phi3(5120, 40, 40, 10, 17920, 32064),
                              13_960_238_080),
    "phi-4": Published("microsoft/phi-4",
                       phi3(5120, 40, 40, 10, 17920, 100352, rope_theta=250000.0,
                            sliding_window=None,
                            max_position_embeddings=16384),
                       14_659_507_200),
    "phi-4-mini": Published("microsoft/Phi-4-mini-instruct",
                            phi3(3072, 32, 24, 8, 8192, 200064, **PHI4_MINI),
                            3_836_021_760),
    "command-r-35b": Published("CohereLabs/c4ai-command-r-v01",
                               cohere("Cohere", 8192, 40, 64, 64, 22528, logit_scale=0.0625,
                                      rope_theta=8e6),
                               34_980_831_232),
    "command-r7b": Published("CohereLabs/c4ai-command-r7b-12-2024",
                             cohere("Cohere2", 4096, 32, 32, 8, 14336, **COMMAND_R7B)),
    # Published totals of GLM include its MTP layer, and are rounded.
    "glm4.5-355b-a32b": Published("zai-org/GLM-4.5", GLM45),
    "glm4.5-106b-a12b": Published(
        "zai-org/GLM-4.5-Air",
        glm4_moe(4096, 46, 10944, 1408, 128, first_k_dense_replace=1, routed_scaling_factor=1.0),
    ),
    "glm4.6-355b-a32b": Published("zai-org/GLM-4.6", GLM45 | {"max_position_embeddings": 202752}),
    "minimax-m2-230b-a10b": Published("MiniMaxAI/MiniMax-M2", MINIMAX_M2),
    "smollm3-3b": Published("HuggingFaceTB/SmolLM3-3B", SMOLLM3, 3_075_098_624),
    "seed-oss-36b": Published("ByteDance-Seed/Seed-OSS-36B-Instruct", SEED_OSS, 36_151_104_512),
    "exaone4-32b": Published(
        "LGAI-EXAONE/EXAONE-4.0-32B",
        exaone4(5120, 64, 40, 27392, head_dim=128, sliding_window=4096,
                sliding_window_pattern="LLLG",
                layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 16,
                max_position_embeddings=131072),
    ),
    "exaone4-1.2b": Published(
        "LGAI-EXAONE/EXAONE-4.0-1.2B",
        exaone4(2048, 30, 32, 4096, head_dim=64, sliding_window=None,
                layer_types=["full_attention"] * 30, tie_word_embeddings=True,
                max_position_embeddings=65536),
    ),
    "ernie4.5-0.3b": Published("baidu/ERNIE-4.5-0.3B-PT", ERNIE, 360_748_032),
    # 50257 tokens, 2048 positions, in the paper; here padded, and more positions.
    "gpt3-175b": Published("Brown et al. 2020", gpt3(12288, 96, 96, 50257, 2048),
                           None, (50304 - 50257 + 16384 - 2048) * 12288),
}  # fmt: skip
