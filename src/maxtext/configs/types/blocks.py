"""What the layers of each decoder_block are made of, for rules that ask whether a key would act.

`models/` builds the layers; tests/trainers/test_no_silent_keys.py holds these facts against what is
built. Functions look at settings that are not derived yet, and at the facts of a checkpoint.
"""

from typing import Any

STAND_INS = ("simple", "simple_mlp")  # products in place of layers
EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "qwen3_custom_moe",
    "qwen3_next",
    "qwen3_5",
    "deepseek",
    "gpt_oss",
    "llama4",
    "gemma4",
)
DELTA_NETS = ("qwen3_next", "qwen3_5")
NARROW = "qwen3_custom_moe"  # whose layers have one residual line and no place for add-ons
# What the layers see, in blocks that do not leave it to attention_type.
PATTERNS = {
    **{name: {"sliding", "full"} for name in ("gemma2", "gemma3", "gemma4", "olmo3", "gpt_oss")},
    **{name: {"linear", "full"} for name in DELTA_NETS},
    "llama4": {"chunk", "full"},
}
WINDOWED = ("mistral", "mixtral")  # all layers slide where there is a window
KINDS = {
    "global": "full",
    "mla": "full",
    "local_sliding": "sliding",
    "chunk": "chunk",
    "full": "unmasked",
}
NORMS_QUERIES = (
    "gemma3",
    "gemma4",
    *DELTA_NETS,
)  # with or without use_qk_norm, and always with a scale
SKIPS_POSITIONS = (
    "default",
    "llama2",
    "mistral",
    "mixtral",
    "gemma",
    "gpt3",
    "llama4",
)  # by nope_layer_interval


def block(c: Any) -> str:
    return c.decoder_block.value


def attends(c: Any) -> bool:
    return block(c) not in STAND_INS


def latent(c: Any) -> bool:
    """Whether attention is multi-head latent attention."""
    return c.attention_type == "mla"


def plainly_attends(c: Any) -> bool:
    """Whether layers project queries, keys and values as most models do."""
    return attends(c) and not latent(c)


def sees(c: Any) -> set[str]:
    """The kinds of a model's layers: full, sliding, chunk, unmasked, linear."""
    if c.architecture.layer_kinds:
        return set(c.architecture.layer_kinds)
    if block(c) in PATTERNS:
        return PATTERNS[block(c)]
    if block(c) in WINDOWED and c.sliding_window_size:
        return {"sliding"}
    return {KINDS[c.attention_type]} if attends(c) else set()


def experts(c: Any) -> bool:
    return c.num_experts > 1 and block(c) in EXPERTS


def dense_layers(c: Any) -> bool:
    """Whether some layer has an MLP that is base_mlp_dim wide."""
    if not experts(c) or block(c) == "gemma4":  # which has one beside its experts
        return attends(c)
    if c.architecture.moe_layers:
        return not all(c.architecture.moe_layers)
    before = block(c) == "deepseek" and c.first_num_dense_layers > 0
    between = block(c) == "llama4" and c.interleave_moe_layer_step > 1
    return before or between


def dense_mlp(c: Any) -> bool:
    """Whether some layer has an MLP of any width that every token passes."""
    return dense_layers(c) or (experts(c) and c.shared_experts > 0)


def layered(c: Any) -> bool:
    """Whether a layer is a mixer and a feed-forward on a residual stream, to which memories and
    further layers fit.
    """
    return attends(c) and block(c) != NARROW


def in_turn(c: Any) -> bool:
    """Whether attention and MLP follow each other, each with its own place on the stream."""
    return layered(c) and block(c) != "default"


def rotates(c: Any) -> bool:
    return (
        attends(c) and c.trainable_position_size < 0 and not c.use_untrainable_positional_embedding
    )


def custom_remat(c: Any) -> bool:
    return c.remat_policy == "custom"
