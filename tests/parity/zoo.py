"""Tiny transformers models of every family that has a table, and of what their config.json may say.

A case names a configuration class and what to give it; `make` writes a folder as `save_pretrained`
does and keeps the logits of some tokens, computed by transformers in float32 on the CPU. Sizes are
odd on purpose: heads that are not the width over their number, patterns of layers that end in the
middle, windows and chunks far below the number of tokens.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.tolerance import FACTOR, in_both_precisions, rounding_noise

VOCABULARY, ROWS, LENGTH = 131, 2, 48

# How our models are loaded to be compared.
SETTINGS = dict(
    dtype="float32",
    weight_dtype="float32",
    matmul_precision="highest",
    attention="dot_product",
    scan_layers=True,
)

FULL, SLIDING, CHUNKED, LINEAR = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
)
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
ABSENT = object()  # an entry that is taken out of config.json


@dataclass(frozen=True)
class Case:
    kind: str  # of transformers' classes: Llama, Gemma3Text …
    options: dict[str, Any]
    dtype: torch.dtype = torch.float32  # of the weights in the folder
    shard: str | None = None  # the largest file of weights
    published: dict[str, Any] = field(
        default_factory=dict
    )  # changes of config.json after it was written
    seed: int = 0


@dataclass(frozen=True)
class Specimen:
    case: Case
    folder: Path
    ids: np.ndarray  # [ROWS, LENGTH]
    logits: np.ndarray  # [ROWS, LENGTH, VOCABULARY]
    tolerance: float  # of `distance`


def case(kind: str, *parts: dict[str, Any], **own: Any) -> Case:
    options = dict(SIZES)
    for part in (*parts, own):
        options |= part
    about = {name: options.pop(name) for name in Case.__dataclass_fields__ if name in options}
    return Case(
        kind, {name: value for name, value in options.items() if value is not ABSENT}, **about
    )


def rope(kind: str = "default", theta: float = 10_000.0, **own: Any) -> dict[str, Any]:
    return {"rope_parameters": dict(rope_type=kind, rope_theta=theta, **own)}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {FULL: full["rope_parameters"], SLIDING: sliding["rope_parameters"]}}


EXPERTS = dict(num_experts=6, num_local_experts=6, num_experts_per_tok=2, moe_intermediate_size=40)
YARN = rope("yarn", factor=40.0, original_max_position_embeddings=32, beta_fast=32, beta_slow=1)
LATENT = dict(
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=8,
    n_shared_experts=1,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    head_dim=ABSENT,
    first_k_dense_replace=1,
    num_key_value_heads=4,
    num_hidden_layers=3,
)
DELTA = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=12,
    shared_expert_intermediate_size=36,
    num_hidden_layers=5,
)
GEMMA4 = dict(
    num_hidden_layers=7, sliding_window=12, global_head_dim=24, hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=VOCABULARY,
)  # fmt: skip
GEMMA4_EXPERTS = dict(
    enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=40
)
LLAMA4 = dict(
    num_hidden_layers=5,
    intermediate_size_mlp=72,
    num_local_experts=4,
    num_experts_per_tok=1,
    attention_chunk_size=7,
    floor_scale=8,
)
GLM4_MOE = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=40,
    first_k_dense_replace=1,
    num_hidden_layers=3,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=0,
)
NO_HEAD_DIM = dict(head_dim=ABSENT)  # heads together are as wide as the model
FACTORS = dict(
    short_factor=[1.0, 1.02, 1.1, 1.25, 1.5, 2.0], long_factor=[1.0, 1.2, 2.5, 5.5, 11.0, 23.5]
)
GPT2 = dict(vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, n_positions=64)
# One family a line where it can be; the first of a family is its plain form.
CASES = {
    "llama": case("Llama", num_key_value_heads=4),
    "llama five to one": case(
        "Llama",
        rope(theta=10_000.5),
        hidden_size=80,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=24,
        intermediate_size=77,
        num_hidden_layers=3,
        rms_norm_eps=1e-4,
        hidden_act="gelu",
    ),
    "llama tied with biases": case(
        "Llama",
        num_attention_heads=6,
        head_dim=8,
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "llama 3.1": case(
        "Llama",
        rope(
            "llama3",
            3_333.3,
            factor=2.5,
            low_freq_factor=0.7,
            high_freq_factor=3.0,
            original_max_position_embeddings=24,
        ),
    ),
    "llama yarn": case(
        "Llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            attention_factor=0.8,
            beta_fast=16,
        ),
    ),
    "llama published": case(
        "Llama",
        published={
            "rope_parameters": ABSENT,
            "head_dim": ABSENT,
            "rope_theta": 500_000.0,
            "dtype": ABSENT,
            "torch_dtype": "float32",
            "rope_scaling": dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
        head_dim=12,
    ),
    "llama published linear": case(
        "Llama",
        published={"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 2.5}},
    ),
    "llama bfloat16": case("Llama", dtype=torch.bfloat16, shard="20KB"),
    "llama float16": case("Llama", dtype=torch.float16, tie_word_embeddings=True),
    "mistral": case("Mistral", sliding_window=5, head_dim=20),
    "mistral without window": case(
        "Mistral", sliding_window=None, num_hidden_layers=3, num_key_value_heads=1
    ),
    "mixtral": case("Mixtral", EXPERTS, shard="60KB"),
    "mixtral sliding": case(
        "Mixtral",
        EXPERTS,
        rope(theta=1_000_000.0),
        sliding_window=5,
        num_local_experts=5,
        num_experts_per_tok=3,
        num_experts=5,
        published={"rope_parameters": ABSENT},
    ),
    "gemma": case("Gemma", num_key_value_heads=1),
    "gemma untied": case(
        "Gemma", tie_word_embeddings=False, attention_bias=True, num_hidden_layers=3
    ),
    "gemma published": case(
        "Gemma", published={"hidden_act": "gelu", "hidden_activation": None, "head_dim": 16}
    ),
    "gemma2": case("Gemma2", num_hidden_layers=3, query_pre_attn_scalar=20, sliding_window=5),
    "gemma2 tight caps": case(
        "Gemma2",
        num_hidden_layers=3,
        attn_logit_softcapping=1.5,
        final_logit_softcapping=4.0,
        sliding_window=7,
        query_pre_attn_scalar=16,
        layer_types=[FULL, SLIDING, SLIDING],
    ),
    "gemma2 without caps": case(
        "Gemma2",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        sliding_window=12,
        attention_bias=True,
        tie_word_embeddings=False,
    ),
    "gemma3": case("Gemma3Text", num_hidden_layers=8, query_pre_attn_scalar=24, sliding_window=5),
    "gemma3 stretched": case(
        "Gemma3Text",
        ropes(rope("linear", 1e6, factor=8.0), rope(theta=10_000.25)),
        num_hidden_layers=3,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
        tie_word_embeddings=False,
        final_logit_softcapping=6.0,
    ),
    "gemma3 published": case(
        "Gemma3Text",
        num_hidden_layers=5,
        sliding_window=5,
        published={
            "rope_parameters": ABSENT,
            "layer_types": ABSENT,
            "sliding_window_pattern": 3,
            "rope_theta": 50_000.0,
            "rope_local_base_freq": 7_000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        },
    ),
    "gemma4": case(
        "Gemma4Text", GEMMA4, num_hidden_layers=8, sliding_window=5, final_logit_softcapping=30.0
    ),
    "gemma4 shared": case(
        "Gemma4Text",
        GEMMA4,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        tie_word_embeddings=False,
    ),
    "gemma4 deep": case(
        "Gemma4Text", GEMMA4, num_hidden_layers=13, intermediate_size=24, num_key_value_heads=1
    ),
    "gemma4 ropes": case(
        "Gemma4Text",
        GEMMA4,
        ropes(
            rope("proportional", 300_000.0, partial_rotary_factor=0.5, factor=2.0),
            rope(theta=777.5),
        ),
        num_hidden_layers=3,
        layer_types=[FULL, SLIDING, FULL],
        attention_bias=True,
    ),
    "gemma4 experts": case("Gemma4Text", GEMMA4, GEMMA4_EXPERTS),
    "gemma4 shared experts": case(
        "Gemma4Text",
        GEMMA4,
        GEMMA4_EXPERTS,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        num_hidden_layers=2,
        top_k_experts=3,
        final_logit_softcapping=30.0,
        sliding_window=5,
    ),
    "qwen2": case("Qwen2", head_dim=ABSENT),
    "qwen2 sliding": case(
        "Qwen2",
        head_dim=ABSENT,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=1,
        tie_word_embeddings=True,
        published={"layer_types": ABSENT},
    ),
    "qwen2 mixed": case(
        "Qwen2",
        head_dim=20,
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=[SLIDING, FULL, SLIDING],
    ),
    "qwen3": case("Qwen3"),
    "qwen3 tied with biases": case(
        "Qwen3", tie_word_embeddings=True, attention_bias=True, num_key_value_heads=1
    ),
    "qwen3 yarn sliding": case(
        "Qwen3",
        rope("yarn", 1e6, factor=4.0, original_max_position_embeddings=32),
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
        hidden_size=80,
        published={"layer_types": ABSENT},
    ),
    "qwen3 experts": case("Qwen3Moe", EXPERTS, norm_topk_prob=True),
    "qwen3 experts in turn": case(
        "Qwen3Moe",
        EXPERTS,
        num_hidden_layers=6,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=False,
    ),
    "qwen3 experts sliding": case(
        "Qwen3Moe",
        EXPERTS,
        use_sliding_window=True,
        sliding_window=5,
        attention_bias=True,
        num_experts_per_tok=4,
        num_experts=7,
        num_local_experts=ABSENT,
    ),
    "qwen3-next": case("Qwen3Next", EXPERTS, DELTA, num_hidden_layers=6),
    "qwen3-next one to one": case(
        "Qwen3Next",
        EXPERTS,
        DELTA,
        rope(partial_rotary_factor=0.5),
        num_hidden_layers=3,
        linear_num_value_heads=2,
        layer_types=[LINEAR, FULL, LINEAR],
        mlp_only_layers=[1],
        norm_topk_prob=False,
        linear_conv_kernel_dim=3,
    ),
    "qwen3-next four to one": case(
        "Qwen3Next",
        EXPERTS,
        DELTA,
        num_hidden_layers=2,
        linear_num_value_heads=8,
        linear_value_head_dim=8,
        layer_types=[FULL, LINEAR],
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "qwen3.5": case(
        "Qwen3_5Text",
        DELTA,
        full_attention_interval=2,
        published={"layer_types": ABSENT, "full_attention_interval": 2},
    ),
    "qwen3.5 experts": case(
        "Qwen3_5MoeText", EXPERTS, DELTA, layer_types=[LINEAR, FULL], num_hidden_layers=2
    ),
    "qwen3.5 one to one": case(
        "Qwen3_5Text",
        DELTA,
        rope(partial_rotary_factor=0.5),
        num_hidden_layers=3,
        linear_num_value_heads=2,
        layer_types=[FULL, LINEAR, LINEAR],
        linear_conv_kernel_dim=3,
        attention_bias=True,
    ),
    "deepseek2": case(
        "DeepseekV2", LATENT, YARN, topk_method="group_limited_greedy", routed_scaling_factor=1.5
    ),
    "deepseek2 lite": case(
        "DeepseekV2",
        LATENT,
        q_lora_rank=None,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
    ),
    "deepseek2 two temperatures": case(
        "DeepseekV2",
        LATENT,
        attention_bias=True,
        v_head_dim=20,
        published={"rope_interleave": True},
        rope_parameters=YARN["rope_parameters"] | dict(mscale=0.707, mscale_all_dim=1.3),
    ),
    "deepseek2 published": case(
        "DeepseekV2",
        LATENT,
        topk_method="group_limited_greedy",
        published={
            "rope_parameters": ABSENT,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
            "head_dim": ABSENT,
            "rope_scaling": dict(
                type="yarn",
                factor=40,
                original_max_position_embeddings=32,
                beta_fast=32,
                beta_slow=1,
                mscale=0.707,
                mscale_all_dim=0.707,
            ),
        },
    ),
    "deepseek3": case(
        "DeepseekV3",
        LATENT,
        rope_parameters=YARN["rope_parameters"] | dict(mscale=1.0, mscale_all_dim=1.0),
    ),
    "deepseek3 ungrouped": case(
        "DeepseekV3",
        LATENT,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
        first_k_dense_replace=0,
        num_hidden_layers=2,
    ),
    "deepseek3 without latent queries": case(
        "DeepseekV3",
        LATENT,
        q_lora_rank=None,
        attention_bias=True,
        n_shared_experts=2,
        first_k_dense_replace=2,
    ),
    "kimi": case(
        "DeepseekV3",
        LATENT,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=2.827,
        n_routed_experts=12,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_hidden_layers=4,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=50_000.0,
            factor=32.0,
            beta_fast=1.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
            original_max_position_embeddings=16,
        ),
    ),
    # Scores of keys are sums of what is above zero over heads: with few of them many are zero, and
    # a tie is anyone's.
    "deepseek3.2": case("DeepseekV32", LATENT, index_n_heads=24, index_head_dim=16, index_topk=12),
    # Ties at zero at the cut of nearly every query: chosen as torch.topk chooses, which depends on
    # the length.
    "deepseek3.2 ties": case(
        "DeepseekV32", LATENT, index_n_heads=2, index_head_dim=16, index_topk=10
    ),
    "deepseek3.2 sees all": case(
        "DeepseekV32",
        LATENT,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=64,
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters=YARN["rope_parameters"] | dict(mscale=1.0, mscale_all_dim=0.8),
    ),
    "gpt-oss": case("GptOss", EXPERTS, num_hidden_layers=3, sliding_window=5),
    "gpt-oss without biases": case(
        "GptOss",
        EXPERTS,
        rope("yarn", 150_000.0, factor=8.0, original_max_position_embeddings=24, truncate=False),
        num_hidden_layers=3,
        sliding_window=7,
        attention_bias=False,
        layer_types=[FULL, FULL, SLIDING],
        num_experts_per_tok=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        swiglu_limit=1.0,
    ),
    "llama4": case("Llama4Text", LLAMA4),
    "llama4 maverick": case(
        "Llama4Text",
        LLAMA4,
        interleave_moe_layer_step=2,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        num_hidden_layers=4,
    ),
    "llama4 listed": case(
        "Llama4Text",
        LLAMA4,
        moe_layers=[0, 3],
        no_rope_layers=[0, 1, 1, 0, 1],
        num_experts_per_tok=2,
        attn_scale=0.4,
        attention_bias=True,
    ),
    "llama4 scaled": case(
        "Llama4Text",
        LLAMA4,
        num_hidden_layers=3,
        no_rope_layer_interval=2,
        tie_word_embeddings=True,
        floor_scale=5,
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=500_000.0,
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=1.0,
            original_max_position_embeddings=32,
        ),
        layer_types=[CHUNKED, FULL, FULL],
    ),
    "olmo2": case("Olmo2", head_dim=ABSENT, num_hidden_layers=3),
    "olmo2 published": case(
        "Olmo2",
        NO_HEAD_DIM,
        published={"rope_parameters": ABSENT, "rope_theta": 500_000},
    ),
    "olmo3": case("Olmo3", num_hidden_layers=6, head_dim=ABSENT, sliding_window=5),
    "olmo3 yarn": case(
        "Olmo3",
        ropes(
            rope(
                "yarn",
                500_000.0,
                factor=8.0,
                original_max_position_embeddings=32,
                attention_factor=1.2,
            ),
            rope(theta=500_000.0),
        ),
        num_hidden_layers=3,
        layer_types=[SLIDING, FULL, SLIDING],
        head_dim=20,
        sliding_window=5,
        attention_bias=True,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    ),
    "olmo3 published": case(
        "Olmo3",
        num_hidden_layers=4,
        head_dim=ABSENT,
        sliding_window=5,
        published={
            "rope_parameters": ABSENT,
            "layer_types": ABSENT,
            "rope_theta": 500_000,
            "rope_scaling": dict(
                rope_type="yarn",
                factor=8.0,
                original_max_position_embeddings=32,
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=1.2,
            ),
        },
    ),
    "phi3": case("Phi3", NO_HEAD_DIM, sliding_window=5),
    "phi3 long": case(
        "Phi3",
        NO_HEAD_DIM,
        rope("longrope", 9_000.5, **FACTORS),
        original_max_position_embeddings=16,
        num_hidden_layers=3,
        tie_word_embeddings=True,
    ),
    "phi3 short partial": case(
        "Phi3",
        NO_HEAD_DIM,
        rope("longrope", attention_factor=1.3, partial_rotary_factor=0.75, **FACTORS),
        hidden_size=64,
        max_position_embeddings=16_384,
        original_max_position_embeddings=4096,
        num_key_value_heads=4,
    ),
    "phi3 published": case(
        "Phi3",
        NO_HEAD_DIM,
        rope("longrope", partial_rotary_factor=0.75, **FACTORS),
        hidden_size=64,
        original_max_position_embeddings=8,
        published={
            "rope_parameters": ABSENT,
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {"type": "longrope", **FACTORS},
        },
    ),
    "cohere": case("Cohere", NO_HEAD_DIM, num_hidden_layers=3),
    "cohere normed queries": case(
        "Cohere",
        NO_HEAD_DIM,
        rope(theta=8_000_000.0),
        use_qk_norm=True,
        logit_scale=0.8333,
        num_attention_heads=6,
        num_key_value_heads=3,
        attention_bias=True,
        layer_norm_eps=1e-4,
    ),
    "cohere untied": case(
        "Cohere", NO_HEAD_DIM, tie_word_embeddings=False, logit_scale=0.25, num_key_value_heads=4
    ),
    "cohere2": case(
        "Cohere2", NO_HEAD_DIM, num_hidden_layers=5, sliding_window=5, logit_scale=0.25
    ),
    "cohere2 published": case(
        "Cohere2",
        NO_HEAD_DIM,
        num_hidden_layers=3,
        sliding_window=7,
        layer_types=[SLIDING, FULL, SLIDING],
        published={
            "layer_types": ABSENT,
            "sliding_window_pattern": 2,
            "rope_parameters": ABSENT,
            "rope_theta": 50_000.0,
        },
    ),
    "glm4_moe": case("Glm4Moe", GLM4_MOE, attention_bias=True, use_qk_norm=True),
    "glm4_moe grouped": case(
        "Glm4Moe",
        GLM4_MOE,
        rope(partial_rotary_factor=0.25),
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        norm_topk_prob=False,
        first_k_dense_replace=0,
    ),
    "glm4_moe published": case(
        "Glm4Moe",
        GLM4_MOE,
        rope(theta=1e6, partial_rotary_factor=0.5),
        attention_bias=True,
        published={
            "rope_parameters": ABSENT,
            "rope_theta": 1e6,
            "rope_scaling": None,
            "partial_rotary_factor": 0.5,
        },
    ),
    "minimax_m2": case(
        "MiniMaxM2", EXPERTS, rope(partial_rotary_factor=0.5), num_key_value_heads=1
    ),
    "minimax_m2 published": case(
        "MiniMaxM2",
        EXPERTS,
        rope(theta=5e6, partial_rotary_factor=0.25),
        num_experts_per_tok=3,
        published={
            "rope_parameters": ABSENT,
            "rope_theta": 5e6,
            "rotary_dim": 4,
            "use_qk_norm": True,
            "scoring_func": "sigmoid",
            "qk_norm_type": "per_layer",
        },
    ),
    "smollm3": case("SmolLM3", num_hidden_layers=5),
    "smollm3 listed": case(
        "SmolLM3",
        num_hidden_layers=3,
        no_rope_layers=[0, 1, 0],
        use_sliding_window=True,
        sliding_window=5,
        layer_types=[SLIDING, FULL, FULL],
        tie_word_embeddings=False,
        attention_bias=True,
        mlp_bias=True,
    ),
    "smollm3 sliding": case(
        "SmolLM3",
        NO_HEAD_DIM,
        num_hidden_layers=3,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=5,
        published={"layer_types": ABSENT, "no_rope_layers": ABSENT},
    ),
    "seed_oss": case("SeedOss"),
    "seed_oss without biases": case(
        "SeedOss", attention_bias=False, mlp_bias=True, tie_word_embeddings=True
    ),
    "exaone4": case("Exaone4", num_hidden_layers=5, sliding_window=5),
    "exaone4 without window": case(
        "Exaone4",
        rope(
            "llama3",
            1e6,
            factor=16.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        NO_HEAD_DIM,
        sliding_window=None,
        layer_types=[FULL, FULL],
        tie_word_embeddings=True,
    ),
    "exaone4 published": case(
        "Exaone4",
        num_hidden_layers=3,
        sliding_window=7,
        layer_types=[SLIDING, FULL, SLIDING],
        published={
            "sliding_window_pattern": "LLLG",
            "rope_parameters": ABSENT,
            "rope_theta": 1e6,
            "rope_scaling": None,
        },
    ),
    "ernie4_5": case("Ernie4_5"),
    "ernie4_5 with biases": case(
        "Ernie4_5", use_bias=True, tie_word_embeddings=False, num_key_value_heads=1
    ),
    "gpt2": Case("GPT2", GPT2),
    "gpt2 wide": Case(
        "GPT2",
        GPT2
        | dict(
            n_inner=70, activation_function="relu", n_layer=3, n_head=3, layer_norm_epsilon=1e-3
        ),
    ),
    "gpt2 untied": Case("GPT2", GPT2 | dict(activation_function="gelu", tie_word_embeddings=False)),
}
# A small one of each family.
ONE_EACH = [
    "llama",
    "mistral",
    "mixtral sliding",
    "gemma",
    "gemma2",
    "gemma3 stretched",
    "gemma4 shared experts",
    "qwen2 mixed",
    "qwen3",
    "qwen3 experts sliding",
    "qwen3-next one to one",
    "qwen3.5 one to one",
    "qwen3.5 experts",
    "deepseek2 lite",
    "deepseek3",
    "deepseek3.2",
    "deepseek3.2 ties",
    "gpt-oss",
    "llama4 scaled",
    "olmo2",
    "olmo3 yarn",
    "phi3 long",
    "cohere",
    "cohere2",
    "glm4_moe",
    "minimax_m2",
    "smollm3",
    "seed_oss",
    "exaone4",
    "ernie4_5",
    "gpt2",
]
# Cases that are quick and see most of the code.
FAST = {
    "llama",
    "llama 3.1",
    "llama tied with biases",
    "llama published",
    "llama bfloat16",
    "mistral",
    "mixtral sliding",
    "gemma",
    "gemma2",
    "gemma3 stretched",
    "gemma4 ropes",
    "gemma4 shared experts",
    "qwen2 mixed",
    "qwen3",
    "qwen3 experts sliding",
    "qwen3-next one to one",
    "qwen3.5 one to one",
    "deepseek2 lite",
    "deepseek3",
    "deepseek3.2 sees all",
    "gpt-oss",
    "llama4 scaled",
    "olmo3 yarn",
    "gpt2",
    "gpt2 wide",
    "phi3",
    "phi3 long",
    "phi3 short partial",
    "cohere",
    "cohere normed queries",
    "cohere2",
    "glm4_moe",
    "minimax_m2",
    "smollm3",
    "seed_oss",
    "exaone4",
    "ernie4_5",
}


def parameters(
    names: Iterable[str], fast: Collection[str] = FAST, further: Any = pytest.mark.slow
) -> list[Any]:
    """For pytest.mark.parametrize: all but the fast ones have the mark `further`."""
    return [pytest.param(name, marks=() if name in fast else further) for name in names]


def make(case: Case, folder: Path) -> Specimen:
    """Write a folder of the case, and what transformers makes of it."""
    torch.manual_seed(case.seed)
    config = getattr(transformers, f"{case.kind}Config")(**case.options)
    model = transformers.AutoModelForCausalLM.from_config(config)
    stir(model)
    model.to(case.dtype).save_pretrained(
        folder, **({"max_shard_size": case.shard} if case.shard else {})
    )
    if case.published:
        path = folder / "config.json"
        entries = json.loads(path.read_text()) | case.published
        path.write_text(
            json.dumps({name: value for name, value in entries.items() if value is not ABSENT})
        )
    ids = np.random.default_rng(case.seed).integers(3, VOCABULARY, (ROWS, LENGTH))
    return Specimen(case, folder, ids, *logits_and_tolerance(folder, ids))


def stir(model: torch.nn.Module) -> None:
    """Fresh weights hide mistakes: attention is nearly even, norms are ones, biases, sinks and
    scales stand for nothing. Make them of a size that shows."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn_like(tensor)
            if tensor.ndim < 2:
                tensor.add_(0.1 * noise)
            elif "embed_tokens" in name or "wte" in name or "wpe" in name:
                tensor.copy_(noise)
            else:
                tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)
            if name.endswith("A_log"):
                tensor.sub_(2)  # a state that decays slowly and reaches back over many tokens


def hf_model(folder: Path) -> torch.nn.Module:
    """transformers' model of a folder, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",  # torch's grouped product has no float64
        local_files_only=True,
    )
    return model.eval()


def logits(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids), use_cache=False).logits.numpy()


def hf_logits(folder: Path, ids: np.ndarray) -> np.ndarray:
    return logits(hf_model(folder), ids)


def logits_and_tolerance(folder: Path, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """transformers' logits, and a bound on the `distance` from them by what float32 costs
    transformers itself.
    """

    float32, float64 = in_both_precisions(hf_model(folder), lambda model: logits(model, ids))
    return float32, FACTOR * rounding_noise(float32, float64) / float(float32.std())


def continued(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """The likeliest next tokens, each from the whole text before it."""
    tokens = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            best = model(input_ids=tokens, use_cache=False).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, best], 1)
    return tokens[0, len(prompt) :].tolist()


def distance(logits: Any, expected: np.ndarray) -> float:
    """The largest error, of the standard deviation of what is expected."""
    return float(np.abs(np.asarray(logits) - expected).max() / expected.std())
